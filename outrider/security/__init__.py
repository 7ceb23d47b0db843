"""Callers: API keys and what each allows, rate limits, and the gate that asks for both."""
