"""Steps on a CUDA device: tables that a kernel reads."""
