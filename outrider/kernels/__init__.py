"""Fused kernels for CPUs, what the processor supports, and threads."""
