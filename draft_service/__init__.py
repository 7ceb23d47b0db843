"""Proposes tokens for a target to check: with a model, or by prompt lookup."""
