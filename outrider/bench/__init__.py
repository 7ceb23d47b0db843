"""Measurements and their reports."""
