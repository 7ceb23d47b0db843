"""One model on several ranks. Each rank has a share of the weights, and makes the same calls."""
