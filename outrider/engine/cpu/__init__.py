"""Runs steps on the fused kernels of a CPU library."""
