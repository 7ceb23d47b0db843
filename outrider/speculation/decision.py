"""From a verdict to an outcome: what the coordinator decides. Pure, the same wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from outrider.errors import check
from outrider.speculation.sampling import Rule
from outrider.speculation.verdict import Verdict


class Origin(StrEnum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round commits: `num_accepted` draft tokens and one token of the target after them."""

    num_accepted: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]


def count_accepted(rule: Rule, passes: Iterable[bool]) -> int:
    """How many draft tokens are accepted, given which of them pass their own test: under block
    the longest prefix whose last token passes, whatever those before it did (Sun et al., ICLR
    2025, algorithm 2); under every other rule those before the first that fails, and nothing
    behind that one is looked at."""
    if rule is Rule.BLOCK:
        return max((i for i, passed in enumerate(passes, start=1) if passed), default=0)
    return sum(1 for _ in takewhile(bool, passes))


def survival(rule: Rule, accept_probability: Sequence[float]) -> tuple[float, ...]:
    """The chance, for n = 1..K, that n draft tokens or more are accepted, by the tests' own chances
    [K]: of the tokens that were drafted, those behind the first refused one included."""
    chances: list[float] = []
    if rule is Rule.BLOCK:
        none_passes = 1.0
        for chance in reversed(accept_probability):
            none_passes *= 1.0 - chance
            chances.append(1.0 - none_passes)
        return tuple(reversed(chances))
    all_pass = 1.0
    for chance in accept_probability:
        all_pass *= chance
        chances.append(all_pass)
    return tuple(chances)


def decide(
    verdict: Verdict, proposal_ids: Sequence[int], rule: Rule, uniforms: Iterable[float]
) -> Outcome:
    """Accepts draft tokens against `uniforms` [K] in (0, 1), taken as far as they are needed, and
    adds the token that follows.

    Draft token i passes iff uniforms[i] <= verdict.accept_probability[i]: a probability of 0 never
    passes, since no uniform is 0. Raises `InvariantError` if the lengths do not fit together."""
    num_draft_tokens = len(proposal_ids)
    check(
        len(verdict.accept_probability) == num_draft_tokens
        and len(verdict.correction) == num_draft_tokens + 1,
        f"a proposal of {num_draft_tokens} tokens needs as many acceptance probabilities and one "
        f"correction more; got {len(verdict.accept_probability)} and {len(verdict.correction)}",
    )
    accepted = count_accepted(rule, _passes(verdict.accept_probability, uniforms))
    last = Origin.BONUS if accepted == num_draft_tokens else Origin.CORRECTION
    return Outcome(
        num_accepted=accepted,
        token_ids=(*proposal_ids[:accepted], verdict.correction[accepted]),
        origins=(Origin.ACCEPTED,) * accepted + (last,),
    )


def _passes(probabilities: Sequence[float], uniforms: Iterable[float]) -> Iterator[bool]:
    numbers = iter(uniforms)
    for probability in probabilities:
        uniform = next(numbers, 0.0)
        check(0.0 < uniform < 1.0, "each draft token has a uniform strictly between 0 and 1")
        yield uniform <= probability
