"""Proposes tokens for a target to verify, with a model or with a head that reads hidden states."""
