"""Which replicas a deployment has, what they say of their work, and where sessions begin."""
