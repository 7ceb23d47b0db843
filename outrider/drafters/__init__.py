"""The interface and the names of drafters, look-ups, and the drawing of tokens."""
