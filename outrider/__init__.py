"""Disaggregated speculative decoding. This package has the code that the services share."""
