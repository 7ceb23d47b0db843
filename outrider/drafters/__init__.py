"""The interface of drafters, the names of all kinds, look-ups, and the drawing of tokens."""
