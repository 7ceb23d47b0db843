"""What a drafter learns from: the documents that the target was asked about, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .documents import Document
from .losses import TeacherRows
from .teacher import TeacherCache, by_length, in_batches, packed

_POOL: Final = 1024
"""Documents that are sorted by length together, so that batches need little padding."""


@dataclass(frozen=True, slots=True)
class Place:
    """One document, and where its answers stand."""

    cache: int
    index: int
    document: Document


@dataclass(frozen=True, slots=True)
class Batch:
    """B documents side by side."""

    token_ids: torch.Tensor
    """[B, T]; zeros behind the shorter ones, where nobody looks."""
    rows: torch.Tensor
    """[R]: those of the B * T places that are followed by a learned token."""
    following: torch.Tensor
    """[R]: the columns of those tokens; -1 where the head has none."""
    written: torch.Tensor
    """[R]: the target's log-probability of each."""
    likeliest: torch.Tensor
    """[R]: the columns of the target's likeliest tokens; -1 where the head has none."""
    teacher: TeacherRows
    behind: torch.Tensor
    """[R]: how many rows of the same document come behind."""
    features: torch.Tensor | None
    """[R, D], float16: what the target's head read at each, or one of its layers put out; None
    where neither was kept."""


class Lessons:
    """Documents with the target's answers, for a head over `token_ids` [N], ascending."""

    def __init__(
        self,
        caches: Sequence[TeacherCache],
        token_ids: npt.NDArray[np.int64],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._caches = caches
        self._arrays = [cache.arrays() for cache in caches]
        self._device = device
        self._columns = np.full(vocab_size, -1, dtype=np.int64)
        self._columns[token_ids] = np.arange(len(token_ids))
        places = [
            Place(number, index, document)
            for number, cache in enumerate(caches)
            for index, document in enumerate(cache.known)
        ]
        self.held_out = [place for place in places if place.document.is_held_out]
        self.learned = [place for place in places if not place.document.is_held_out]

    def epoch(self, seed: int, number: int, batch_tokens: int) -> list[list[Place]]:
        """All learned documents once, in batches of about so many tokens, padding included; a
        function of seed and number alone."""
        random = np.random.default_rng((seed, number))
        order = random.permutation(len(self.learned))
        batches: list[list[Place]] = []
        for start in range(0, len(order), _POOL):
            pool = [self.learned[i] for i in order[start : start + _POOL]]
            batches += alike(pool, batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]

    def batch(self, places: Sequence[Place]) -> Batch:
        """These documents and the target's answers, on the device."""
        ids, rows, following = packed([place.document for place in places])
        answers: dict[str, Any] = {
            name: np.concatenate(
                [
                    self._arrays[place.cache][name][self._caches[place.cache].rows(place.index)]
                    for place in places
                ]
            )
            for name in self._arrays[0]
        }
        lengths = [place.document.num_learned for place in places]
        behind = np.concatenate([np.arange(length)[::-1] for length in lengths])
        columns = self._columns[answers["ids"]]
        mass = np.where(columns < 0, 0.0, np.exp(answers["logprobs"].astype(np.float32)))
        teacher = TeacherRows(
            columns=self._put(columns.clip(0)),
            mass=self._put(mass.astype(np.float32)),
        )
        return Batch(
            token_ids=self._put(ids),
            rows=self._put(rows),
            following=self._put(self._columns[following]),
            written=self._put(answers["written"].astype(np.float32)),
            likeliest=self._put(columns[:, 0]),
            teacher=teacher,
            behind=self._put(behind),
            features=self._put(answers["features"]) if "features" in answers else None,
        )

    def _put(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def alike(places: Sequence[Place], batch_tokens: int) -> list[list[Place]]:
    """In batches of similar length, of up to so many tokens with padding."""
    documents = [place.document for place in places]
    batches = in_batches(documents, by_length(documents), batch_tokens)
    return [[places[index] for index in batch] for batch in batches]
