"""Turns a verdict into an outcome. Coordinator and target both compute the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from operator import mul

from outrider.errors import InvariantError, check
from outrider.speculation.proposal import ROOT, DraftTree, draft_tree
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

    path: tuple[int, ...]
    """Indices of the accepted draft tokens. In a chain, these are 0, 1, .., n - 1."""
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def last(self) -> int:
        """Index of the row from which the last token was drawn."""
        return self.path[-1] + 1 if self.path else 0


def count_accepted(rule: Rule, passes: Iterable[bool]) -> int:
    """The number of accepted draft tokens of a chain. `passes` has the result of each token's own
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
    verdict: Verdict,
    proposal_ids: Sequence[int],
    rule: Rule,
    uniforms: Iterable[float],
    parents: tuple[int, ...] = (),
) -> Outcome:
    """Accepts or rejects draft tokens, and adds the token that follows the accepted ones. Draft
    token i passes iff uniforms[i] <= verdict.accept_probability[i]. `uniforms` [N] are in (0, 1).
    In a tree (`parents`), the first sibling that passes is accepted, and then its children are
    tested. Raises `InvariantError` if the lengths of verdict and proposal do not match."""
    num_draft_tokens, accept = len(proposal_ids), verdict.accept_probability
    if len(accept) != num_draft_tokens or len(verdict.correction) != num_draft_tokens + 1:
        raise InvariantError(
            f"a proposal of {num_draft_tokens} tokens needs as many acceptance probabilities and "
            f"one correction more; got {len(accept)} and {len(verdict.correction)}"
        )
    passes = _passes(accept, uniforms)
    if parents:
        path, is_leaf = _walk(draft_tree(parents, num_draft_tokens), tuple(passes))
    else:
        path = tuple(range(count_accepted(rule, passes)))
        is_leaf = len(path) == num_draft_tokens
    return Outcome(
        path=path,
        token_ids=(
            *(proposal_ids[index] for index in path),
            verdict.correction[path[-1] + 1 if path else 0],
        ),
        origins=(Origin.ACCEPTED,) * len(path) + (Origin.BONUS if is_leaf else Origin.CORRECTION,),
    )


def ending_at(
    verdict: Verdict, index: int, proposal_ids: Sequence[int], parents: tuple[int, ...] = ()
) -> Verdict:
    """A verdict under which a round commits the path up to draft token `index`, and nothing more.
    It is for an outcome that accepts this draft token, if no token can be drawn after the token.
    The distribution of the committed tokens is unchanged, because under every rule the probability
    of committing a path up to a token does not depend on later rows."""
    tree = draft_tree(parents, len(proposal_ids))
    accept = [0.0] * len(proposal_ids)
    ancestor = tree.parents[index]
    while ancestor != ROOT:
        accept[ancestor] = 1.0
        ancestor = tree.parents[ancestor]
    correction = list(verdict.correction)
    correction[tree.parents[index] + 1] = proposal_ids[index]
    return Verdict(tuple(accept), tuple(correction))


def _walk(tree: DraftTree, passes: Sequence[bool]) -> tuple[tuple[int, ...], bool]:
    """The accepted path, and whether it ends at a leaf."""
    path: list[int] = []
    siblings = tree.children[0]
    while (accepted := next((index for index in siblings if passes[index]), None)) is not None:
        path.append(accepted)
        siblings = tree.children[accepted + 1]
    return tuple(path), not siblings


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
    """[K]: the probability that each draft token passes its own test. In a chain, this is min(1, p
    / q) under token, and h_i under block. Under coupled and greedy, it is 0 or 1."""
    correction: tuple[int, ...]
    """[K+1]: the token that follows n accepted draft tokens."""
