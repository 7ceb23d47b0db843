"""Mutants of the product: which of them the tests catch."""
