"""Proposes tokens for a target to check: with a model or with a head that reads features."""
