"""`outrider bench serve`: what a server does under load, with the flags and figures of `vllm bench
serve`.

With a rate, requests come at their own times whether or not others are answered; one that finds no
place under `max_concurrency` waits in this client, which is told apart from its latency. Without a
rate all come at once, or, with `max_concurrency`, one whenever there is a place.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, pairwise
from pathlib import Path
from typing import Final

import click

from outrider.errors import SettingError, Unavailable, check
from outrider.limits import (
    MAX_TOKENS_DEFAULT,
    NUM_DRAFT_TOKENS_MAX,
    SEED_MAX,
    TEMPERATURE_MAX,
)
from outrider.settings import check_range

from .options import Options, option
from .prompts import WARM_UP_PROMPTS, BenchPrompt, built_in_prompts, read_prompts
from .serve_clients import Answer, RequestFailed, ServingClient, StreamTimes

METRICS: Final = ("ttft", "tpot", "itl", "e2el")
GOALS: Final = ("ttft", "tpot", "e2el")
"""What `--goodput` may bound."""
GOAL_MS_MAX: Final = 1e9
REQUESTS_MAX: Final = 1_000_000
LAG_PERIOD_S: Final = 0.05
"""How often this client looks whether its own event loop is late."""
WARM_UPS_AT_ONCE: Final = 16
_GAPS: Final = 1_024
"""Gaps that are drawn at a time: one draw costs as much as hundreds of them together."""


def goal(text: str) -> tuple[str, float]:
    """One of `--goodput`."""
    name, _, value = text.partition(":")
    try:
        return name, float(value)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is wrong; it must be NAME:MS, a name of {', '.join(GOALS)}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """What `bench serve` is asked for."""

    base_url: str | None = option(
        None, "a server with OpenAI's interface, such as http://127.0.0.1:8000 [a deployment of "
        "ours, by gRPC]", metavar="URL", kind=str,
    )  # fmt: skip
    endpoint: str | None = option(
        None, "with --base-url: /v1/chat/completions, or /v1/completions [the first; with --raw "
        "the second]", metavar="PATH", kind=str,
    )  # fmt: skip
    num_prompts: int | None = option(
        None, "requests in all; prompts are repeated where there are fewer [one for each prompt]",
        low=1, high=REQUESTS_MAX,
    )  # fmt: skip
    num_warmups: int = option(0, "requests before anything is measured", low=0, high=10_000)
    request_rate: float = option(
        math.inf, "requests a second, at random times; inf = all at once", low=1e-3, metavar="R",
    )  # fmt: skip
    burstiness: float = option(
        1.0, "of the gaps' Gamma law: 1 = Poisson, less = bursts, inf = even", low=1e-3,
        metavar="SHAPE",
    )  # fmt: skip
    max_concurrency: int | None = option(
        None, "requests at a time; more wait in this client [no bound]", low=1, high=4_096
    )
    duration: float | None = option(
        None, "send requests for so long, then wait for those that run", low=1, high=86_400,
        metavar="S", kind=float,
    )  # fmt: skip
    seed: int = option(0, "of the random times", low=0, high=SEED_MAX)
    prompts: Path | None = option(
        None, "JSONL of `prompt` and, if wanted, `category` and `max_tokens` "
        f"[{len(built_in_prompts())} built-in prompts]", metavar="FILE", kind=Path,
    )  # fmt: skip
    max_tokens: int = option(
        128, "tokens of an answer whose prompt does not say", low=1, high=MAX_TOKENS_DEFAULT
    )
    temperature: float = option(
        0.0, "0 = always the likeliest token", low=0, high=TEMPERATURE_MAX, metavar="T"
    )
    ignore_eos: bool = option(False, "go on past the model's own end (not of OpenAI's)")
    raw: bool = option(False, "do not apply the model's chat template")
    num_draft_tokens: int | None = option(
        None, "by gRPC: draft tokens a round; 0 = plain decoding [the deployment's own]", low=0,
        high=NUM_DRAFT_TOKENS_MAX, metavar="K",
    )  # fmt: skip
    rounds: bool = option(
        False, "by gRPC: let each round be reported, for look-ahead and where rounds spend their "
        "time; costs a message a round",
    )  # fmt: skip
    goodput: tuple[tuple[str, float], ...] = option(
        (), f"what a good request keeps to: {', '.join(GOALS)}, such as ttft:200 tpot:50",
        metavar="NAME:MS", kind=goal, several=True,
    )  # fmt: skip
    percentile_metrics: tuple[str, ...] = option(
        METRICS, "whose percentiles to report", choices=METRICS, metavar="NAMES"
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,), "which percentiles", low=0, high=100, metavar="P,.."
    )
    save_result: Path | None = option(
        None, "write the JSON object to a file", metavar="FILE", kind=Path
    )
    save_detailed: bool = option(False, "with the times of each request in that file")
    report: Path | None = option(None, "write one page with plots", metavar="FILE.html", kind=Path)

    def __post_init__(self) -> None:
        if self.burstiness != 1 and self.request_rate == math.inf:
            raise SettingError("burstiness", "needs --request-rate: it is of the gaps between")
        names = [name for name, _ in self.goodput]
        if len(set(names)) != len(names) or not set(names) <= set(GOALS):
            raise SettingError(
                "goodput", f"{' '.join(names)} is wrong; it must be each of {', '.join(GOALS)} once"
            )
        for _, bound in self.goodput:
            check_range("goodput", bound, 0, GOAL_MS_MAX)
        at_once = self.request_rate == math.inf and self.max_concurrency is None
        if self.duration is not None and at_once and self.num_prompts is None:
            raise SettingError(
                "duration",
                "needs --request-rate or --max-concurrency: without them requests without end "
                "would come at once",
            )
        if self.save_detailed and self.save_result is None:
            raise SettingError("save_detailed", "needs --save-result")
        for name in ("save_result", "report"):  # Now, and not when everything has been measured.
            path = getattr(self, name)
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise SettingError(
                    name, f"{path} is wrong; it must be a file in a folder that exists"
                )

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to send, one of each category in turn, so that any first N of them are of all
        kinds. Raises `SettingError` for a file that is wrong."""
        waiting: dict[str, list[BenchPrompt]] = {}
        for prompt in built_in_prompts() if self.prompts is None else read_prompts(self.prompts):
            waiting.setdefault(prompt.category, []).append(prompt)
        most = max(map(len, waiting.values()))
        turns = (each[turn : turn + 1] for turn in range(most) for each in waiting.values())
        return tuple(prompt for found in turns for prompt in found)

    def shown(self, backend: str, server: str, model: str) -> dict[str, object]:
        """What was asked for, by vLLM's names in a result where it has one; infinity is text, as
        JSON has no number for it. `server` is HOST:PORT."""
        named = ("num_prompts", "num_warmups", "request_rate", "burstiness", "max_concurrency")
        others = ("max_tokens", "temperature", "ignore_eos", "raw", "num_draft_tokens", "seed")
        return {
            "backend": backend,
            "server": server,
            "model_id": model,
            **{n: "inf" if getattr(self, n) == math.inf else getattr(self, n) for n in named},
            "duration_limit": self.duration,
            "prompts": "built-in" if self.prompts is None else self.prompts.name,
            **{name: getattr(self, name) for name in others},
            "goodput": dict(self.goodput),
        }


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are seconds since the load began."""

    index: int
    """In the order of arrival."""
    category: str
    due_s: float
    """When it came."""
    started_s: float
    """When it was sent: later where `--max-concurrency` held it back, or this client was late."""
    ended_s: float
    """When the last chunk was read; of a failed request, when that was known."""
    times: StreamTimes
    """Of its chunks."""
    answer: Answer
    error: str = ""
    """Why it failed; empty if it did not."""

    @property
    def num_tokens(self) -> int:
        """Of the answer: as the server says, or else the number of its chunks."""
        told = self.answer.output_tokens
        return len(self.times.chunk_s) if told is None else told

    @property
    def ttft_s(self) -> float:
        """Time to first token; of an answer without any, to its end."""
        chunk_s = self.times.chunk_s
        return (chunk_s[0] if chunk_s else self.ended_s) - self.started_s

    @property
    def latency_s(self) -> float:
        """From sending to the last chunk."""
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks that follow each other."""
        return [after - before for before, after in pairwise(self.times.chunk_s)]


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning at which requests come, without end, ascending.

    Gaps are Gamma(shape `burstiness`, mean 1 / `rate`), as those of `vllm bench serve`: 1 is a
    Poisson process, less comes in bursts, more is more even, infinity is a metronome. The first
    request comes after a gap, too. An infinite rate: all at 0. Unlike vLLM's, the times are not
    stretched so that the last of them falls on its mean."""
    import numpy as np

    generator = np.random.default_rng(seed)
    now = 0.0
    while True:
        if math.isinf(burstiness) or math.isinf(rate):
            gaps = [1 / rate] * _GAPS
        else:
            gaps = generator.gamma(burstiness, 1 / (rate * burstiness), _GAPS).tolist()
        for gap in gaps:
            now += gap
            yield now


class Load:
    """What `bench serve` sends. What it has measured can be read while it runs, and after it was
    cancelled."""

    def __init__(
        self, options: ServeOptions, client: ServingClient, settings: Mapping[str, object]
    ) -> None:
        """`settings` are those of `ServeOptions.shown`."""
        self.options = options
        self.settings = settings
        self.date = ""
        """When it began, as vLLM writes it: YYYYMMDD-HHMMSS, local time."""
        self._client = client
        self._prompts = options.load_prompts()
        self._began_at: float | None = None
        self._ended_s: float | None = None
        self._time_limit = math.inf if options.duration is None else options.duration
        self._places = asyncio.Semaphore(options.max_concurrency or REQUESTS_MAX)
        self.num_planned = options.num_prompts
        """None = as many as the duration has room for."""
        if self.num_planned is None and options.duration is None:
            self.num_planned = len(self._prompts)
        self.records: list[Record] = []
        """Of requests that are over, in the order of their ends."""
        self.is_over = False
        """Else it still runs, or was interrupted: requests that ran then are in no record."""
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
        wanted = self.options.num_warmups
        most = min(self.options.max_concurrency or WARM_UPS_AT_ONCE, WARM_UPS_AT_ONCE)
        clock = asyncio.get_running_loop().time

        async def warm(number: int) -> None:
            prompt = WARM_UP_PROMPTS[number % len(WARM_UP_PROMPTS)]
            await self._client.answer(prompt, self.options.max_tokens, StreamTimes(clock))

        try:
            for first in range(0, wanted, most):
                await asyncio.gather(*map(warm, range(first, min(first + most, wanted))))
        except RequestFailed as failure:
            raise Unavailable(f"a warm-up request failed: {failure}") from failure

    async def measure(self) -> None:
        """Sends all requests and waits for them; their failures are in their records. Cancelling
        it cancels what runs, of which nothing is kept."""
        check(self._began_at is None, "a load is measured once")
        self._began_at = asyncio.get_running_loop().time()
        self.date = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        watch = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                await self._send(group)
            self.is_over = True
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._ended_s = self._now()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _send(self, group: asyncio.TaskGroup) -> None:
        options = self.options
        has_rate = options.request_rate != math.inf
        times = arrival_times(options.request_rate, options.burstiness, options.seed)
        prompts = cycle(self._prompts)
        for index in range(self.num_planned or REQUESTS_MAX):
            due_s, prompt = next(times), next(prompts)
            if has_rate:
                if due_s >= self._time_limit:
                    return
                await asyncio.sleep(max(0.0, due_s - self._now()))
            else:
                await self._places.acquire()
                due_s = self._now()
                if due_s >= self._time_limit:
                    return
            group.create_task(self._ask(index, prompt, due_s, has_place=not has_rate))

    async def _ask(self, index: int, prompt: BenchPrompt, due_s: float, *, has_place: bool) -> None:
        if not has_place:
            await self._places.acquire()
        times = StreamTimes(self._now)
        started_s = self._now()
        self.num_running += 1
        answer, error = Answer(), ""
        try:
            most = prompt.max_tokens or self.options.max_tokens
            answer = await self._client.answer(prompt, most, times)
            if times.ended_s is None:
                error = "the answer ended without a token"
        except RequestFailed as failure:
            error = str(failure) or "failed"
        finally:
            self.num_running -= 1
            self._places.release()
        ended_s = self._now() if error or times.ended_s is None else times.ended_s
        record = Record(index, prompt.category, due_s, started_s, ended_s, times, answer, error)
        self.records.append(record)
        self.num_failed += bool(error)
        self.num_tokens += 0 if error else record.num_tokens

    def _now(self) -> float:
        """Seconds since the load began."""
        return asyncio.get_running_loop().time() - (self._began_at or 0.0)

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.lags_s.append(max(0.0, loop.time() - due))
