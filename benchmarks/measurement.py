"""The harness: decodes the same prompts on several sides in turn, and keeps what each took.

Other work, clock rates and heat drift over minutes, so no side is measured in one piece: sides take
turns prompt by prompt, forwards for one prompt and backwards for the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Final, Protocol, runtime_checkable

from outrider.errors import OutriderError, check
from outrider.limits import SEED_MAX
from outrider.speculation.sampling_params import Rule

from .prompts import WARM_UP_PROMPTS, BenchPrompt

WARM_UP_TOKENS_MAX: Final = 32

Progress = Callable[[str], None]
"""Is told what happens, one line at a time."""


class Side(StrEnum):
    """What decodes."""

    PLAIN = "plain"
    """The services, with the target alone."""
    SPECULATIVE = "speculative"
    """The services, with drafts."""
    ENGINE = "engine"
    """The engine in a process, without services."""
    TRANSFORMERS = "transformers"
    """The library's own `generate` in a process."""
    ASSISTED = "transformers assisted"
    """The same, with the draft as its assistant."""
    PROMPT_LOOKUP = "transformers prompt lookup"
    """The same, which copies from the text so far."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a prompt is decoded."""

    max_tokens: int
    temperature: float
    rule: Rule
    seed: int
    num_draft_tokens: int
    """Bound on draft tokens a round; 0 = plain decoding."""


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
    first_token_s: float | None = None
    """Seconds from the request to the first token; None where a side does not say."""
    counted_tokens: int = 0
    """Tokens of a completion whose ids are not known, as by HTTP."""

    @property
    def num_tokens(self) -> int:
        """With the EOS, if there is one."""
        return len(self.token_ids) or self.counted_tokens

    @property
    def tokens_per_second(self) -> float:
        """Of this completion alone."""
        return self.num_tokens / self.seconds


class BenchClient(Protocol):
    """What the measurement needs of a side."""

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt to its end. Raises an `OutriderError` where that fails."""
        ...


@runtime_checkable
class BatchClient(BenchClient, Protocol):
    """A side that schedules many requests itself."""

    async def generate_all(
        self, prompts: Sequence[BenchPrompt], decoding: Decoding, concurrency: int
    ) -> list[Completion]:
        """Decodes prompts to their ends, `concurrency` at a time; fails as `generate` does."""
        ...


@dataclass(frozen=True, slots=True)
class Contestant:
    """One side, and how it is called."""

    side: str
    """Its name: a `Side`, or another one."""
    client: BenchClient
    decoding: Decoding
    """The seed is that of the first prompt; the prompt with index i has the i-th after it."""
    concurrency: int
    """Requests at a time."""


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
    check(bool(prompts) and bool(contestants), "nothing to measure")
    completions: dict[str, dict[int, Completion]] = {c.side: {} for c in contestants}
    for contestant in contestants:
        progress(f"warming up: {contestant.side}")
        try:
            await _warm_up(contestant)
        except OutriderError as error:
            if not drops(contestant.side, error):
                raise
            del completions[contestant.side]
    seconds = dict.fromkeys(completions, 0.0)
    num_done = 0
    for turn, block in enumerate(_blocks(len(prompts), max(c.concurrency for c in contestants))):
        num_done += len(block)
        progress(f"prompt {num_done} of {len(prompts)}: {prompts[block[-1]].category}")
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            if contestant.side not in completions:
                continue
            await asyncio.sleep(rest_s)
            try:
                done = await decode_all(contestant, prompts, block)
            except OutriderError as error:
                if not drops(contestant.side, error):
                    raise
                del completions[contestant.side]
                continue
            completions[contestant.side] |= done
            seconds[contestant.side] += _wall_seconds([*done.values()], contestant.concurrency)
    return {
        side: SideResult(tuple(found[i] for i in range(len(prompts))), seconds[side])
        for side, found in completions.items()
    }


async def _warm_up(contestant: Contestant) -> None:
    short = min(WARM_UP_TOKENS_MAX, contestant.decoding.max_tokens)
    for index, prompt in enumerate(WARM_UP_PROMPTS, start=1):
        # Seeds that no prompt has: the second session of a seed may be drafted otherwise.
        seed = (contestant.decoding.seed - index) & SEED_MAX
        decoding = replace(contestant.decoding, max_tokens=short, seed=seed)
        await contestant.client.generate(prompt, decoding)


def _blocks(num_prompts: int, concurrency: int) -> list[range]:
    """The prompts of each turn. With several at a time there are two turns, each of every second
    prompt: so each side comes first once with all kinds of prompts, as what comes second finds the
    beginnings of prompts cached; and the ends, where fewer than `concurrency` requests run, are
    few."""
    if concurrency == 1:
        return [range(index, index + 1) for index in range(num_prompts)]
    return [range(turn, num_prompts, 2) for turn in range(min(2, num_prompts))]


def _wall_seconds(completions: Sequence[Completion], concurrency: int) -> float:
    if concurrency == 1:
        return sum(completion.seconds for completion in completions)
    end = max(completion.started_s + completion.seconds for completion in completions)
    return end - min(completion.started_s for completion in completions)


async def decode_all(
    contestant: Contestant, prompts: Sequence[BenchPrompt], block: Sequence[int]
) -> dict[int, Completion]:
    """The completions of those of `prompts` that are in the block, by their index, `concurrency`
    at a time. Raises what the side does, once the others are cancelled."""
    client, completions = contestant.client, dict[int, Completion]()
    if contestant.concurrency > 1 and isinstance(client, BatchClient):
        chosen = [prompts[index] for index in block]
        found = await client.generate_all(chosen, contestant.decoding, contestant.concurrency)
        return {i: _checked(c, contestant.side) for i, c in zip(block, found, strict=True)}
    waiting = iter(block)
    workers = [
        asyncio.create_task(_work(contestant, prompts, waiting, completions))
        for _ in range(min(contestant.concurrency, len(block)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return completions


async def _work(
    contestant: Contestant,
    prompts: Sequence[BenchPrompt],
    waiting: Iterator[int],
    completions: dict[int, Completion],
) -> None:
    """Decodes one prompt after the other until none waits; workers share `waiting`."""
    for index in waiting:
        seed = (contestant.decoding.seed + index) & SEED_MAX
        decoding = replace(contestant.decoding, seed=seed)
        completion = await contestant.client.generate(prompts[index], decoding)
        completions[index] = _checked(completion, contestant.side)


def _checked(completion: Completion, side: str) -> Completion:
    check(
        completion.num_tokens > 0 and completion.seconds > 0,
        f"{side} decoded {completion.num_tokens} tokens in {completion.seconds} s",
    )
    return completion


def medians_ms(
    works: Sequence[Callable[[int], object]],
    repetitions: int,
    undo: Callable[[], object] = lambda: None,
    warm_up: int = 5,
) -> list[float]:
    """The median time of each, ms. They take turns, are told which one it is, and what each has
    done is undone."""
    times: list[list[float]] = [[] for _ in works]
    for index in range(-warm_up, repetitions):
        for work, own in zip(works, times, strict=True):
            started = time.perf_counter()
            work(index)
            seconds = time.perf_counter() - started
            undo()
            if index >= 0:
                own.append(seconds * 1e3)
    return [median(own) for own in times]
