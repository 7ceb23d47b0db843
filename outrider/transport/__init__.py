"""gRPC: servers, streams, statuses, and codecs between protobuf messages and dataclasses."""
