"""Sessions: an owner's view of one, and the stores (in memory, Redis)."""
