"""A caller that may run few generations at a time, and what holds for its slots."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from outrider.client import Client
from outrider.errors import Overloaded, Unavailable, check
from outrider.foundation.api_keys import Caller
from outrider.interfaces.request import Event, GenerateRequest, Started, Tokens
from outrider.limits import SLOT_LEASE_MS, SLOT_RENEWAL_MS
from outrider.redis.address import DEFAULT_KEY_PREFIX
from tests.simulation.redis_host import Redis

LIMITED = Caller("alice", "team", concurrency=1)
SLOTS = f"{DEFAULT_KEY_PREFIX}limit:{{{LIMITED.name}}}:slots".encode()
EXPIRED_S = (SLOT_LEASE_MS - SLOT_RENEWAL_MS) / 1e3


async def limited_events(
    client: Client, request: GenerateRequest, shapes: Counter[str]
) -> AsyncGenerator[Event]:
    """The events of a request by `LIMITED`, who waits whenever too many generations run. That also
    happens to a session that was without a coordinator for longer than a slot's lease."""
    session_id, num_tokens = "", 0
    while True:
        is_new, has_begun = not session_id, False
        stream = client.generate(request) if is_new else client.resume(session_id, num_tokens)
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    has_begun = True
                    if isinstance(event, Started):
                        session_id = event.session_id
                    elif isinstance(event, Tokens):
                        num_tokens += len(event.token_ids)
                    if is_new or not isinstance(event, Started):
                        yield event
            return
        except Overloaded as error:
            check(error.limit == "concurrency", f"refused: {error}")
            shapes["no_slot"] += 1
            wait_s = error.retry_after_ms / 1e3
        except Unavailable as error:
            if is_new or has_begun:
                raise
            wait_s = error.retry_after_ms / 1e3
        await asyncio.sleep(wait_s)


class SlotWatch:
    """Counts the caller's generations. Some do not count: their slots may have expired or been lost
    since they began, or a coordinator that ran them before freed them late."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._num_losses = 0
        self._clock_jump_s = 0.0
        self._begun: set[tuple[str, str]] = set()
        """Names of coordinator and slot."""
        self._excused: set[tuple[str, str]] = set()

    @property
    def is_used(self) -> bool:
        """Whether any coordinator has had a slot."""
        return bool(self._redis.history.slots_renewed)

    def note_begun(self, coordinator: str, session_id: str) -> None:
        """A generation of any caller has begun."""
        self._begun.add((coordinator, session_id))

    def look(self, nodes: Iterable[Any]) -> None:
        """Raises `InvariantError` if more generations run than are allowed."""
        now, history = asyncio.get_running_loop().time(), self._redis.history
        renewed, clock_jump_s = history.slots_renewed, self._redis.process.clock_jump_s
        all_lost = self._redis.has_lost(self._num_losses) or clock_jump_s != self._clock_jump_s
        self._num_losses, self._clock_jump_s = history.num_losses, clock_jump_s
        freed = history.slots_freed & self._begun
        held: set[str] = set()
        kept: set[tuple[str, str]] = set()
        for node in nodes:
            for slot in node.access._held.get(LIMITED.name, ()):
                one = node.name, slot
                has_expired = now - renewed.setdefault(one, now) > EXPIRED_S
                is_freed = any(name != node.name and slot == other for name, other in freed)
                if all_lost or has_expired or is_freed:
                    self._excused.add(one)
                kept.add(one)
                if one not in self._excused:
                    held.add(slot)
        self._excused &= kept
        check(len(held) <= LIMITED.concurrency, f"{LIMITED} runs {held}")

    def check_end(self, nodes: Iterable[Any]) -> None:
        """Raises `InvariantError` if a slot is held, after all generations have ended and the slots
        of dead coordinators have expired."""
        for node in nodes:
            check(not node.access._held, f"{node.name} still holds {node.access._held}")
        left = self._redis.primary.data.get(SLOTS)
        check(not left, f"Redis still holds {left}")
