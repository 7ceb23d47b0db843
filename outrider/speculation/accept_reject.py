"""From a verdict to an outcome: what the coordinator decides. Pure, the same wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate, takewhile
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
    """Read from the store by a resumed session, which does not know."""


@value(frozen=True, slots=True)
class Outcome:
    """What a round commits: the draft tokens of a path, and one token of the target after them."""

    path: tuple[int, ...]
    """The draft tokens that are accepted, by index; of a chain the first ones."""
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def last(self) -> int:
        """Index of the row that the last token is from: 0 behind the last committed token, i + 1
        behind draft token i."""
        return self.path[-1] + 1 if self.path else 0


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
    """Accepts draft tokens against `uniforms` [N] in (0, 1), of a chain taken as far as they are
    needed, and adds the token that follows.

    Draft token i passes iff uniforms[i] <= verdict.accept_probability[i]: a probability of 0 never
    passes, since no uniform is 0. Of a tree (`parents`) the first of siblings that passes is
    accepted, and goes on with its children. Raises `InvariantError` if the lengths do not fit
    together."""
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
    """The verdict by which a round commits the path to draft token `index` and nothing behind it:
    the draft token takes the place of the correction in the row that it follows.

    For an outcome whose path has this token, where no token can be drawn behind it. The tokens of
    the round are then those of the outcome up to there, so their law is the same: under every rule
    the chance that a path is committed as far as a token depends on no row behind that token."""
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
    """The path that is accepted, and whether nothing follows its end."""
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
        check(0.0 < uniform < 1.0, "each draft token has a uniform strictly between 0 and 1")
        yield uniform <= probability


@value(frozen=True, slots=True)
class Verdict:
    """What the target says of a proposal of K tokens."""

    accept_probability: tuple[float, ...]
    """[K]: draft token i passes iff its uniform is at most this: min(1, p / q) under token, h_i
    under block, 0 or 1 under coupled and greedy."""
    correction: tuple[int, ...]
    """[K+1]: the token that follows where n draft tokens were accepted."""
