"""How much of the held-out documents' answers a student would have proposed rightly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from outrider.distillation.learning import Batch, Lessons, Place, alike
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.acceptance import conditional_acceptance

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
    which the student would have a little too, counts as refused."""

    by_temperature: tuple[TemperatureRates, ...]
    by_position: tuple[float | None, ...]
    """At temperature 1: the chance of draft token i, given that those before it were accepted."""

    @property
    def num_tokens(self) -> int:
        """Places."""
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


def measure(student: Any, lessons: Lessons, places: Sequence[Place]) -> Measured:
    """Reads these documents with the student. What stands before their answers is not measured: the
    target did not write it as it writes answers. Temperatures of the target's texts and of the two
    distributions are different things: the latter are always at temperature 1."""
    found: dict[float | None, list[tuple[float, float, int]]] = {}
    texts: list[list[float]] = []
    for batch_places in alike(places, _TOKENS_OF_A_PASS):
        batch = lessons.batch(batch_places)
        hits, overlaps, ratios = _read(student, batch)
        sizes = [place.document.num_learned for place in batch_places]
        bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        for place, (first, end) in zip(batch_places, pairwise(bounds), strict=True):
            start = first + place.document.num_before_answer
            sums = (float(hits[start:end].sum()), float(overlaps[start:end].sum()), end - start)
            found.setdefault(place.document.temperature, []).append(sums)
            if place.document.temperature == 1.0:
                texts.append(ratios[start:end].tolist())
    rates = []
    for temperature in sorted(found, key=lambda t: (t is None, t or 0.0)):
        hits_, overlaps_, counts = (sum(column) for column in zip(*found[temperature], strict=True))
        rates.append(TemperatureRates(temperature, int(counts), hits_ / counts, overlaps_ / counts))
    return Measured(tuple(rates), conditional_acceptance(texts))


def _read(student: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row whether the likeliest tokens agree, sum min(p, q), and min(1, q(x) / p(x)) of the
    token x that stands there: [R] each, on the CPU."""
    head = student.get_output_embeddings().weight
    with torch.inference_mode():
        hidden = student.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        wanted = hidden.reshape(-1, hidden.shape[-1])[batch.rows]
        parts = []
        for start in range(0, len(wanted), _ROWS_OF_A_BLOCK):
            rows = slice(start, start + _ROWS_OF_A_BLOCK)
            q = (wanted[rows] @ head.t()).float().softmax(dim=1)
            kept = q.topk(min(DRAFT_SUPPORT_ENTRIES, q.shape[1]), dim=1)
            likeliest = kept.indices[:, 0]
            q = torch.zeros_like(q).scatter_(1, kept.indices, kept.values)
            q /= kept.values.sum(dim=1, keepdim=True)
            listed = q.gather(1, batch.teacher.columns[rows])
            overlap = torch.minimum(listed, batch.teacher.mass[rows]).sum(dim=1)
            following = batch.following[rows]
            drafted = q.gather(1, following.clamp(min=0)[:, None])[:, 0] * (following >= 0)
            ratio = (drafted / batch.written[rows].exp()).clamp(max=1.0)
            parts.append((likeliest == batch.likeliest[rows], overlap, ratio))
    hits, overlaps, ratios = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    return hits, overlaps, ratios
