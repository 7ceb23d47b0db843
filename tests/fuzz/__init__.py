"""Hostile input for every HTTP route and gRPC method, beside a session that must not notice it."""

import sys
from pathlib import Path

# Helpers of all tests lie in `tests/`, which pytest knows of and Python does not.
sys.path.append(str(Path(__file__).parents[1]))
