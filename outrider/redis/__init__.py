"""Redis: addresses, connections, and the embedded server."""
