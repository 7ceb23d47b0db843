"""Requests at a steady rate, each compared with its fault-free stream, and when its tokens came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from outrider.client import Client, GenerateRequest, Tokens
from outrider.speculation.sampling import Rule

PEAK_S: Final = 10.0
END_S: Final = 60.0
"""What runs in the end may take so long."""


@dataclass(frozen=True)
class Work:
    """What is asked."""

    num_tokens: int
    num_seeds: int
    """So many streams there are."""
    num_clients: int
    """That keep the deployment busy."""


@dataclass
class Asked:
    """One request."""

    began: float
    """s of the loop's clock."""
    arrivals: list[float] = field(default_factory=list)
    """When tokens came."""
    ended: float | None = None
    """None as long as nothing has come of it."""
    error: str = ""
    """What it died of."""
    is_wrong: bool = False
    """Whether its tokens were not those of the fault-free stream."""

    def overlaps(self, begin: float, end: float) -> bool:
        """Whether it was in flight at any moment of this time."""
        return self.began < end and (self.ended is None or self.ended > begin)

    def is_past(self, at: float) -> bool:
        """Whether it has ended, or tokens have come since."""
        return self.ended is not None or bool(self.arrivals and self.arrivals[-1] > at)

    def gap(self, begin: float, end: float) -> float:
        """The longest wait for tokens that overlaps this time, as much of it as comes after its
        beginning. The first tokens are waited for since the request began."""
        times = [self.began, *self.arrivals]
        gaps = [
            after - max(before, begin)
            for before, after in pairwise(times)
            if after > begin and before < end
        ]
        return max(gaps, default=0.0)


class Load:
    """Clients of one deployment, through the library and by nothing else."""

    def __init__(self, addresses: Callable[[], str], work: Work, seed: int) -> None:
        self._addresses = addresses
        self._work = work
        self._random = random.Random(seed)
        self._expected: list[tuple[int, ...]] = []
        self._running: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []

    async def prepare(self) -> float:
        """Takes down the fault-free streams; then requests a second of as many clients as
        keep a deployment busy."""
        seeds = range(self._work.num_seeds)
        self._expected = [await self._stream(seed, Asked(0.0)) for seed in seeds]
        loop = asyncio.get_running_loop()
        until, number = loop.time() + PEAK_S, 0

        async def ask() -> None:
            nonlocal number
            while loop.time() < until:
                await self._stream(self._random.choice(seeds), Asked(loop.time()))
                number += 1

        began = loop.time()
        await asyncio.gather(*(ask() for _ in range(self._work.num_clients)))
        return number / (loop.time() - began)

    async def run(self, requests_per_second: float) -> None:
        """Asks at random times, at this rate, until it is cancelled."""
        while True:
            task = asyncio.create_task(self._ask(self._random.randrange(self._work.num_seeds)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            await asyncio.sleep(self._random.expovariate(requests_per_second))

    async def finish(self) -> None:
        """Waits for what runs, but not for ever."""
        if self._running:
            await asyncio.wait(self._running, timeout=END_S)

    def report(self) -> dict[str, Any]:
        """What became of the requests."""
        errors = [one.error for one in self.asked if one.error]
        return {
            "num_requests": len(self.asked),
            "num_failed": len(errors),
            "num_wrong": sum(one.is_wrong for one in self.asked),
            "num_stuck": sum(one.ended is None for one in self.asked),
            "errors": sorted(set(errors))[:20],
        }

    async def _ask(self, seed: int) -> None:
        loop = asyncio.get_running_loop()
        one = Asked(loop.time())
        self.asked.append(one)
        try:
            one.is_wrong = await self._stream(seed, one) != self._expected[seed]
        except Exception as error:  # noqa: BLE001 (whatever it is, the request has failed)
            one.error = f"{type(error).__name__}: {error}"
        one.ended = loop.time()

    async def _stream(self, seed: int, one: Asked) -> tuple[int, ...]:
        async with Client(self._addresses) as client:
            return await self._tokens(client, seed, one)

    async def is_right(self, client: Client, number: int) -> bool:
        """Asks for one of the streams."""
        seed = number % self._work.num_seeds
        return await self._tokens(client, seed, Asked(0.0)) == self._expected[seed]

    async def _tokens(self, client: Client, seed: int, one: Asked) -> tuple[int, ...]:
        loop, found = asyncio.get_running_loop(), []
        request = GenerateRequest(
            tuple(range(10 + seed, 60)), max_tokens=self._work.num_tokens, seed=seed,
            rule=Rule.COUPLED, ignore_eos=True,
        )  # fmt: skip
        async for event in client.generate(request):
            if isinstance(event, Tokens):
                found += event.token_ids
                one.arrivals.append(loop.time())
        return tuple(found)
