"""The gRPC face of the target service (`outrider.v1.Target`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from outrider.messages import VerifyAnswer, VerifyItem
from outrider.v1 import target_pb2
from outrider.wire import codecs
from outrider.wire.link import ReplicaService
from outrider.wire.replica_servicer import ReplicaServicer


class TargetServicer(ReplicaServicer[VerifyItem, VerifyAnswer]):
    """Answers the calls of `outrider.v1.Target`."""

    def __init__(self, service: ReplicaService[VerifyItem, VerifyAnswer]) -> None:
        super().__init__(service, codecs.VERIFY)

    def verify(
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncGenerator[target_pb2.VerifyReply]:
        """One stream of a coordinator."""
        return self.stream(requests)
