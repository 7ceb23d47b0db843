"""One model on several ranks: its weights are shared out, and every rank makes the same calls."""
