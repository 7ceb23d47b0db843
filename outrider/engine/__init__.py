"""Loading and running models."""
