"""Outrider: disaggregated speculative decoding. This package has the code that services share."""
