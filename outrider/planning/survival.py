"""How much of a proposal is accepted, given what the target wrote.

A verifier that loses nothing commits the target's own text x, whatever is drafted. Seen from the
other side: given x, rounds follow each other like a chain whose steps can be computed, and no
round need be played. With p and q after every transform, at each place of the text:

| rule | chance that the first n of a proposal are accepted, given the text |
| --- | --- |
| token | prod_{i<=n} min(1, q(x_i) / p(x_i)) |
| block | min_{m<=n} min(1, prod_{i<=m} q(x_i) / p(x_i)) |
| coupled | prod_{i<=n} P(the draft draws x_i, given that the target does) |
| greedy | 1 while x_i is the draft's likeliest, then 0 |

Token: the chance to draw x and accept it is prod min(p, q), and the text begins with x with chance
prod p; what follows an accepted prefix is the target's own again. Block: P(tau >= n, x) is
q(x_1..x_n) pi_n (Sun et al., ICLR 2025, lemma 3), and pi_n q / p telescopes to the minimum above.
Coupled: a race over p and q with the same noise, see `matched`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.errors import check
from outrider.speculation.sampling_params import Rule


@dataclass(frozen=True, slots=True)
class DraftedPlace:
    """What a drafter thinks of one token of a text, from the tokens before it alone."""

    ratio: float
    """q(x) / p(x) of the token x that the target wrote; at temperature 0 whether x is the
    likeliest, as 1 or 0."""
    match: float
    """P(the draft draws x, given that the target does) where both draw by the same noise."""


def survival(rule: Rule, places: Sequence[DraftedPlace]) -> tuple[float, ...]:
    """The chances, for n = 1..len(places), that n tokens or more of a proposal are accepted that
    was drawn for these places, given the text. Proposals that are one-hot have ratio and match 1
    where they propose x, else 0."""
    if rule is Rule.COUPLED:
        steps = np.array([place.match for place in places], dtype=np.float64)
        return tuple(np.cumprod(steps).tolist())
    ratios = np.array([place.ratio for place in places], dtype=np.float64)
    if rule is Rule.BLOCK:
        return tuple(np.minimum.accumulate(_capped_products(ratios)).tolist())
    return tuple(np.cumprod(np.minimum(1.0, ratios)).tolist())


def matched(
    p: npt.NDArray[np.float64], q_ids: Sequence[int], q_mass: Sequence[float], token_id: int
) -> float:
    """P(argmax(log q + g) = x | argmax(log p + g) = x) for Gumbel noise g: the chance of both is
    1 / sum_v max(p_v / p_x, q_v / q_x) (Daliri et al., arXiv 2408.07978), and that of the second is
    p_x. `p` [V] sums to 1, p_x > 0; q is 0 but at `q_ids`."""
    check(p[token_id] > 0, "the target wrote a token that it cannot write")
    mass = dict(zip(q_ids, q_mass, strict=True))
    own = mass.get(token_id, 0.0)
    if own <= 0:
        return 0.0
    scale = float(p[token_id]) / own
    inside = [v for v in q_ids if v < len(p)]
    shared = p[inside]
    larger = np.maximum(shared, scale * np.array([mass[v] for v in inside]))
    total = float(p.sum() - shared.sum() + larger.sum())
    total += scale * sum(mass[v] for v in q_ids if v >= len(p))
    return min(1.0, 1.0 / total)


def _capped_products(ratios: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """min(1, prod_{i<=m}), in logarithms: a product may be huge, and the next ratio 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(np.minimum(np.cumsum(np.log(ratios)), 0.0)))
