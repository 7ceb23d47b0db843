"""The gRPC face of the draft service (`outrider.v1.Draft`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from outrider.messages import DraftAnswer, DraftItem
from outrider.v1 import draft_pb2
from outrider.wire import codecs
from outrider.wire.link import ReplicaService
from outrider.wire.replica_servicer import ReplicaServicer


class DraftServicer(ReplicaServicer[DraftItem, DraftAnswer]):
    """Answers the calls of `outrider.v1.Draft`."""

    def __init__(self, service: ReplicaService[DraftItem, DraftAnswer]) -> None:
        super().__init__(service, codecs.DRAFT)

    def propose(
        self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncGenerator[draft_pb2.DraftReply]:
        """One stream of a coordinator."""
        return self.stream(requests)
