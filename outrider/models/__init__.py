"""Models: where they come from, how they are loaded, and what replaces their modules."""
