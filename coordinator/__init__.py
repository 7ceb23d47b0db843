"""The coordinator: the accept-reject loop, sessions, and what users call."""
