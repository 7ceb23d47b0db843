"""Faster stand-ins for the modules of a loaded model."""
