"""Sessions: the owner's pure view of one, and the stores that keep them (in memory, Redis)."""
