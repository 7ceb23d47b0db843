"""The paged cache of keys and values: pages, prefixes, tensors, and the tokens of each session."""
