"""Turns a verdict into an outcome. Coordinator and target both compute the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from operator import mul

from outrider.errors import InvariantError, check
from outrider.speculation.sampling_params import Rule
from outrider.values import value


class Origin(StrEnum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"
    STORED = "stored"
    """The origin of a resumed session's earlier tokens. The store does not keep their origins."""


@value(frozen=True, slots=True)
class Outcome:
    """What a round commits: the accepted draft tokens, and one token of the target after them."""

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


def count_accepted(rule: Rule, passes: Iterable[bool]) -> int:
    """The number of accepted draft tokens. `passes` has the result of each token's own
    test. Block accepts the longest prefix whose last token passes (Sun et al., ICLR 2025, algorithm
    2). The other rules accept the tokens before the first failure."""
    if rule is Rule.BLOCK:
        return max((i for i, passed in enumerate(passes, start=1) if passed), default=0)
    num = 0
    for passed in passes:
        if not passed:
            break
        num += 1
    return num


def survival(rule: Rule, accept_probability: Sequence[float]) -> tuple[float, ...]:
    """For n = 1..K, the probability that at least n draft tokens are accepted."""
    if rule is Rule.BLOCK:
        refusals = [1.0 - chance for chance in reversed(accept_probability)]
        return tuple(1.0 - none_passes for none_passes in accumulate(refusals, mul))[::-1]
    return tuple(accumulate(accept_probability, mul))


def decide(
    verdict: Verdict, proposal_ids: Sequence[int], rule: Rule, uniforms: Iterable[float]
) -> Outcome:
    """Accepts or rejects draft tokens, and adds the token that follows the accepted ones. Draft
    token i passes iff uniforms[i] <= verdict.accept_probability[i]. `uniforms` [K] are in (0, 1).
    Raises `InvariantError` if the lengths of verdict and proposal do not match."""
    num_draft_tokens, accept = len(proposal_ids), verdict.accept_probability
    if len(accept) != num_draft_tokens or len(verdict.correction) != num_draft_tokens + 1:
        raise InvariantError(
            f"a proposal of {num_draft_tokens} tokens needs as many acceptance probabilities and "
            f"one correction more; got {len(accept)} and {len(verdict.correction)}"
        )
    num = count_accepted(rule, _passes(accept, uniforms))
    last = Origin.BONUS if num == num_draft_tokens else Origin.CORRECTION
    return Outcome((*proposal_ids[:num], verdict.correction[num]), (*[Origin.ACCEPTED] * num, last))


def ending_at(verdict: Verdict, index: int, proposal_ids: Sequence[int]) -> Verdict:
    """A verdict under which a round commits the draft tokens up to token `index`, and nothing more.
    It is for an outcome that accepts this draft token, if no token can be drawn after the token.
    The distribution of the committed tokens is unchanged, because under every rule the probability
    of committing draft tokens up to a token does not depend on later rows."""
    accept = [float(i < index) for i in range(len(proposal_ids))]
    correction = list(verdict.correction)
    correction[index] = proposal_ids[index]
    return Verdict(tuple(accept), tuple(correction))


def _passes(probabilities: Sequence[float], uniforms: Iterable[float]) -> Iterator[bool]:
    numbers = iter(uniforms)
    for probability in probabilities:
        uniform = next(numbers, 0.0)
        check(0.0 < uniform < 1.0, "each draft token needs a uniform strictly between 0 and 1")
        yield uniform <= probability


@value(frozen=True, slots=True)
class Verdict:
    """The target's answer to a proposal of K tokens."""

    accept_probability: tuple[float, ...]
    """[K]: the probability that each draft token passes its own test: min(1, p / q) under token,
    h_i under block, 0 or 1 under coupled and greedy."""
    correction: tuple[int, ...]
    """[K+1]: the token that follows n accepted draft tokens."""
