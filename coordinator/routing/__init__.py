"""The replicas of a deployment, and each session's way to its draft and its target."""
