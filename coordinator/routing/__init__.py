"""Replica pools and discovery, and each session's connection to its draft and its target."""
