"""Which replicas a deployment has, and what they announce."""
