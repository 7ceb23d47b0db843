"""Chooses how many draft tokens each round asks for."""
