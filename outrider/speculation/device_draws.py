"""Draft draws of several depths that nobody looks at in between: all work is queued on the device
of the logits, and what was drawn is read in the end.

The transforms, the truncation, the quantisation and the race are those of `transforms.py` and
`drafting.py`, as operators whose shapes depend on no value. Where sums are added up in another
order, they round differently in the last place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.speculation.drafting import DraftedToken
from outrider.speculation.noise import RoundNoise
from outrider.speculation.philox_rows import all_uniforms_on_device, uniforms_on_device
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.transforms import check_maxima

_Ints = npt.NDArray[np.int64]
_REALS: Final = 3
"""Words of a row that are float64: temperature, min-p, top-p. Then follow: which token is drawn
(`_LIKELIEST`, ...), top-k, seed low and high, stream, and both words of each depth's place."""
_FIXED: Final = 8
_LIKELIEST, _COUPLED, _QUANTISED = range(3)
_WORD_MASK: Final = 0xFFFFFFFF
_TOKEN, _LARGEST, _SUPPORT = range(3)
"""Words of what was drawn: the token, the bits of the row's largest logit, and, where any row is
quantised, the ids of its support, ascending, and their counts."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a session's tokens are drawn."""

    sampling: SamplingParams
    rule: Rule
    noise: RoundNoise

    @property
    def kind(self) -> int:
        """Which token is drawn."""
        if self.sampling.greedy or self.rule is Rule.GREEDY:
            return _LIKELIEST
        return _COUPLED if self.rule is Rule.COUPLED else _QUANTISED


def can_draw(sampling: SamplingParams) -> bool:
    """Whether nothing but the row's logits decides what is drawn."""
    return not (sampling.penalised or sampling.logit_bias)


class DeviceDraws:
    """Draws for S sessions at depths 0..`num_depths` - 1; implements the engine's `Draws`."""

    def __init__(
        self,
        drawings: Sequence[Drawing],
        num_depths: int,
        entries_max: int,
        vocabulary: ReducedVocabulary | None = None,
    ) -> None:
        """Of each distribution `entries_max` tokens at most are kept. With a `vocabulary` logits
        are [S, N], of its columns; tokens, distributions and noise have the target's ids."""
        self._drawings = drawings
        self._num_depths = num_depths
        self._entries_max = entries_max
        self._vocabulary = vocabulary
        kinds = {drawing.kind for drawing in drawings}
        self._any_coupled = _COUPLED in kinds
        self._any_quantised = _QUANTISED in kinds
        self._any_filter = any(_filters(drawing.sampling) for drawing in drawings)

    @property
    def key(self) -> Hashable:
        """See `Draws.key`. It keeps the vocabulary, whose table recorded work reads."""
        return (
            "draft", self._num_depths, self._entries_max, self._vocabulary,
            self._any_coupled, self._any_quantised, self._any_filter,
        )  # fmt: skip

    def words(self, num_rows: int) -> _Ints:
        """See `Draws.words`."""
        rows = np.stack([_row(drawing, self._num_depths) for drawing in self._drawings])
        return np.pad(rows, ((0, num_rows - len(rows)), (0, 0)), mode="edge").reshape(-1)

    def draw(self, logits: torch.Tensor, words: torch.Tensor, depth: int) -> torch.Tensor:
        """See `Draws.draw`."""
        rows = words.view(len(logits), -1)
        kinds = rows[:, _REALS]
        largest = logits.double().amax(dim=1)
        token = self._token_ids(logits.argmax(dim=1))
        drawn = [token, largest.view(torch.int64)]
        if self._any_coupled or self._any_quantised:
            temperature, min_p, top_p = rows[:, :_REALS].contiguous().view(torch.float64).unbind(1)
            ids, weights = self._ranked(
                (logits.double() - largest[:, None]).div_(temperature[:, None]).exp_(),
                min_p, top_p, rows[:, _REALS + 1],
            )  # fmt: skip
            place = rows[:, _FIXED + 2 * depth : _FIXED + 2 * depth + 2]
            low, high, stream = rows[:, _REALS + 2 : _FIXED].unbind(1)
            keys = (low[:, None], high[:, None], place[:, :1], place[:, 1:], stream[:, None])
            if self._any_coupled:
                numbers = self._uniforms(keys, ids)
                token = torch.where(kinds == _COUPLED, _winner(ids, weights, numbers), token)
            if self._any_quantised:
                ids, counts = _quantised(
                    ids[:, : self._entries_max], weights[:, : self._entries_max]
                )
                winner = _winner(ids, counts, uniforms_on_device(keys, ids))
                token = torch.where(kinds == _QUANTISED, winner, token)
                drawn += [*ids.unbind(1), *counts.long().unbind(1)]
        drawn[_TOKEN] = token
        return torch.stack(drawn, dim=1)

    def read(self, drawn: _Ints, session: int) -> DraftedToken:
        """One row of what `draw` gave, for session `session`. Raises `InvariantError` for logits
        that are no numbers to draw from."""
        check_maxima(drawn[_LARGEST : _LARGEST + 1].view(np.float64).tolist())
        token_id = int(drawn[_TOKEN])
        if self._drawings[session].kind != _QUANTISED:
            return token_id, None
        ids, counts = np.split(drawn[_SUPPORT:], 2)
        kept = counts > 0
        if kept.sum() == 1:
            return token_id, None
        return token_id, DraftDistribution(tuple(ids[kept].tolist()), tuple(counts[kept].tolist()))

    def _token_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """The tokens of columns of the logits."""
        if self._vocabulary is None:
            return columns
        return self._vocabulary.table(columns.device)[columns]

    def _uniforms(self, keys: tuple[torch.Tensor, ...], ids: torch.Tensor) -> torch.Tensor:
        """Numbers of the tokens `ids`, all that have a column: [S, N]."""
        if self._vocabulary is None:
            return all_uniforms_on_device(keys, ids.shape[1]).gather(1, ids)
        return uniforms_on_device(keys, ids)

    def _ranked(
        self, weights: torch.Tensor, min_p: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and `weights` [S, V] after all filters, the largest first (ties: lowest id)."""
        if self._any_filter:
            weights = weights.masked_fill(weights < min_p[:, None], 0.0)
        weights, columns = weights.sort(dim=1, descending=True, stable=True)
        ids = self._token_ids(columns)
        if not self._any_filter:
            return ids, weights
        ranks = torch.arange(weights.shape[1], device=weights.device)
        weights.masked_fill_((ranks >= top_k[:, None]) & (top_k > 0)[:, None], 0.0)
        reached = weights.cumsum(dim=1) >= (top_p * weights.sum(dim=1))[:, None]
        # The token with which the goal is reached is kept.
        beyond = reached.roll(1, dims=1) & (ranks > 0) & (top_p < 1.0)[:, None]
        return ids, weights.masked_fill_(beyond, 0.0)


def _filters(sampling: SamplingParams) -> bool:
    return sampling.min_p > 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def _row(drawing: Drawing, num_depths: int) -> _Ints:
    """The words of one session."""
    sampling, noise = drawing.sampling, drawing.noise
    temperature = 1.0 if drawing.kind == _LIKELIEST else sampling.temperature
    reals = np.array([temperature, sampling.min_p, sampling.top_p]).view(np.int64)
    stream = int(noise.draft_stream)
    places = [noise.place(depth) for depth in range(num_depths)]
    others = [drawing.kind, sampling.top_k, noise.seed & _WORD_MASK, noise.seed >> 32, stream]
    inner = [word for place in places for word in (place.a, place.b)]
    return np.concatenate([reals, np.array([*others, *inner], dtype=np.int64)])


def _quantised(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`drafting.quantise` of the largest weights: ids [S, M], ascending, and counts, float64; 0 for
    tokens that get none."""
    ids, order = ids.sort(dim=1)
    mass = weights.gather(1, order)
    shares = mass / mass.sum(dim=1, keepdim=True)
    shares *= COUNT_TOTAL
    counts = shares.floor()
    missing = COUNT_TOTAL - counts.sum(dim=1, keepdim=True)
    remainders = torch.where(mass > 0, counts - shares, 1.0)
    by_remainder = remainders.argsort(dim=1, stable=True)
    ranks = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    places = torch.empty_like(by_remainder).scatter_(1, by_remainder, ranks)
    return ids, counts + (places < missing)


def _winner(ids: torch.Tensor, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The race of `race.race` among listed ids: [S]."""
    first = (weights / uniforms.log_().neg_()).argmax(dim=1, keepdim=True)
    return ids.gather(1, first)[:, 0]
