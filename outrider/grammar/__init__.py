"""Constraints on a completion: a JSON schema, any JSON object, a regular expression, or choices.
Nothing here imports torch."""
