"""The harness: decodes the same prompts on several sides in turn, and keeps what each took.

Other work, clock rates and heat drift over minutes, so no side is measured in one piece: sides take
turns prompt by prompt, forwards for one prompt and backwards for the next.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import OutriderError
from outrider.limits import SEED_MAX
from outrider.speculation.sampling_params import Rule

from .prompts import WARM_UP_PROMPTS, BenchPrompt

if TYPE_CHECKING:
    from outrider.request import RoundReport, Tokens

WARM_UP_TOKENS_MAX = 32
WARM_UP_REPETITIONS = 5

Progress = Callable[[str], None]
"""Is told what happens, one line at a time."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a prompt is decoded; None = the server's default."""

    max_tokens: int
    temperature: float
    rule: Rule | None = None
    seed: int | None = None
    num_draft_tokens: int | None = None
    """Bound on draft tokens a round; 0 = plain decoding."""
    ignore_eos: bool = False

    def for_prompt(self, index: int) -> Decoding:
        """That of a later prompt, or of one before the first: each has a seed of its own."""
        return replace(self, seed=((self.seed or 0) + index) & SEED_MAX)


class Round(NamedTuple):
    """One round, as its client saw it."""

    report: RoundReport
    """None where the request did not ask for it."""
    tokens: Tokens
    """Committed."""
    arrived_s: float
    """From the request's sending."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What came out, and what it took."""

    token_ids: tuple[int, ...]
    """With the EOS, if there is one; empty where they are not known."""
    started_s: float
    """When the request was sent, on a clock that all completions of a side share."""
    seconds: float
    """From there to the final event, prefill included."""
    num_rounds: int = 0
    num_draft_tokens: int = 0
    """Proposed in all."""
    num_accepted_draft_tokens: int = 0
    chunk_s: Sequence[float] = ()
    """Seconds from the request to each chunk with tokens, or at least to the first."""
    prompt_tokens: int = 0
    counted_tokens: int = 0
    """Tokens of a completion whose ids are not known, as by HTTP."""
    rounds: Sequence[Round] = ()
    """By gRPC; rounds that came together are one."""

    @property
    def num_tokens(self) -> int:
        """With the EOS, if there is one."""
        return len(self.token_ids) or self.counted_tokens

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to the first token; None where a side does not say."""
        return self.chunk_s[0] if self.chunk_s else None

    @property
    def tokens_per_second(self) -> float:
        """Of this completion alone."""
        return self.num_tokens / self.seconds


Job = tuple[BenchPrompt, Decoding]


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks of which the first to fail ends the others; what it raised is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


class BenchClient(ABC):
    """One side, as the measurement calls it."""

    @abstractmethod
    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt to its end. Raises an `OutriderError` where that fails."""

    async def generate_all(self, jobs: Sequence[Job], concurrency: int) -> list[Completion]:
        """Decodes prompts to their ends, `concurrency` at a time. Raises what `generate` does, once
        the other requests are cancelled."""
        places = asyncio.Semaphore(concurrency)

        async def one(job: Job) -> Completion:
            async with places:
                return await self.generate(*job)

        async with together() as group:
            tasks = [group.create_task(one(job)) for job in jobs]
        return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One side, and how it is called."""

    side: str
    client: BenchClient
    decoding: Decoding
    """Of the first prompt."""
    concurrency: int
    """Requests at a time."""

    async def decode(self, prompts: Sequence[BenchPrompt], block: Sequence[int]) -> SideResult:
        """What came of the prompts whose indices are in the block."""
        jobs = [(prompts[index], self.decoding.for_prompt(index)) for index in block]
        found = await self.client.generate_all(jobs, self.concurrency)
        end = max(one.started_s + one.seconds for one in found)
        return SideResult(tuple(found), end - min(one.started_s for one in found))


@dataclass(frozen=True, slots=True)
class SideResult:
    """What a side did: `completions` in the order of the prompts, [num_prompts]."""

    completions: tuple[Completion, ...]
    seconds: float
    """In which they were decoded; less than the sum of theirs where several ran at a time."""

    @property
    def num_tokens(self) -> int:
        """Of all completions."""
        return sum(completion.num_tokens for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all wall time."""
        return self.num_tokens / self.seconds


async def measure(
    prompts: Sequence[BenchPrompt],
    contestants: Sequence[Contestant],
    progress: Progress,
    drops: Callable[[str, OutriderError], bool] = lambda side, error: False,
    rest_s: float = 0.0,
) -> dict[str, SideResult]:
    """Warms every side up, then measures all of them, with a rest of so many seconds before each
    turn of a side. Where a side raises an error, `drops` says whether to go on without that side;
    otherwise raises the error, and cancels the requests that still run."""
    sides = {contestant.side: contestant for contestant in contestants}
    found: dict[str, dict[int, Completion]] = {side: {} for side in sides}
    seconds = dict.fromkeys(sides, 0.0)
    blocks = _blocks(len(prompts), max(c.concurrency for c in contestants))
    for number, block in enumerate([range(0), *blocks]):
        last = block[-1] if block else 0
        where = f"prompt {last + 1} of {len(prompts)}: {prompts[last].category}"
        progress(where if block else "warming up")
        for side in list(reversed(found) if block and number % 2 == 0 else found):
            try:
                if not block:
                    await _warm_up(sides[side])
                    continue
                await asyncio.sleep(rest_s)
                result = await sides[side].decode(prompts, block)
            except OutriderError as error:
                if not drops(side, error):
                    raise
                del found[side]
                continue
            found[side] |= zip(block, result.completions, strict=True)
            seconds[side] += result.seconds
    return {
        side: SideResult(tuple(done[i] for i in range(len(prompts))), seconds[side])
        for side, done in found.items()
    }


async def _warm_up(contestant: Contestant) -> None:
    """With seeds that no prompt has: the second session of a seed may be drafted otherwise."""
    short = min(WARM_UP_TOKENS_MAX, contestant.decoding.max_tokens)
    for index, prompt in enumerate(WARM_UP_PROMPTS, start=1):
        decoding = replace(contestant.decoding.for_prompt(-index), max_tokens=short)
        await contestant.client.generate(prompt, decoding)


def _blocks(num_prompts: int, concurrency: int) -> list[range]:
    """The prompts of each turn. With several at a time there are two turns, each of every second
    prompt: so each side comes first once with all kinds of prompts, as what comes second finds the
    beginnings of prompts cached; and the ends, where fewer than `concurrency` requests run, are
    few."""
    if concurrency == 1:
        return [range(index, index + 1) for index in range(num_prompts)]
    return [range(turn, num_prompts, 2) for turn in range(min(2, num_prompts))]


def medians_ms(
    works: Sequence[Callable[[int], object]],
    repetitions: int,
    undo: Callable[[], object] = lambda: None,
) -> list[float]:
    """The median time of each, ms. They take turns, are told which one it is, and what each has
    done is undone."""
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
