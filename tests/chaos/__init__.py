"""Kills and stops real processes under load (`python -m tests.chaos`, `make chaos`)."""
