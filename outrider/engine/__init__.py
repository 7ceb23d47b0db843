"""Runs models: forward passes over many sequences, on CPUs and CUDA devices."""
