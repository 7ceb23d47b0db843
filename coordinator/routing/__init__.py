"""The replicas of a deployment, and each session's route to its draft and its target."""
