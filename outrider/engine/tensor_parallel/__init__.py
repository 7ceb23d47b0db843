"""One model on several ranks: processes with a share of the weights that make the same calls."""
