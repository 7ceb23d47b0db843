"""Mutants of the product: which the tests catch."""
