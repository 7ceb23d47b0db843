"""Which tokens a step runs: rounds first, then parts of long prefixes.

    a wish with                              gets
    up to ROUND_TOKENS_MAX tokens (a round)  all of them, while there is room, or nothing yet
    more tokens (a prefix)                   what is left, in order of arrival, in parts

While rounds are played, a step with a part of a prefix lasts at most STEP_GROWTH_MAX times as long
as without it; and beside the rounds of a full step the oldest prefix still gets PREFIX_TOKENS_MIN
tokens. So neither kind can keep the other from going on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.engine.costs import StepCosts
from outrider.errors import check
from outrider.limits import BATCHED_TOKENS_MIN, NUM_DRAFT_TOKENS_MAX

ROUND_TOKENS_MAX: Final = 2 * NUM_DRAFT_TOKENS_MAX + 2
"""What a round runs at most: the tokens of the one before, and its own proposal."""
PREFIX_TOKENS_MIN: Final = 16
STEP_GROWTH_MAX: Final = 2.5
"""Below 3, as a token takes longer than its step."""
ROUND_REST_STEPS: Final = 4
"""Steps without a round after which nobody seems to play any more."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What an item would run, if it were alone."""

    num_tokens: int
    """All of them, at least one."""
    num_last: int
    """So many of them, at the end, cannot be parted: 1..num_tokens."""
    context: int
    """Slots that its session holds before."""


@dataclass(frozen=True, slots=True)
class _Played:
    """The rounds of a step."""

    rows: int
    sessions: int
    context: int


class TokenBudget:
    """Shares out steps of `max_tokens` tokens and `max_steps` sessions.

    With `costs` it knows how long a step takes; without, only how many tokens it has.
    """

    def __init__(self, max_tokens: int, max_steps: int, costs: StepCosts | None = None) -> None:
        check(max_tokens >= BATCHED_TOKENS_MIN, f"a step has at least {BATCHED_TOKENS_MIN} tokens")
        check(max_steps > 0, "a step has at least one session")
        self._max_tokens = max_tokens
        self._max_steps = max_steps
        self._costs = costs
        self._played: _Played | None = None
        """The last rounds, as long as somebody seems to play."""
        self._rest_steps = 0

    def share(self, wishes: Sequence[Wish]) -> list[int]:
        """For each wish, in order of arrival, how many of its tokens this step runs: all, none, or
        of a prefix a part that leaves `num_last` or more. Not none of all."""
        grants = [0] * len(wishes)
        prefixes = [i for i, wish in enumerate(wishes) if wish.num_tokens > ROUND_TOKENS_MAX]
        kept = (PREFIX_TOKENS_MIN, 1) if prefixes else (0, 0)
        tokens, seats = self._max_tokens - kept[0], self._max_steps - kept[1]
        granted: list[Wish] = []
        for index, wish in enumerate(wishes):
            if wish.num_tokens <= min(ROUND_TOKENS_MAX, tokens) and seats > 0:
                grants[index] = wish.num_tokens
                granted.append(wish)
                tokens -= wish.num_tokens
                seats -= 1
        self._note(granted)
        tokens, seats = tokens + kept[0], seats + kept[1]
        seconds = self._seconds_left(granted)
        for index in prefixes:
            if seats <= 0 or tokens <= 0:
                break
            wish = wishes[index]
            grant = self._part(wish, tokens, seconds, at_least=not any(grants[i] for i in prefixes))
            if grant <= 0:
                break
            grants[index] = grant
            tokens -= grant
            seats -= 1
            if seconds is not None and self._costs is not None:
                seconds -= self._costs.step_seconds(grant, 1, wish.context)
        return grants

    def _part(self, wish: Wish, tokens: int, seconds: float | None, at_least: bool) -> int:
        """How many tokens of a prefix are run, of so many, in so much time."""
        num = min(wish.num_tokens, tokens)
        if seconds is not None and self._costs is not None:
            affordable = self._costs.most_rows(seconds, num, wish.context)
            least = min(num, PREFIX_TOKENS_MIN) if at_least else 0
            num = max(affordable, least)
        return num if num == wish.num_tokens else min(num, wish.num_tokens - wish.num_last)

    def _note(self, rounds: Sequence[Wish]) -> None:
        self._rest_steps = 0 if rounds else self._rest_steps + 1
        if rounds:
            self._played = _Played(
                sum(wish.num_tokens for wish in rounds),
                len(rounds),
                sum(wish.context for wish in rounds),
            )
        elif self._rest_steps >= ROUND_REST_STEPS:
            self._played = None

    def _seconds_left(self, rounds: Sequence[Wish]) -> float | None:
        """The time that prefixes may take beside these rounds; None = as long as they like."""
        if self._costs is None or self._played is None:
            return None
        played = self._played
        usual = self._costs.step_seconds(played.rows, played.sessions, played.context)
        # A prefix shares the step's fixed cost with the rounds, and is reckoned with its own.
        fixed = self._costs.step_seconds(1)
        return STEP_GROWTH_MAX * usual - (usual - fixed if rounds else 0.0)
