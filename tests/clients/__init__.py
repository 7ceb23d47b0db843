"""Runs load generators and lm-eval of other projects, unmodified, against a deployment (`python -m
tests.clients`, `make test-clients`)."""
