"""Measures several *sides*, such as plain and speculative decoding, on the same prompts.

A machine's load, clock rates and temperature drift over minutes. So the sides take turns. In a
turn, a side decodes one prompt, or several at a time (`_blocks`). When every side has had a turn,
the order of the sides is reversed. The turns of all sides with the same prompts are one
*repetition*. No side decodes a prompt twice, because drafters may copy from earlier answers."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from outrider.errors import OutriderError, Unavailable
from outrider.interfaces.request import GenerateRequest, Prompt, RoundReport, Tokens
from outrider.limits import DEADLINE_MS_MAX, SEED_MAX
from outrider.speculation.sampling_params import SamplingParams

from .prompts import WARM_UP_PROMPTS, BenchPrompt
from .rates import Work

WARM_UP_TOKENS_MAX = 32
WARM_UP_REPETITIONS = 5
WAVES_MIN = 2
"""Least number of prompts of a turn for each request that runs at a time."""

LATE_S_MAX = 120.0
"""A turn may end so long after the time for which it was planned."""

Progress = Callable[[str], None]


def bench_request(
    prompt: Prompt, max_tokens: int, temperature: float = 0.0, **more: Any
) -> GenerateRequest:
    """A request with the longest deadline. `more` has further fields of the request."""
    sampling = SamplingParams(temperature=temperature)
    return GenerateRequest(
        prompt, sampling=sampling, max_tokens=max_tokens, deadline_ms=DEADLINE_MS_MAX, **more
    )


class Round(NamedTuple):
    report: RoundReport
    """The coordinator's report, or None if the request did not ask for reports."""
    tokens: Tokens
    seconds: float
    """Time since the tokens of the previous round arrived, or since the request was sent."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer, and its times."""

    token_ids: tuple[int, ...]
    """The answer's tokens, including the EOS; empty if the server sends no token ids."""
    started_s: float
    """When the request was sent, on a clock that all completions of a side share."""
    seconds: float
    """Time from sending the request to the end of the answer."""
    num_rounds: int = 0
    """Unknown, and 0, for an answer by HTTP."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_drafts: int = 0
    """Number of rounds with draft tokens."""
    chunk_s: Sequence[float] = ()
    """Seconds from sending the request to each chunk with tokens. Completions of a `LibraryProcess`
    have only the time to the first token."""
    prompt_tokens: int = 0
    counted_tokens: int = 0
    """Number of tokens of an answer by HTTP, which has no token ids."""
    rounds: Sequence[Round] = ()
    """The rounds of an answer by gRPC. If one message has several rounds, they count as one."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or self.counted_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first exception, not an `ExceptionGroup`."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


class BenchClient(ABC):
    """Decodes the prompts of one side."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Decodes a request whose prompt is a text. Raises an `OutriderError` if decoding fails."""

    async def generate_all(
        self, requests: Sequence[GenerateRequest], concurrency: int
    ) -> list[Completion]:
        """Decodes prompts, `concurrency` at a time. The first error cancels all other prompts."""
        places = asyncio.Semaphore(concurrency)

        async def generate(request: GenerateRequest) -> Completion:
            async with places:
                return await self.generate(request)

        async with together() as group:
            tasks = [group.create_task(generate(request)) for request in requests]
        return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Contestant:
    side: str
    client: BenchClient
    request: GenerateRequest
    """A request without text. `ask` adds the text and seed of each prompt."""
    concurrency: int
    is_warm: bool = False
    """Whether the client has decoded before, so that it needs no warm-up."""

    def ask(self, prompt: BenchPrompt, index: int) -> GenerateRequest:
        """The request for prompt number `index`. Numbers of warm-up prompts are negative. Without a
        seed in `request`, the server chooses each seed."""
        first = self.request.seed
        seed = None if first is None else (first + index) & SEED_MAX
        return replace(self.request, prompt=prompt.text, seed=seed)

    async def decode(
        self, prompts: Sequence[BenchPrompt], block: Sequence[int]
    ) -> tuple[list[Completion], Work]:
        """Returns the completions of a turn, and their tokens and wall time."""
        requests = [self.ask(prompts[index], index) for index in block]
        completions = await self.client.generate_all(requests, self.concurrency)
        end = max(completion.started_s + completion.seconds for completion in completions)
        seconds = end - min(completion.started_s for completion in completions)
        return completions, Work(sum(completion.num_tokens for completion in completions), seconds)


@dataclass(frozen=True, slots=True)
class SideResult:
    completions: tuple[Completion, ...]
    """In the order of the prompts."""
    turns: tuple[Work, ...]
    """Tokens and wall time of each turn."""

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


async def measure(
    prompts: Sequence[BenchPrompt],
    contestants: Sequence[Contestant],
    progress: Progress,
    drops: Callable[[str, OutriderError], bool] = lambda side, error: False,
    rest_s: float = 0.0,
    ends_s: float = math.inf,
    up_s: float = math.inf,
) -> dict[str, SideResult]:
    """Warms up every side, and then measures the sides in turns. Pauses for `rest_s` before each
    turn. If a side fails, calls `drops`. If `drops` returns True, continues without the side.

    Begins no further repetition that would probably end after the time `ends_s` of the event loop.
    It is expected to take as long as the longest one so far. Begins no turn or warm-up after
    `up_s`, and then omits the repetition that has not ended. Without any repetition, returns no
    sides. A side fails if it still runs `LATE_S_MAX` after `ends_s` and after its turn began."""
    clock = asyncio.get_running_loop().time
    sides = {contestant.side: contestant for contestant in contestants}
    by_side: dict[str, dict[int, Completion]] = {side: {} for side in sides}
    turns: dict[str, list[Work]] = {side: [] for side in sides}
    blocks = _blocks(len(prompts), max(c.concurrency for c in contestants))
    longest_s = 0.0
    for number, block in enumerate([range(0), *blocks]):
        began_s = clock()
        if began_s >= up_s or (number > 1 and began_s + longest_s > ends_s):
            num_ended = max(map(len, turns.values()))
            progress(f"the time is up after {num_ended} of {len(blocks)} repetitions")
            break
        where = "warming up"
        if block:
            where = f"prompt {block[-1] + 1} of {len(prompts)}: {prompts[block[-1]].category}"
        progress(where)
        done: dict[str, tuple[list[Completion], Work]] = {}
        for side in list(reversed(by_side) if block and number % 2 == 0 else by_side):
            if (now_s := clock()) >= up_s:
                break
            try:
                async with _limited(side, max(now_s, ends_s) + LATE_S_MAX):
                    if not block:
                        await _warm_up(sides[side])
                        continue
                    await asyncio.sleep(rest_s)
                    done[side] = await sides[side].decode(prompts, block)
            except OutriderError as error:
                if not drops(side, error):
                    raise
                del by_side[side]
        if done.keys() == by_side.keys():
            for side, (completions, work) in done.items():
                by_side[side] |= zip(block, completions, strict=True)
                turns[side].append(work)
        longest_s = max(longest_s, clock() - began_s) if block else 0.0
    return {
        side: SideResult(tuple(done[i] for i in sorted(done)), tuple(turns[side]))
        for side, done in by_side.items()
        if done
    }


@asynccontextmanager
async def _limited(side: str, late_s: float) -> AsyncIterator[None]:
    """Raises `Unavailable` if the context does not end before the time `late_s`."""
    try:
        async with asyncio.timeout_at(late_s if math.isfinite(late_s) else None):
            yield
    except TimeoutError:
        raise Unavailable(f"{side} did not end its turn in the time of the benchmark") from None


async def _warm_up(contestant: Contestant) -> None:
    """Decodes the warm-up prompts. Their seeds differ from those of measured prompts: `suffix` does
    not add an answer to its history if an earlier session had the same seed."""
    if contestant.is_warm:
        return
    for index, prompt in enumerate(WARM_UP_PROMPTS, start=1):
        request = contestant.ask(prompt, -index)
        short = min(WARM_UP_TOKENS_MAX, request.max_tokens or WARM_UP_TOKENS_MAX)
        await contestant.client.generate(replace(request, max_tokens=short))


def _blocks(num_prompts: int, concurrency: int) -> list[range]:
    """The indices of the prompts of each turn. With one request at a time, a turn has one prompt.

    With several requests at a time, each of the n turns has every n-th prompt. At the end of each
    turn, fewer than `concurrency` requests run, so more turns would mean less load. With a single
    turn, all sides except the first could use prefixes that another side cached."""
    num_turns = num_prompts
    if concurrency > 1:
        num_turns = min(num_prompts, max(2, num_prompts // (WAVES_MIN * concurrency)))
    return [range(turn, num_prompts, num_turns) for turn in range(num_turns)]


def medians_ms(
    works: Sequence[Callable[[int], object]],
    repetitions: int,
    undo: Callable[[], object] = lambda: None,
) -> list[float]:
    """The median time of each function, ms. The functions take turns. Each function gets the number
    of the repetition, which is negative in the warm-up. After each call, `undo` runs untimed."""
    times: list[list[float]] = [[] for _ in works]
    for index in range(-WARM_UP_REPETITIONS, repetitions):
        for work, own in zip(works, times, strict=True):
            started = time.perf_counter()
            work(index)
            seconds = time.perf_counter() - started
            undo()
            if index >= 0:
                own.append(seconds * 1e3)
    return [median(own) for own in times]
