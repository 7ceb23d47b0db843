"""Hostile input for every HTTP route and gRPC method, beside a session that must not notice it."""
