"""Runs steps on a CUDA device, with Triton kernels for attention."""
