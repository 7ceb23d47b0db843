"""Drafters that need no replica."""
