"""Replica pools, discovery of replicas, and each session's routes to its draft and its target."""
