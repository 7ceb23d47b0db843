"""How much of the held-out documents' answers a drafter would have proposed rightly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.limits import DRAFT_SUPPORT_ENTRIES

from .dataset import Batch, Dataset, Example, Learner, alike

MEASURED_TEMPERATURES: Final = (0.0, 1.0)
"""Of the answers to each prompt that a drafter is to be measured with, ..."""
MEASURED_TOKENS_MAX: Final = 128
"""... and their greatest length: as `outrider bench acceptance` does by default."""
MEASURED_PROMPT_TOKENS_MAX: Final = 4096
"""Of such a prompt. It is read at once with its answer, and attention over T tokens holds T * T
numbers of every head, some three times over: of 9 heads in half precision 0.3 GB each time."""
_ROWS_OF_A_BLOCK: Final = 512
_TOKENS_OF_A_PASS: Final = 4096


@dataclass(frozen=True, slots=True)
class TemperatureRates:
    """Over texts that the target wrote at one temperature; None = texts by others."""

    temperature: float | None
    num_tokens: int
    greedy: float
    """Share of places where both find the same token likeliest."""
    sampled: float
    """Mean of sum min(p, q) at temperature 1, with the q that would go on the wire."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Acceptance in answers of held-out documents. Of p the 64 likeliest tokens count; the rest, of
    which the drafter would have a little too, counts as refused."""

    by_temperature: tuple[TemperatureRates, ...]
    by_position: tuple[float | None, ...]
    """At temperature 1: the chance of draft token i, given that those before it were accepted."""

    @property
    def num_tokens(self) -> int:
        return sum(rates.num_tokens for rates in self.by_temperature)

    @property
    def greedy(self) -> float:
        """Over text written at temperature 0, where there is some; else over all."""
        return self._rate(0.0, "greedy")

    @property
    def sampled(self) -> float:
        """Over text written at temperature 1, where there is some; else over all."""
        return self._rate(1.0, "sampled")

    def _rate(self, temperature: float, name: str) -> float:
        chosen = [r for r in self.by_temperature if r.temperature == temperature]
        chosen = chosen or list(self.by_temperature)
        total = sum(rates.num_tokens for rates in chosen)
        return float(sum(getattr(rates, name) * rates.num_tokens for rates in chosen)) / total


def measure(
    learner: Learner, dataset: Dataset, examples: Sequence[Example], *, is_first_alone: bool = False
) -> Measured:
    """Drafts along these documents. What stands before their answers is not measured: the target
    did not write it as it writes answers. Temperatures of the target's texts and of the two
    distributions are different things: the latter are always at temperature 1. The rates are of
    first draft tokens; with `is_first_alone` nothing else is looked at."""
    found: dict[float | None, list[tuple[float, float, int]]] = {}
    texts: list[list[npt.NDArray[np.float64]]] = []
    for batch_examples in alike(examples, _TOKENS_OF_A_PASS):
        depths = _read(learner, dataset.batch(batch_examples), is_first_alone)
        sizes = [example.document.num_learned for example in batch_examples]
        bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        for example, (first, end) in zip(batch_examples, pairwise(bounds), strict=True):
            start = first + example.document.num_before_answer
            parts = [depth.between(start + number, end) for number, depth in enumerate(depths)]
            hits, overlaps = parts[0].hits, parts[0].overlaps
            sums = (float(hits.sum()), float(overlaps.sum()), len(hits))
            found.setdefault(example.document.temperature, []).append(sums)
            if example.document.temperature == 1.0:
                texts.append([part.ratios for part in parts])
    rates = []
    for temperature in sorted(found, key=lambda t: (t is None, t or 0.0)):
        hits_, overlaps_, counts = (sum(column) for column in zip(*found[temperature], strict=True))
        rates.append(TemperatureRates(temperature, int(counts), hits_ / counts, overlaps_ / counts))
    return Measured(tuple(rates), learner.by_position(texts))


@dataclass(frozen=True, slots=True)
class _Drafted:
    """Of one draft token of C chains, at rows [C] of a batch, ascending:"""

    rows: npt.NDArray[np.int64]
    hits: npt.NDArray[np.bool_]
    """whether the likeliest tokens agree,"""
    overlaps: npt.NDArray[np.float32]
    """sum min(p, q),"""
    ratios: npt.NDArray[np.float64]
    """and min(1, q(x) / p(x)) of the token x that stands there."""

    def between(self, start: int, end: int) -> _Drafted:
        first, last = np.searchsorted(self.rows, [start, end])
        part = slice(int(first), int(last))
        return _Drafted(self.rows[part], self.hits[part], self.overlaps[part], self.ratios[part])


def _read(learner: Learner, batch: Batch, is_first_alone: bool) -> list[_Drafted]:
    found = []
    with torch.inference_mode():
        depths = learner.draft(batch)
        for depth in depths[:1] if is_first_alone else depths:
            parts = [
                _compared(hidden @ learner.head.t(), batch, rows)
                for hidden, rows in zip(
                    torch.split(depth.hidden, _ROWS_OF_A_BLOCK),
                    torch.split(depth.rows, _ROWS_OF_A_BLOCK),
                    strict=True,
                )
            ]
            hits, overlaps, ratios = (
                torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)
            )
            rows = depth.rows.cpu().numpy()
            found.append(_Drafted(rows, hits, overlaps, ratios.astype(np.float64)))
    return found


def _compared(
    logits: torch.Tensor, batch: Batch, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hits, overlaps and ratios [C] of `logits` [C, N] that are scored against these rows [C]."""
    q = logits.float().softmax(dim=1)
    kept = q.topk(min(DRAFT_SUPPORT_ENTRIES, q.shape[1]), dim=1)
    likeliest = kept.indices[:, 0]
    q = torch.zeros_like(q).scatter_(1, kept.indices, kept.values)
    q /= kept.values.sum(dim=1, keepdim=True)
    teacher = batch.teacher.at(rows)
    overlap = torch.minimum(q.gather(1, teacher.columns), teacher.mass).sum(dim=1)
    following = batch.following[rows]
    drafted = q.gather(1, following.clamp(min=0)[:, None])[:, 0] * (following >= 0)
    ratio = (drafted / batch.written[rows].exp()).clamp(max=1.0)
    return likeliest == batch.likeliest[rows], overlap, ratio
