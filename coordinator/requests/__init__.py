"""Checks requests before they run: limits, the prompt's tokens, and constraints."""
