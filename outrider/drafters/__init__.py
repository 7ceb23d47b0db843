"""The interface and the names of drafters, the look-up drafters, and how models draw tokens."""
