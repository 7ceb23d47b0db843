"""Runs sessions: opening, rounds, commits, text, resumption and end."""
