"""The part of a coordinator that its HTTP API calls, with scripted answers; slots in memory."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from coordinator.decoding.sessions import RequestKey
from outrider.config.deployment import CoordinatorConfig
from outrider.errors import Overloaded, StoreUnavailable
from outrider.foundation.api_keys import Caller
from outrider.interfaces.messages import ReplicaDescription
from outrider.interfaces.request import (
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    Started,
    Tokens,
    Usage,
)
from outrider.models.tokenizer import TokenizerText
from outrider.registry.registry import NO_FIGURES
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule

STARTED = Started("1" * 32, "m", 1, Rule.TOKEN, num_prompt_tokens=2)
TOKENS = Tokens(0, (7,), "a", (Origin.BONUS,), ())
FINISHED = Finished(FinishReason.STOP, Usage(2, 1), Metrics(2, 1, 0, 1.0, 1.0, 1.0, 1))


class ToldCoordinator:
    """Events that each generation returns, or an error that it raises."""

    text: TokenizerText | None = None
    config = CoordinatorConfig(num_draft_tokens=4)
    served = ReplicaDescription("m", "", "", 100, "float32", 64, (), 1)
    fleet = SimpleNamespace(replicas=lambda *_: [], heard_ms_ago=None)
    num_running, figures, trouble = 0, NO_FIGURES, ""

    def __init__(self, *events: Event | Exception) -> None:
        self.events = events
        self.calls: list[tuple[GenerateRequest, str, str, bool]] = []
        self.num_admitted = 0

    @property
    def streams(self) -> "ToldCoordinator":
        return self

    admission = health = streams

    @property
    def tenants(self) -> list[str]:
        return [call[1] for call in self.calls]

    async def generate(
        self,
        request: GenerateRequest,
        tenant: str,
        traceparent: str,
        *,
        resumable: bool,
        is_admitted: bool,
    ) -> AsyncGenerator[Event]:
        self.calls.append((request, tenant, traceparent, resumable))
        self.num_admitted += not is_admitted
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event

    async def known(self, key: RequestKey) -> RequestKey:
        return key

    def generate_once(
        self,
        request: GenerateRequest,
        key: RequestKey,
        resume: Any,
        tenant: str,
        traceparent: str,
        *,
        is_admitted: bool,
    ) -> AsyncGenerator[Event]:
        return self.generate(request, tenant, traceparent, resumable=True, is_admitted=is_admitted)

    def admitted(self, num_sessions: int) -> AbstractContextManager[None]:
        self.num_admitted += num_sessions
        return nullcontext()


class MemorySlots:
    """A `SlotStore` for one caller."""

    def __init__(self, retry_after_ms: int = 1, takes_s: float = 0.0) -> None:
        self.taken: set[str] = set()
        self.depths: list[int] = []
        """Slots that are taken, by request."""
        self.away = False
        self._retry_after_ms, self._takes_s = retry_after_ms, takes_s

    async def take(self, caller: Caller, slots: Sequence[str], depth: int) -> None:
        if self.away:
            raise StoreUnavailable("away")
        if len(self.taken | set(slots)) > caller.concurrency:
            raise Overloaded("taken", retry_after_ms=self._retry_after_ms)
        self.depths.append(depth)
        self.taken.update(slots)

    async def update(self, slots: Mapping[str, tuple[Collection[str], Collection[str]]]) -> None:
        await asyncio.sleep(self._takes_s)
        if self.away:
            raise StoreUnavailable("away")
        for held, free in slots.values():
            self.taken = (self.taken - set(free)) | set(held)

    async def close(self) -> None:
        """Nothing is open."""
