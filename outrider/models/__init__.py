"""Finds, loads and speeds up models, and reads and writes drafters."""
