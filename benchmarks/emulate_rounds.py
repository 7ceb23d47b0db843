"""The rounds of one session as its client saw them, how long they took, and which K is best."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import mean, median
from typing import Final

from outrider.errors import Unavailable, check
from outrider.request import Event, RoundReport, Tokens

from .emulate_pair import expected_tokens

COARSE_STEP: Final = 2
"""Between the K that are tried first."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round."""

    num_draft_tokens: int
    """Proposed."""
    num_accepted: int
    num_tokens: int
    """Committed."""
    look_ahead_hit: bool
    """Whether its proposal was there before it began."""
    arrived_s: float
    """When its tokens came to the client."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which tokens of a session count."""

    num_tokens: int
    """The last one that does, from 1 ..."""
    num_dropped: int
    """... and how many at the beginning do not."""


@dataclass(frozen=True, slots=True)
class Hits:
    """The share of rounds whose proposal was there before they began, by the outcome of the round
    before, which is what had to be guessed; None where there was no such outcome."""

    all_accepted: float | None
    rejected_at: tuple[float | None, ...]
    """[K]: the first of them is for rounds whose first draft token was refused."""


@dataclass(frozen=True, slots=True)
class TimedRounds:
    """Rounds that follow each other, and how long each took."""

    rounds: tuple[Round, ...]
    milliseconds: tuple[float, ...]
    """From the arrival of the round before."""

    @property
    def num_tokens(self) -> int:
        """Committed by all of them."""
        return sum(entry.num_tokens for entry in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """From the first round's beginning to the last one's end."""
        return self.num_tokens / sum(self.milliseconds) * 1e3

    @property
    def tokens_per_round(self) -> float:
        """The mean."""
        return self.num_tokens / len(self.rounds)

    @property
    def hit_rate(self) -> float:
        """The share of rounds whose proposal was there before they began."""
        return mean(entry.look_ahead_hit for entry in self.rounds)

    def hits(self, num_draft_tokens: int) -> Hits:
        """After rounds that drafted K tokens."""
        by_outcome: list[list[bool]] = [[] for _ in range(num_draft_tokens + 1)]
        for before, after in pairwise(self.rounds):
            if before.num_draft_tokens == num_draft_tokens:
                by_outcome[before.num_accepted].append(after.look_ahead_hit)
        *rejected, accepted = (mean(found) if found else None for found in by_outcome)
        return Hits(accepted, tuple(rejected))

    def expected_rate(self, acceptance: float) -> float:
        """Tokens a second with the number of tokens that each round is expected to commit in place
        of the one that it did: of a few rounds this says more, as their times vary little."""
        expected = sum(expected_tokens(acceptance, entry.num_draft_tokens) for entry in self.rounds)
        return expected / sum(self.milliseconds) * 1e3

    def overhead_ms(self, verify_ms: float, draft_ms: float) -> float:
        """The median of what a round took beside a step of the target and, for each token that it
        drafted, `draft_ms`."""
        return median(
            took - verify_ms - entry.num_draft_tokens * draft_ms
            for entry, took in zip(self.rounds, self.milliseconds, strict=True)
        )


async def read_rounds(events: AsyncIterator[Event], clock: Callable[[], float]) -> list[Round]:
    """The rounds of a generation with `include_rounds`, to its end; `clock` gives seconds."""
    rounds: list[Round] = []
    report: RoundReport | None = None
    async for event in events:
        if isinstance(event, RoundReport):
            report = event
        elif isinstance(event, Tokens) and report is not None:
            num_draft_tokens = len(report.proposed_token_ids)
            rounds.append(
                Round(
                    num_draft_tokens=num_draft_tokens,
                    num_accepted=report.num_accepted,
                    num_tokens=len(event.token_ids),
                    look_ahead_hit=report.look_ahead_hit,
                    arrived_s=clock(),
                )
            )
    return rounds


def timed(rounds: Sequence[Round], window: Window) -> TimedRounds:
    """The rounds after the one with the window's last dropped token, to that with its last token.
    Raises `Unavailable` where the session was shorter."""
    check(0 < window.num_dropped < window.num_tokens, "a window begins before it ends")
    totals = list(accumulate(entry.num_tokens for entry in rounds))
    ends = [index for index, total in enumerate(totals) if total >= window.num_tokens]
    if not ends:
        raise Unavailable(f"a session ended before its {window.num_tokens} tokens had come")
    before = next(index for index, total in enumerate(totals) if total >= window.num_dropped)
    chosen = rounds[before : ends[0] + 1]
    check(len(chosen) > 1, "the window lies within one round")
    took = [(after.arrived_s - entry.arrived_s) * 1e3 for entry, after in pairwise(chosen)]
    return TimedRounds(tuple(chosen[1:]), tuple(took))


async def best_num_draft_tokens(rate: Callable[[int], Awaitable[float]], most: int) -> int:
    """The K of 1..`most` with the highest rate, which rises to it and falls after it: `most` and
    each second K below it are tried, and then the neighbours of the best of these."""
    rates: dict[int, float] = {}

    async def try_all(counts: Sequence[int]) -> int:
        for num_draft_tokens in counts:
            rates[num_draft_tokens] = await rate(num_draft_tokens)
        return max(rates, key=lambda num_draft_tokens: rates[num_draft_tokens])

    best = await try_all(range(most, 0, -COARSE_STEP))
    neighbours = (best - 1, best + 1)
    return await try_all([count for count in neighbours if 1 <= count <= most])
