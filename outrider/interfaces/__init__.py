"""What the parts exchange: requests, messages, the interface and the costs of an engine."""
