"""The rounds that a text takes, without playing one.

Given the text, what a round accepts depends on where it begins and on nothing before (see
`survival`), so that the expected number of rounds which begin at each place follows from place to
place: v(1) = 1, and v(t + n + 1) gains v(t) P(n accepted | round at t). At temperature 0 all
chances are 0 or 1, and this is what would be played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.errors import check
from outrider.limits import NUM_DRAFT_TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a drafter would propose at one place of a text."""

    num_proposed: int
    num_steps: int
    """Of the draft's model; 0 where a look-up proposes, or nothing is proposed."""
    survival: tuple[float, ...]
    """Of the proposed tokens whose place the text still has."""

    def __post_init__(self) -> None:
        falling = pairwise((1.0, *self.survival, 0.0))
        check(all(a >= b - 1e-12 for a, b in falling), "a survival starts from 1 and never grows")
        check(len(self.survival) <= self.num_proposed, "only what is proposed survives")


@dataclass(frozen=True, slots=True)
class RoundKind:
    """What a round's time depends on, beside its context."""

    num_proposed: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """Expected rounds over any number of texts; sums."""

    num_texts: int
    num_tokens: int
    num_rounds: float
    """With each text's first one, which has no draft."""
    contexts: float
    """Tokens that the session had when a round began, over all rounds but the first ones."""
    kinds: Mapping[RoundKind, float]
    """Rounds by kind, but for the first of each text."""
    reached: tuple[float, ...]
    """Of each depth from 1: how often it was proposed, and all before it was accepted ..."""
    accepted: tuple[float, ...]
    """... and it was, too."""

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens a round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    def by_position(self) -> tuple[float | None, ...]:
        """The chance, for depth 1, 2, ..., that a token is accepted given that those before it
        were; None where none came so far."""
        return tuple(
            accepted / reached if reached > 0 else None
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        )

    def rates(self) -> tuple[float | None, float]:
        """Accepted tokens over proposed ones, None without any; and proposed ones a round."""
        proposed = sum(kind.num_proposed * number for kind, number in self.kinds.items())
        share = sum(self.accepted) / proposed if proposed else None
        return share, self.proposed_per_round

    @property
    def proposed_per_round(self) -> float:
        """Draft tokens, over all rounds but the first ones; 0 without any."""
        return self._mean(lambda kind: kind.num_proposed)

    @property
    def steps_per_round(self) -> float:
        """Steps of the draft's model, over the same rounds."""
        return self._mean(lambda kind: kind.num_steps)

    def _mean(self, of: Callable[[RoundKind], float]) -> float:
        later = sum(self.kinds.values())
        total = sum(of(kind) * number for kind, number in self.kinds.items())
        return total / later if later else 0.0


def total(parts: Sequence[Rounds]) -> Rounds:
    """All of them together."""
    kinds: Counter[RoundKind] = Counter()
    for part in parts:
        kinds.update(part.kinds)
    nothing = [0.0] * NUM_DRAFT_TOKENS_MAX
    return Rounds(
        num_texts=sum(part.num_texts for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_rounds=sum(part.num_rounds for part in parts),
        contexts=sum(part.contexts for part in parts),
        kinds=dict(kinds),
        reached=tuple(map(sum, zip(nothing, *(part.reached for part in parts), strict=True))),
        accepted=tuple(map(sum, zip(nothing, *(part.accepted for part in parts), strict=True))),
    )


def replay(num_tokens: int, attempt_at: Callable[[int], Attempt], prompt_tokens: int = 0) -> Rounds:
    """The rounds of one text of `num_tokens` >= 1. `attempt_at(t)` tells of a round that begins
    when t = 1..num_tokens - 1 tokens are committed; it is asked in ascending order, and only where
    a round may begin."""
    check(num_tokens > 0, "a text without a token takes no round")
    visits = [0.0] * (num_tokens + 1)
    visits[1] = 1.0
    contexts = 0.0
    kinds: dict[RoundKind, float] = {}
    reached, accepted = ([0.0] * NUM_DRAFT_TOKENS_MAX for _ in range(2))
    for start in range(1, num_tokens):
        visit = visits[start]
        if visit <= 0.0:
            continue
        attempt = attempt_at(start)
        known = attempt.survival
        check(len(known) <= num_tokens - start, "a proposal survives beyond the text's end")
        contexts += visit * (prompt_tokens + start)
        kind = RoundKind(attempt.num_proposed, attempt.num_steps)
        kinds[kind] = kinds.get(kind, 0.0) + visit
        for depth, (before, after) in enumerate(pairwise((1.0, *known))):
            reached[depth] += visit * before
            accepted[depth] += visit * after
        for num_accepted, (least, more) in enumerate(pairwise((1.0, *known, 0.0))):
            visits[min(num_tokens, start + num_accepted + 1)] += visit * (least - more)
    return Rounds(
        num_texts=1,
        num_tokens=num_tokens,
        num_rounds=1.0 + sum(kinds.values()),
        contexts=contexts,
        kinds=kinds,
        reached=tuple(reached),
        accepted=tuple(accepted),
    )
