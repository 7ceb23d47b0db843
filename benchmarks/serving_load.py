"""Sends the requests of `bench serve` as they come, and keeps what came of them.

With a rate, requests come at their own times whether or not others are answered; one that finds no
place under `max_concurrency` waits in this client, which is told apart from its latency. Without a
rate all come at once, or, with `max_concurrency`, one whenever there is a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from outrider.errors import Unavailable, check

from .prompts import WARM_UP_PROMPTS, BenchPrompt
from .serving import ServingOptions
from .serving_arrivals import arrival_times
from .serving_records import Answer, Heard, Record, RequestFailed, ServingClient

LAG_PERIOD_S: Final = 0.05
"""How often this client looks whether its own event loop is late."""
WARM_UPS_AT_ONCE: Final = 16


class ServingRun:
    """One load. What it has measured can be read while it runs, and after it was cancelled."""

    def __init__(self, options: ServingOptions, client: ServingClient) -> None:
        self._options = options
        self._client = client
        self._prompts = options.load_prompts()
        self._began_at: float | None = None
        self._ended_s: float | None = None
        self.num_planned = options.num_requests(self._prompts)
        """None = as many as the duration has room for."""
        self.records: list[Record] = []
        """Of requests that are over, in the order of their ends."""
        self.num_running = 0
        self.num_failed = 0
        self.num_tokens = 0
        """Of those that are over."""
        self.lags_s: list[float] = []
        """How late this client's event loop was, each time it looked: what was read then was read
        so much later than it came."""

    @property
    def duration_s(self) -> float:
        """From the load's beginning to its last request's end; until now while it runs."""
        if self._began_at is None:
            return 0.0
        return self._now() if self._ended_s is None else self._ended_s

    async def warm_up(self) -> None:
        """Requests that are not measured. Raises `Unavailable` where one fails."""
        wanted = self._options.num_warmups
        most = min(self._options.max_concurrency or WARM_UPS_AT_ONCE, WARM_UPS_AT_ONCE)
        for first in range(0, wanted, most):
            await asyncio.gather(
                *(self._warm(number) for number in range(first, min(first + most, wanted)))
            )

    async def _warm(self, number: int) -> None:
        prompt = WARM_UP_PROMPTS[number % len(WARM_UP_PROMPTS)]
        heard = Heard(asyncio.get_running_loop().time)
        try:
            await self._client.answer(prompt, self._options.max_tokens, heard)
        except RequestFailed as failure:
            raise Unavailable(f"a warm-up request failed: {failure}") from failure

    async def measure(self) -> None:
        """Sends all requests and waits for them; their failures are in their records. Cancelling
        it cancels what runs, of which nothing is kept."""
        check(self._began_at is None, "a load is measured once")
        self._began_at = asyncio.get_running_loop().time()
        watch = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                await self._send(group)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._ended_s = self._now()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _send(self, group: asyncio.TaskGroup) -> None:
        most = self._options.max_concurrency
        places = None if most is None else asyncio.Semaphore(most)
        has_rate = self._options.request_rate != float("inf")
        for index, (due_s, prompt) in enumerate(self._arrivals()):
            if has_rate:
                if due_s >= self._time_limit:
                    return
                await self._until(due_s)
                group.create_task(self._wait_and_ask(index, prompt, due_s, places))
                continue
            if places is not None:
                await places.acquire()
            if self._now() >= self._time_limit:
                return
            group.create_task(self._ask(index, prompt, self._now(), places))

    def _arrivals(self) -> Iterator[tuple[float, BenchPrompt]]:
        times = arrival_times(
            self._options.request_rate, self._options.burstiness, self._options.seed
        )
        return zip(times, self._options.requests(self._prompts), strict=False)

    @property
    def _time_limit(self) -> float:
        return float("inf") if self._options.duration is None else self._options.duration

    async def _wait_and_ask(
        self, index: int, prompt: BenchPrompt, due_s: float, places: asyncio.Semaphore | None
    ) -> None:
        if places is not None:
            await places.acquire()
        await self._ask(index, prompt, due_s, places)

    async def _ask(
        self, index: int, prompt: BenchPrompt, due_s: float, places: asyncio.Semaphore | None
    ) -> None:
        """One request, for which there is a place; it gives it back."""
        heard = Heard(self._now)
        started_s = self._now()
        self.num_running += 1
        answer, error = Answer(None, None), ""
        try:
            most = prompt.max_tokens or self._options.max_tokens
            answer = await self._client.answer(prompt, most, heard)
            if heard.ended_s is None:
                error = "the answer ended without a token"
        except RequestFailed as failure:
            error = str(failure) or "failed"
        finally:
            self.num_running -= 1
            if places is not None:
                places.release()
        self._keep(
            Record(
                index=index,
                category=prompt.category,
                due_s=due_s,
                started_s=started_s,
                chunk_s=heard.chunk_s,
                chunk_tokens=heard.chunk_tokens,
                ended_s=self._now() if error or heard.ended_s is None else heard.ended_s,
                input_tokens=answer.input_tokens,
                output_tokens=answer.output_tokens,
                speculation=answer.speculation,
                rounds=answer.rounds,
                error=error,
            )
        )

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self.num_failed += bool(record.error)
        self.num_tokens += 0 if record.error else record.num_tokens

    def _now(self) -> float:
        """Seconds since the load began."""
        return asyncio.get_running_loop().time() - (self._began_at or 0.0)

    async def _until(self, due_s: float) -> None:
        ahead = due_s - self._now()
        if ahead > 0:
            await asyncio.sleep(ahead)

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.lags_s.append(max(0.0, loop.time() - due))
