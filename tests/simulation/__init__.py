"""Simulated runs of the whole system; `python -m tests.simulation` runs seeds of them."""

import sys
from pathlib import Path

# Helpers of all tests are in `tests/`, which only pytest adds to the path.
sys.path.append(str(Path(__file__).parents[1]))
