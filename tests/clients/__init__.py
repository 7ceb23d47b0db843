"""Other people's load generators, unmodified, against a deployment: `python -m tests.clients`,
`make test-clients`."""
