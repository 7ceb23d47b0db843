"""Constraints on a completion: a JSON schema, any JSON object, a regular expression, or choices.
This package does not import torch."""
