"""The registry of a deployment's replicas, with what they announce about themselves."""
