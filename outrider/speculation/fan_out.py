"""Which outcomes of a round are worth working out, learned from how rounds came out.

The chance that n of K draft tokens are accepted comes from the acceptance at each position, and
that guess number j of the correction is the right one from how often it was; both are averages that
forget. The best use of B guesses is then the B likeliest
outcomes (for a law of misses this is Theorem 12 of arXiv 2603.03251).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.limits import LOOK_AHEAD_MAX, NUM_DRAFT_TOKENS_MAX

_FADE: Final = 1 - 1 / 500
"""What an outcome still counts for after one more."""
_PRIOR_ROUNDS: Final = 20.0
"""What is believed before any outcome counts like so many of them ..."""
_PRIOR_ACCEPTANCE: Final = 0.7
_PRIOR_MISS: Final = 0.3
"""... and that the first j guesses of a correction miss it with this chance over j."""
RANKS_MAX: Final = 16
"""Guesses of one correction."""


@dataclass(frozen=True, slots=True)
class Guess:
    """An outcome: so many draft tokens accepted, and which guess of the correction is right."""

    num_accepted: int
    rank: int
    """From 0."""
    chance: float


class _Ranks:
    """How often each guess of a correction was right."""

    def __init__(self) -> None:
        later = [1 / (rank * (rank + 1)) for rank in range(1, RANKS_MAX)]
        shares = [1 - _PRIOR_MISS, *(_PRIOR_MISS * share for share in later)]
        self._hits = [_PRIOR_ROUNDS * share for share in shares]
        self._rounds = _PRIOR_ROUNDS

    def note(self, rank: int | None) -> None:
        """A correction was guessed at this rank, or at none."""
        self._hits = [hits * _FADE + (index == rank) for index, hits in enumerate(self._hits)]
        self._rounds = self._rounds * _FADE + 1

    def share(self, rank: int) -> float:
        """The chance that this guess is the right one."""
        return self._hits[rank] / self._rounds


class FanOut:
    """Learns from rounds, and plans the guesses of the next one."""

    def __init__(self) -> None:
        self._accepted = [_PRIOR_ROUNDS * _PRIOR_ACCEPTANCE] * NUM_DRAFT_TOKENS_MAX
        self._tried = [_PRIOR_ROUNDS] * NUM_DRAFT_TOKENS_MAX
        self._bonus, self._recovery = _Ranks(), _Ranks()

    def note(self, num_drafted: int, num_accepted: int, rank: int | None) -> None:
        """A round came out: so many of its draft tokens were accepted, and its correction was the
        guess of this rank (None = it was not among them)."""
        for depth in range(min(num_accepted + 1, num_drafted)):
            self._accepted[depth] = self._accepted[depth] * _FADE + (depth < num_accepted)
            self._tried[depth] = self._tried[depth] * _FADE + 1
        (self._bonus if num_accepted == num_drafted else self._recovery).note(rank)

    def plan(self, num_drafted: int, num_guesses: int) -> list[Guess]:
        """The `num_guesses` likeliest outcomes of a round with so many draft tokens, the likeliest
        first; 1..`LOOK_AHEAD_MAX`."""
        found = []
        reached = 1.0
        for depth in range(num_drafted + 1):
            accepted = 0.0
            if depth < num_drafted:
                accepted = self._accepted[depth] / self._tried[depth]
            ends = reached * (1 - accepted)
            ranks = self._bonus if depth == num_drafted else self._recovery
            found += [Guess(depth, rank, ends * ranks.share(rank)) for rank in range(RANKS_MAX)]
            reached *= accepted
        found.sort(key=lambda guess: -guess.chance)
        return found[: min(num_guesses, LOOK_AHEAD_MAX)]
