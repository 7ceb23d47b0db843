"""Sends hostile input to every HTTP route and gRPC method, beside sessions whose answers must not
change."""

import sys
from pathlib import Path

# The helpers of all tests are in `tests/`. Only pytest adds that folder to the path.
sys.path.append(str(Path(__file__).parents[1]))
