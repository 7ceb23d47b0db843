"""Requests before they run: limits, tokens, grammars, fair turns."""
