"""The paged cache of keys and values: blocks, prefixes, and the tokens each session holds."""
