"""Which mutants of the product the tests catch."""
