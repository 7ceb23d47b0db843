"""The coordinator: runs sessions and their decode loops, and serves clients by gRPC and HTTP."""
