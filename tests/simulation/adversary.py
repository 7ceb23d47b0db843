"""Who stands between the coordinator, its replicas and its store, and does harm from a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outrider.errors import OutriderError, StoreUnavailable
from outrider.sessions.memory_store import MemoryStore
from outrider.sessions.store import (
    Append,
    Counters,
    FinishReason,
    NewSession,
    SessionRecord,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Odds:
    """How often what happens: probabilities per message or call."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    store_failure: float = 0.0
    crash_s: float = 0.0
    """Mean virtual seconds between crashes of replicas of a role; 0 = none."""
    scale_s: float = 0.0
    """The same, between two that one of them is replaced by a new one."""
    fall_s: float = 0.0
    """The same, between two that a coordinator dies or stands still for a while."""

    @classmethod
    def drawn(cls, rng: random.Random) -> Odds:
        """Calm or wild, as the seed has it."""
        wildness = rng.choice((0.3, 1.0, 2.0))
        return cls(
            drop=0.02 * wildness,
            delay=0.10 * wildness,
            duplicate=0.05 * wildness,
            reorder=0.10 * wildness,
            store_failure=0.05 * wildness,
            crash_s=1.0 / wildness,
            scale_s=rng.choice((0.0, 2.0 / wildness)),
            fall_s=rng.choice((0.0, 4.0 / wildness)),
        )


CALM = Odds()


class Adversary:
    """Harms messages and calls. `faults` counts what it did."""

    def __init__(self, rng: random.Random, odds: Odds) -> None:
        self._rng = rng
        self.odds = odds
        self.faults: Counter[str] = Counter()

    def deliver(self, message: Callable[[], None]) -> None:
        """The `deliver` of a `MemoryLink`: a message travels 0.2 ms, unless something happens."""
        rng, odds, loop = self._rng, self.odds, asyncio.get_running_loop()
        if rng.random() < odds.drop:
            self.faults["drop"] += 1
            return
        travel_s = 0.0002
        if rng.random() < odds.reorder:
            self.faults["reorder"] += 1
            travel_s += rng.uniform(0.0, 0.005)
        if rng.random() < odds.delay:
            self.faults["delay"] += 1
            travel_s += rng.expovariate(1 / 0.1)
        loop.call_later(travel_s, message)
        if rng.random() < odds.duplicate:
            self.faults["duplicate"] += 1
            loop.call_later(travel_s + rng.expovariate(1 / 0.05), message)

    async def again_and_again(
        self, kind: str, mean_s: float, harm: Callable[[], Awaitable[None]]
    ) -> None:
        """Does harm until cancelled, so many virtual seconds apart on average; 0 = never."""
        while mean_s > 0:
            await asyncio.sleep(self._rng.expovariate(1 / mean_s))
            self.faults[kind] += 1
            await harm()
        await asyncio.get_running_loop().create_future()

    def pick(self, options: Sequence[T]) -> T:
        """Which one is harmed."""
        return self._rng.choice(options)

    def pause_s(self, longest: float) -> float:
        """How long something stays away."""
        return self._rng.uniform(0.0, longest)

    def store_fails(self) -> bool:
        """Whether this half of a call of the store fails."""
        failed = self._rng.random() < self.odds.store_failure / 2
        if failed:
            self.faults["store"] += 1
        return failed


class UnreliableStore:
    """A store whose calls fail before or after they were carried out."""

    def __init__(self, inner: MemoryStore, adversary: Adversary) -> None:
        self.inner = inner
        self.is_cut = False
        """Whether nothing reaches it."""
        self._adversary = adversary

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(0.0002)
        if self.is_cut or self._adversary.store_fails():
            raise StoreUnavailable("the adversary ate the question")
        result = await call()
        if self.is_cut or self._adversary.store_fails():
            raise StoreUnavailable("the adversary ate the answer")
        return result

    async def open(self, session: NewSession) -> None:
        await self._call(lambda: self.inner.open(session))

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        return await self._call(lambda: self.inner.append(appends))

    async def renew(self, owner: str, sessions: Sequence[tuple[str, int]]) -> list[str]:
        return await self._call(lambda: self.inner.renew(owner, sessions))

    async def take_over(self, session_id: str, owner: str) -> SessionRecord:
        return await self._call(lambda: self.inner.take_over(session_id, owner))

    async def finish(
        self, session_id: str, epoch: int, reason: FinishReason, counters: Counters
    ) -> int:
        return await self._call(lambda: self.inner.finish(session_id, epoch, reason, counters))

    async def load(self, session_id: str) -> SessionRecord:
        return await self._call(lambda: self.inner.load(session_id))

    async def close(self) -> None:
        await self.inner.close()
