"""Turns a verdict into an outcome. Coordinator and target both compute the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import accumulate, takewhile
from operator import mul

from outrider.errors import InvariantError
from outrider.foundation.values import value
from outrider.speculation.sampling_params import Rule


class Origin(StrEnum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"
    STORED = "stored"
    """An earlier token of a resumed session. The store does not keep origins."""


@value(frozen=True, slots=True)
class Outcome:
    """What a round commits: the accepted draft tokens, and one token of the target after them."""

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


def count_accepted(rule: Rule, passes: Iterable[bool]) -> int:
    """The number of accepted draft tokens. `passes` says whether each token passes its own test.
    Block accepts the longest prefix whose last token passes (Sun et al., ICLR 2025, algorithm 2).
    The other rules accept the tokens before the first token that fails."""
    if rule is Rule.BLOCK:
        return max((i for i, passed in enumerate(passes, start=1) if passed), default=0)
    return sum(takewhile(bool, passes))


def survival(rule: Rule, accept_probability: Sequence[float]) -> tuple[float, ...]:
    """For n = 1..K, the probability that at least n draft tokens are accepted."""
    if rule is Rule.BLOCK:
        refusals = [1.0 - chance for chance in reversed(accept_probability)]
        return tuple(1.0 - none_passes for none_passes in accumulate(refusals, mul))[::-1]
    return tuple(accumulate(accept_probability, mul))


def decide(
    verdict: Verdict, proposal_ids: Sequence[int], rule: Rule, uniforms: Iterable[float]
) -> Outcome:
    """Accepts or rejects draft tokens, and adds the target's token after the accepted tokens. Draft
    token i passes iff uniforms[i] <= verdict.accept_probability[i]. Raises `InvariantError` if the
    lengths of verdict and proposal do not match."""
    num, accept = len(proposal_ids), verdict.accept_probability
    if not len(accept) == num == len(verdict.correction) - 1:
        sizes = f"{len(accept)} acceptance probabilities and {len(verdict.correction)} corrections"
        raise InvariantError(f"a verdict with {sizes} does not fit {num} draft tokens")
    passes = (uniform <= chance for chance, uniform in zip(accept, uniforms, strict=True))
    num_accepted = count_accepted(rule, passes)
    last = Origin.BONUS if num_accepted == num else Origin.CORRECTION
    token_ids = (*proposal_ids[:num_accepted], verdict.correction[num_accepted])
    return Outcome(token_ids, (*[Origin.ACCEPTED] * num_accepted, last))


def ending_at(verdict: Verdict, index: int, proposal_ids: Sequence[int]) -> Verdict:
    """A verdict that commits the draft tokens 0..`index`, and no other token. It replaces `verdict`
    if the outcome accepts draft token `index`, but the row after this token has no distribution, or
    its mask is unknown. The committed tokens keep their distribution, because under every rule the
    probability of accepting the tokens 0..`index` does not depend on what may follow them."""
    accept = [float(i < index) for i in range(len(proposal_ids))]
    correction = list(verdict.correction)
    correction[index] = proposal_ids[index]
    return Verdict(tuple(accept), tuple(correction))


def ending_before(
    verdict: Verdict, row: int, proposal_ids: Sequence[int], rule: Rule, uniforms: Iterable[float]
) -> Verdict:
    """`verdict` if its outcome does not reach `row` >= 1, so accepts fewer than `row` draft tokens.
    Otherwise the verdict that commits the draft tokens before `row`, and no other token."""
    if decide(verdict, proposal_ids, rule, uniforms).num_accepted < row:
        return verdict
    return ending_at(verdict, row - 1, proposal_ids)


@value(frozen=True, slots=True)
class Verdict:
    """The target's answer to a proposal of K tokens."""

    accept_probability: tuple[float, ...]
    """[K]: the probability that each draft token passes its own test. It is min(1, p / q) under
    token, h_i of docs/exactness.md under block, and 0 or 1 under coupled and greedy."""
    correction: tuple[int, ...]
    """[K+1]: element n is the token that follows n accepted draft tokens."""
