"""Chooses how many tokens each round drafts."""
