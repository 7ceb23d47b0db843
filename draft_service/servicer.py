"""The gRPC face of the draft service (`outrider.v1.Draft`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from outrider.messages import DraftAnswer, DraftItem
from outrider.transport.codec import DRAFT
from outrider.transport.link import ReplicaService
from outrider.transport.stream_server import ReplicaServicer
from outrider.v1 import draft_pb2


class DraftServicer(ReplicaServicer[DraftItem, DraftAnswer]):
    """Answers the calls of `outrider.v1.Draft`."""

    def __init__(self, service: ReplicaService[DraftItem, DraftAnswer]) -> None:
        super().__init__(service, DRAFT)

    def propose(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncGenerator[draft_pb2.DraftReply]:
        """One stream of a coordinator."""
        return self.stream(requests)
