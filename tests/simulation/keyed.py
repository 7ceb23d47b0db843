"""Clients that repeat a request with its idempotency key, as those of HTTP do."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from coordinator.decoding.sessions import RequestKey
from coordinator.http_api.progress import Progress, RepeatedRequests
from coordinator.service import CoordinatorService
from outrider.errors import DataLoss, StaleEpoch, Unavailable
from outrider.interfaces.request import Event, GenerateRequest, Started

AGAIN_S = 0.1, 1.0


@dataclass(frozen=True)
class KeyedRequest:
    request: GenerateRequest
    key: str
    last_event_id: str | None = None
    """Id of the newest event that the client has."""


@dataclass(frozen=True)
class Part:
    """An event, its id, and its session."""

    event: Event
    event_id: str
    session_id: str


async def answer_once(
    service: CoordinatorService, repeated: RepeatedRequests, asked: KeyedRequest
) -> AsyncGenerator[Part]:
    """What a coordinator sends: the events that the client lacks."""
    progress, session_id = Progress(1, asked.last_event_id), ""
    new = RequestKey(asked.key, "digest")
    async with repeated.turn(new, progress, tenant=""):
        key = await service.admission.known(new)
        resume = progress.resume_request(0)
        async with aclosing(service.streams.generate_once(asked.request, key, resume)) as events:
            async for event in events:
                if isinstance(event, Started):
                    session_id = event.session_id
                for part, event_id in progress.unsent(0, event, [{"event": event}]):
                    yield Part(part["event"], event_id, session_id)


async def keyed_events(world: Any, request: GenerateRequest, key: str) -> AsyncGenerator[Event]:
    """The events of a request, each once. After a failure, it is sent to any coordinator again.
    Raises `DataLoss` if they are not all of the same session."""
    asked, rng, session_id = KeyedRequest(request, key), world.rng, ""
    while True:
        transport = world.connect(rng.choice(world.ports))
        try:
            async with aclosing(transport.events(asked, math.inf)) as parts:
                async for part in parts:
                    session_id = session_id or part.session_id
                    if part.session_id != session_id:
                        raise DataLoss(f"session {session_id} became {part.session_id}")
                    yield part.event
                    asked = replace(asked, last_event_id=part.event_id)
            return
        except (Unavailable, StaleEpoch):
            await asyncio.sleep(rng.uniform(*AGAIN_S))
