"""What `bench engine` says of waiting: for a first token whose prefix was seen before, and for the
next one while a long prompt is read beside it.

A gap is the time between two tokens of one session as they come to the load generator; those of one
message, for which the first of them has waited, share the time until the next message.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median
from typing import Final

from .engine_load import Load, LoadSession, Prompts
from .figures import percentile

PREFIX_TOKENS: Final = 1_000
OWN_TOKENS: Final = 20
"""What follows the prefix in each request."""
LONG_TOKENS: Final = 4_000
RUNNING_SESSIONS: Final = 8
"""That decode beside the long prompt ..."""
RUNNING_TOKENS: Final = 256
"""... and began with so many tokens."""
SETTLING_GAPS: Final = 16
"""Of each running session, which do not count: others are still beginning."""
GAPS_BEFORE: Final = 64
"""Of each, which do, before the long prompt is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Times from sending to the first token, and gaps. What a model is too short for is None."""

    prefix_first_token_ms: float | None = None
    """Of a request with a fresh prefix of `PREFIX_TOKENS`."""
    prefix_second_first_token_ms: float | None = None
    """Of the next one, with the same prefix."""
    prefix_ratio: float | None = None
    """The second over the first."""
    gap_median_ms: float | None = None
    """Of `RUNNING_SESSIONS` that decode."""
    gap_p99_beside_ms: float | None = None
    """Of the same, from the sending of a prompt of `LONG_TOKENS` until its first token."""
    gap_ratio: float | None = None
    """The latter over the former."""
    long_first_token_ms: float | None = None
    """Of the long prompt beside them ..."""
    long_alone_first_token_ms: float | None = None
    """... and of another one alone."""


async def measure_waits(
    load: Load, prompts: Prompts, max_model_len: int, repetitions: int
) -> Waits:
    """The median of each figure over the repetitions. Raises `Unavailable` as `Load` does."""
    found: list[dict[str, float]] = []
    for _ in range(repetitions):
        found.append({})
        if max_model_len > PREFIX_TOKENS + OWN_TOKENS:
            found[-1] |= await _behind_a_prefix(load, prompts)
        if max_model_len > LONG_TOKENS:
            found[-1] |= await _beside_a_long_prompt(load, prompts, max_model_len)
    return Waits(**{name: median(each[name] for each in found) for name in found[0]})


async def _behind_a_prefix(load: Load, prompts: Prompts) -> dict[str, float]:
    (prefix,) = prompts.take(1, PREFIX_TOKENS)
    first, second = [
        1e3 * await load.decode([prefix + own], 1) for own in prompts.take(2, OWN_TOKENS)
    ]
    return {
        "prefix_first_token_ms": first,
        "prefix_second_first_token_ms": second,
        "prefix_ratio": second / first,
    }


async def _beside_a_long_prompt(
    load: Load, prompts: Prompts, max_model_len: int
) -> dict[str, float]:
    clock = asyncio.get_running_loop().time
    alone_s = await load.decode(prompts.take(1, LONG_TOKENS), 1)
    running = prompts.take(RUNNING_SESSIONS, RUNNING_TOKENS)
    async with load.running(running, max_model_len - RUNNING_TOKENS) as sessions:
        await _go_on(sessions, SETTLING_GAPS)
        began = clock()
        await _go_on(sessions, GAPS_BEFORE)
        sent = clock()
        long_s = await load.decode(prompts.take(1, LONG_TOKENS), 1)
        await _go_on(sessions, 1)  # The gaps in which it came are over then.
    before = median(_gaps(sessions, began, sent))
    beside = percentile(_gaps(sessions, sent, sent + long_s), 99)
    return {
        "gap_median_ms": 1e3 * before,
        "gap_p99_beside_ms": 1e3 * beside,
        "gap_ratio": beside / before,
        "long_first_token_ms": 1e3 * long_s,
        "long_alone_first_token_ms": 1e3 * alone_s,
    }


async def _go_on(sessions: list[LoadSession], num_tokens: int) -> None:
    """Until each has so many tokens more than now, or its last."""
    await asyncio.gather(
        *(s.reached(min(len(s.arrivals) + num_tokens, s.num_tokens)) for s in sessions)
    )


def _gaps(sessions: list[LoadSession], start: float, end: float) -> list[float]:
    """Seconds between tokens of a session, of all that lie between these times, if only in part.
    Tokens that came in one message share the time until the next message."""
    return [
        (after - before) / num_tokens
        for session in sessions
        for (before, num_tokens), (after, _) in pairwise(Counter(session.arrivals).items())
        if before < end and after > start
        for _ in range(num_tokens)
    ]


def figure_rows(waits: Waits) -> list[tuple[str, str]]:
    """Name and figure of each, for people."""
    rows = []
    for field in fields(waits):
        value = getattr(waits, field.name)
        is_time = field.name.endswith("_ms")
        name = field.name.removesuffix("_ms").replace("_", " ")
        if value is None:
            rows.append((name, "the model is too short"))
        else:
            rows.append((name, f"{value:.1f} ms" if is_time else f"{value:.2f}"))
    return rows
