"""Steps on a CUDA device: tables that a kernel reads, and graphs that are captured and replayed."""
