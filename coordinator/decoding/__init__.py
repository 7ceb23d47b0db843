"""One session from its opening to its end: rounds, commits, text, recovery."""
