"""Averages of how long proposals are and how much of them is accepted. Pure: learns from verified
rounds only.

A sibling costs the target one more row and the draft almost nothing. It may be accepted when the
draft token at its place is refused; the token after it then comes from the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.limits import NUM_DRAFT_TOKENS_MAX, SIBLINGS_MAX
from outrider.speculation.proposal import DraftTree

if TYPE_CHECKING:
    from .round_cost import Forecast

FIRST_ACCEPTED = 0.7
"""Assumed chance that a first draft token is accepted while nothing is known. It is high enough
that drafting is tried, as only rounds with a draft show anything."""
FIRST_TAKEN = 0.25
"""Assumed chance that a first sibling is accepted if the token before it was refused; for the n-th
sibling, 1/n of that. It is high enough that some are tried where rows cost little."""
SIBLINGS_OF_A_ROUND_MAX = 16
"""Siblings in one proposal, over all places."""
Array = npt.NDArray[np.float64]


class Prospects(NamedTuple):
    """What to expect of a proposal, by depth 1, 2, ..., K. [K] each."""

    committed: Array
    """Chance that a token of this depth is proposed, and it and all before it are accepted."""
    proposed: Array
    """Chance that a token of this depth is proposed."""
    refused: Array
    """Chance that it is proposed and refused, and all before it are accepted."""


class SiblingChances(NamedTuple):
    """What a round shows about first, second, ... siblings: sums over its places with a draft
    token, each weighted by the chance that the sibling had to be tried."""

    asked: tuple[float, ...]
    """Places where a sibling was asked for."""
    offered: tuple[float, ...]
    """Places that had one."""
    taken: tuple[float, ...]
    """Places where it was accepted."""


NO_SIBLINGS = SiblingChances((), (), ())


def observed(num_asked: int, survival: Sequence[float]) -> Array:
    """What a round shows that asked for `num_asked` tokens and got `len(survival)`. [5, K], one
    column for each depth, with `reached` the chance that all tokens before it were accepted:
    asked for, times `reached`; proposed, times `reached`; the chance that it was accepted too;
    asked for, and all before it proposed; proposed. `survival` is from
    `outrider.speculation.accept_reject.survival`."""
    counts, num_proposed = np.zeros((5, num_asked)), min(num_asked, len(survival))
    reached = (1.0, *survival)[:num_asked]
    counts[0, : len(reached)] = reached
    counts[1, :num_proposed] = reached[:num_proposed]
    counts[2, :num_proposed] = survival[:num_proposed]
    counts[3, : len(reached)] = counts[4, :num_proposed] = 1.0
    return counts


class _Averages:
    """Exponentially weighted sums over rounds, of one session or of all."""

    shape: tuple[int, int]

    def __init__(self, memory_rounds: float, prior_rounds: float, prior: Any = None) -> None:
        """The weight of a round falls to 1/e over `memory_rounds` others. `prior`, the averages
        over more sessions, weighs as much as `prior_rounds` new rounds."""
        self._keep = 1.0 - 1.0 / memory_rounds
        self._pull = prior_rounds
        self._prior = prior
        self.num_rounds = 0
        self._sums = np.zeros(self.shape)


class DepthAverages(_Averages):
    """Acceptance and lengths of proposals by depth, as sums of what was `observed`. Depths that few
    rounds have reached are drawn towards the prior, or without one towards the depth before.
    Acceptance is that of proposed tokens."""

    shape = (5, NUM_DRAFT_TOKENS_MAX)

    def fade(self) -> None:
        """Counts a round without a draft."""
        self._sums *= self._keep

    def note(self, counts: Array) -> None:
        """Counts a round with a draft, from `observed`."""
        self.fade()
        self.num_rounds += 1
        self._sums[:, : counts.shape[1]] += counts

    def prospects(self, num_asked: int) -> Prospects:
        """What to expect of a proposal of up to `num_asked` tokens."""
        rates = np.array(self._rates(num_asked)).reshape(num_asked, 3)
        goes_on, accepted, proposed = rates.T
        committed = np.cumprod(goes_on * accepted)
        offered = np.concatenate(([1.0], committed[:-1]))[:num_asked] * goes_on
        return Prospects(committed, np.cumprod(proposed), offered - committed)

    def _rates(self, num_depths: int) -> list[tuple[float, float, float]]:
        """Chances at each depth, given the depth before: that a proposal whose tokens were all
        accepted so far goes on, that its next token is accepted then, and that any proposal goes
        on."""
        pull, rate, before = self._pull, FIRST_ACCEPTED, 0.0
        prior = None if self._prior is None else self._prior._rates(num_depths)
        rates = []
        sums = self._sums[:, :num_depths].T.tolist()
        for depth, (asked, offered, accepted, wanted, proposed) in enumerate(sums):
            goes_on = goes_on_at_all = 1.0
            if prior is not None:
                goes_on, likely, goes_on_at_all = prior[depth]
                # The prior, scaled by how this session compares with it at the depth before.
                rate = min(1.0, rate * likely / before) if before > 0 else likely
                before = likely
            rate = (accepted + pull * rate) / (offered + pull)
            rates.append((
                (offered + pull * goes_on) / (asked + pull), rate,
                (proposed + pull * goes_on_at_all) / (wanted + pull),
            ))  # fmt: skip
        return rates


class SiblingAverages(_Averages):
    """Acceptance of siblings by rank, like `DepthAverages`."""

    shape = (3, SIBLINGS_MAX)

    def note(self, found: SiblingChances) -> None:
        """Counts a round with a draft."""
        self._sums *= self._keep
        for sums, values in zip(self._sums, found, strict=True):
            sums[: len(values)] += values

    def rates(self) -> Array:
        """[2, `SIBLINGS_MAX`]: chances that the first, second, ... sibling is offered if it is
        asked for, and that it is accepted if it is offered and all before it are refused."""
        ranks = np.arange(1, SIBLINGS_MAX + 1)
        prior = np.array([np.ones(SIBLINGS_MAX), FIRST_TAKEN / ranks])
        if self._prior is not None:
            prior = self._prior.rates()
        rates: Array = (self._sums[1:] + self._pull * prior) / (self._sums[:-1] + self._pull)
        return rates


def sibling_chances(
    tree: DraftTree, accept_probability: Sequence[float], asked: Sequence[int]
) -> SiblingChances:
    """What a verdict shows about siblings; `asked` says how many were asked for at each place."""
    sums = [[0.0] * max(asked, default=0) for _ in range(3)]
    reached = 1.0
    for token, num_asked in zip(tree.spine, asked, strict=False):
        group = tree.children[tree.parents[token] + 1]
        left = reached * (1.0 - accept_probability[token])
        for rank in range(num_asked):
            sums[0][rank] += left
            if rank + 1 < len(group):
                taken = left * accept_probability[group[rank + 1]]
                sums[1][rank] += left
                sums[2][rank] += taken
                left -= taken
        reached *= accept_probability[token]
    return SiblingChances(*map(tuple, sums))


def fitting(siblings: tuple[int, ...], room: int) -> tuple[int, ...]:
    """`siblings` by place, cut from the end to at most `room` in all."""
    kept: list[int] = []
    for num in siblings:
        kept.append(max(0, min(num, room)))
        room -= kept[-1]
    return tuple(kept) if any(kept) else ()


def shaped(
    promised: Sequence[tuple[float, float]],
    prospects: Prospects,
    averages: SiblingAverages,
    forecast: Forecast,
    siblings_max: int,
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Adds siblings to proposals of 1, 2, ... tokens while they raise the tokens per second.
    `promised` has the expected tokens and seconds without them. Yields for each length the siblings
    by place, at most `siblings_max` at one place, and the tokens and seconds with them."""
    if siblings_max == 0:
        yield from (((), *one) for one in promised)
        return
    offered, taken = averages.rates()[:, :siblings_max]
    left = np.concatenate(([1.0], np.cumprod(1.0 - offered * taken)))[:-1]
    gains = np.outer(prospects.refused, np.minimum.accumulate(left * offered * taken))
    likely = np.outer(prospects.proposed, offered)
    order = np.argsort(-gains, axis=None, kind="stable")
    depths = order // siblings_max
    best = [*zip(gains.flat[order], likely.flat[order], depths.tolist(), strict=True)]
    row_s, row_lost = forecast.row_s, forecast.row_lost
    for k, (num_tokens, seconds) in enumerate(promised, start=1):
        siblings, row = [0] * k, k
        for gain, chance, depth in best:
            if depth >= k:
                continue
            if row >= min(len(row_s), k + SIBLINGS_OF_A_ROUND_MAX):
                break
            more, cost = float(gain - chance * row_lost[row]), float(chance * row_s[row])
            if more * seconds <= num_tokens * cost:
                break
            num_tokens, seconds, row = num_tokens + more, seconds + cost, row + 1
            siblings[depth] += 1
        yield tuple(siblings) if any(siblings) else (), num_tokens, seconds
