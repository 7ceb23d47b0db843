"""Requests at a steady rate, each compared with its fault-free stream, and when its tokens came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.client import Client, GenerateRequest, Tokens
from outrider.errors import OutriderError
from outrider.speculation.sampling import Rule

NUM_TOKENS = 96
NUM_SEEDS = 16
PEAK_S = 10.0
PEAK_STREAMS = 8


@dataclass
class Asked:
    """One request."""

    began: float
    """s of the loop's clock."""
    arrivals: list[float] = field(default_factory=list)
    """When tokens came."""
    ended: float | None = None
    error: str = ""
    is_wrong: bool = False
    """Whether its tokens were not those of the fault-free stream."""

    def in_flight(self, at: float) -> bool:
        return self.began <= at and (self.ended is None or self.ended > at)

    def gap(self, begin: float, end: float) -> float:
        """The longest wait for tokens that overlaps this time."""
        times = [self.began, *self.arrivals]
        gaps = [
            after - before for before, after in pairwise(times) if after > begin and before < end
        ]
        return max(gaps, default=0.0)


class Load:
    """Clients of one deployment, through the library and by nothing else."""

    def __init__(self, addresses: Callable[[], str], seed: int) -> None:
        self._addresses = addresses
        self._random = random.Random(seed)
        self._expected: list[tuple[int, ...]] = []
        self._running: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []

    async def prepare(self) -> float:
        """Takes down the fault-free streams; then requests a second of as many clients as
        keep a deployment busy."""
        self._expected = [await self._stream(seed, Asked(0.0)) for seed in range(NUM_SEEDS)]
        loop = asyncio.get_running_loop()
        until, number = loop.time() + PEAK_S, 0

        async def ask() -> None:
            nonlocal number
            while loop.time() < until:
                await self._stream(self._random.randrange(NUM_SEEDS), Asked(loop.time()))
                number += 1

        began = loop.time()
        await asyncio.gather(*(ask() for _ in range(PEAK_STREAMS)))
        return number / (loop.time() - began)

    async def run(self, requests_per_second: float) -> None:
        """Asks at random times, at this rate, until it is cancelled."""
        while True:
            task = asyncio.create_task(self._ask(self._random.randrange(NUM_SEEDS)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            await asyncio.sleep(self._random.expovariate(requests_per_second))

    async def finish(self, timeout_s: float) -> int:
        """Waits for what runs; how many did not end."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
        return len(self._running)

    async def _ask(self, seed: int) -> None:
        loop = asyncio.get_running_loop()
        one = Asked(loop.time())
        self.asked.append(one)
        try:
            one.is_wrong = await self._stream(seed, one) != self._expected[seed]
        except OutriderError as error:
            one.error = f"{type(error).__name__}: {error}"
        one.ended = loop.time()

    async def _stream(self, seed: int, one: Asked) -> tuple[int, ...]:
        loop, found = asyncio.get_running_loop(), []
        request = GenerateRequest(
            tuple(range(10 + seed, 60)), max_tokens=NUM_TOKENS, seed=seed, rule=Rule.COUPLED,
            ignore_eos=True,
        )  # fmt: skip
        async with Client(self._addresses()) as client:
            async for event in client.generate(request):
                if isinstance(event, Tokens):
                    found += event.token_ids
                    one.arrivals.append(loop.time())
        return tuple(found)
