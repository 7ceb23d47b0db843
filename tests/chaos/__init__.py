"""Kills and stops of real processes under load: `python -m tests.chaos`, `make chaos`."""
