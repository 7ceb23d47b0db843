"""Other people's load generators and lm-eval, unmodified, against a deployment:
`python -m tests.clients`, `make test-clients`."""
