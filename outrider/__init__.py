"""Outrider: disaggregated speculative decoding. What more than one service uses."""
