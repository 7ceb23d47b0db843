"""Who may call the coordinator, and how much: API keys, rate limits, admission."""
