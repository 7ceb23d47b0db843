"""gRPC at the edges: servers, streams, statuses, and protobuf messages <-> dataclasses."""
