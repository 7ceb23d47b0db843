"""Draft draws of several depths that nobody looks at in between: all work is queued on the device
of the logits, and what was drawn is read in the end.

The filters, the truncation, the quantisation and the race are those of `logits_processing.py`,
`draft_sampling.py` and `gumbel_max.py`, in operators whose shapes depend on no value.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.speculation.draft_sampling import DraftedToken, count_levels, place_of
from outrider.speculation.draft_vocabulary import DraftVocabulary
from outrider.speculation.gumbel_max import speeds, token_keys, uniforms
from outrider.speculation.logits_processing import check_maxima, keep_likely_on_device, largest
from outrider.speculation.proposal import DraftDistribution
from outrider.speculation.random_streams import RoundNoise, row_keys
from outrider.speculation.sampling_params import Rule, SamplingParams

_Ints = npt.NDArray[np.int64]
_REALS: Final = 3
"""Words of a row that are float64: temperature, min-p, top-p. Then follow: which token is drawn
(`_LIKELIEST`, ...), top-k, and both keys of each depth's noise."""
_FIXED: Final = 5
_LIKELIEST, _COUPLED, _QUANTISED = range(3)
_TOKEN, _LARGEST, _SUPPORT = range(3)
"""Words of what was drawn: the token, the bits of the row's largest logit, and, where any row is
quantised, the ids of its support and their counts."""


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
        vocabulary: DraftVocabulary | None = None,
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
        self._any_filter = any(drawing.sampling.filtered for drawing in drawings)

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
        logits = logits if logits.dtype == torch.float64 else logits.float()
        maxima = logits.amax(dim=1, keepdim=True)
        token = self._token_ids(logits.argmax(dim=1))
        drawn = [token, maxima[:, 0].double().view(torch.int64)]
        if self._any_coupled or self._any_quantised:
            reals = rows[:, :_REALS].contiguous().view(torch.float64)
            temperature, min_p, top_p = reals[:, :, None].unbind(1)
            weights = ((logits - maxima) / temperature.to(logits.dtype)).softmax(dim=1)
            if self._any_filter:
                keep_likely_on_device(weights, min_p, rows[:, _REALS + 1 : _FIXED], top_p)
            first = _FIXED + 2 * depth
            keys = (rows[:, first : first + 1], rows[:, first + 1 : first + 2])
            if self._any_coupled:
                every = torch.arange(weights.shape[1], device=weights.device)[None]
                winner = speeds(weights, self._token_ids(every), keys).argmax(dim=1)
                token = torch.where(kinds == _COUPLED, self._token_ids(winner), token)
            if self._any_quantised:
                values, columns = largest(
                    weights if self._any_filter else logits, self._entries_max
                )
                if not self._any_filter:
                    values = ((values - maxima).double() / temperature).exp()
                ids, levels = self._token_ids(columns), count_levels(values.double())
                zeros = levels.new_zeros((len(levels), 1))
                uniform = uniforms(keys, torch.zeros_like(keys[0]))
                winner = ids.gather(1, place_of(levels, uniform)[:, None])[:, 0]
                token = torch.where(kinds == _QUANTISED, winner, token)
                drawn += [*ids.unbind(1), *levels.diff(prepend=zeros, dim=1).long().unbind(1)]
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


def _row(drawing: Drawing, num_depths: int) -> _Ints:
    """The words of one session."""
    sampling, noise = drawing.sampling, drawing.noise
    temperature = 1.0 if drawing.kind == _LIKELIEST else sampling.temperature
    reals = np.array([temperature, sampling.min_p, sampling.top_p]).view(np.int64)
    places = [noise.place(depth) for depth in range(num_depths)]
    keys = token_keys(row_keys(noise.seed, places, [noise.draft_stream] * num_depths))
    others = np.array([drawing.kind, max(sampling.top_k, 0)], dtype=np.int64)
    return np.concatenate([reals, others, np.concatenate(keys, axis=1).ravel()])
