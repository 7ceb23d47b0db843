"""The gRPC face of the target service (`outrider.v1.Target`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from outrider.messages import VerifyAnswer, VerifyItem
from outrider.transport.codec import VERIFY
from outrider.transport.link import ReplicaService
from outrider.transport.stream_server import ReplicaServicer
from outrider.v1 import target_pb2


class TargetServicer(ReplicaServicer[VerifyItem, VerifyAnswer]):
    """Answers the calls of `outrider.v1.Target`."""

    def __init__(self, service: ReplicaService[VerifyItem, VerifyAnswer]) -> None:
        super().__init__(service, VERIFY)

    def verify(
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncGenerator[target_pb2.VerifyReply]:
        """One stream of a coordinator."""
        return self.stream(requests)
