"""Predicts what drafting would gain, before anything is deployed (`outrider plan`)."""
