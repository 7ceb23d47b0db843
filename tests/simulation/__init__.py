"""Simulated runs of the whole system; `python -m tests.simulation` runs seeds of them."""

import sys
from pathlib import Path

# Helpers of all tests lie in `tests/`, which pytest knows of and Python does not.
sys.path.append(str(Path(__file__).parents[1]))
