"""Hostile input for every HTTP route and gRPC method, beside a session that must not notice it."""

import sys
from pathlib import Path

# Helpers of all tests are in `tests/`, which only pytest adds to the path.
sys.path.append(str(Path(__file__).parents[1]))
