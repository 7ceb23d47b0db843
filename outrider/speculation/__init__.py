"""The mathematics of speculation. Pure."""
