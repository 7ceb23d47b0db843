"""The mathematics of speculative decoding, without clocks, input and output."""
