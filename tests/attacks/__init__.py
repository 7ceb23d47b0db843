"""Attacks on a running system: strangers without a key, and a tenant with one, try to use up its
memory, CPU, sockets or Redis, while the answers to another tenant must not stop."""

import sys
from pathlib import Path

# The helpers of all tests are in `tests/`. Only pytest adds that folder to the path.
sys.path.append(str(Path(__file__).parents[1]))
