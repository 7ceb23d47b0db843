"""Sessions: the owner's pure view of one, and the stores (in memory, Redis)."""
