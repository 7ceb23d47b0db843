"""The coordinator: the decode loop, sessions, and the interfaces for clients."""
