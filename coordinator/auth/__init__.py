"""Access control: API keys and rate limits."""
