"""What a drafter learns from: the documents that the target was asked about, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .teacher import TeacherCache, packed

_POOL: Final = 1024
"""Documents that are sorted by length together, so that batches need little padding."""


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """What the target says at R places."""

    columns: torch.Tensor
    """[R, M]: of the head, for each listed token; any where `mass` is 0."""
    mass: torch.Tensor
    """[R, M], float32: p of each; 0 for a token that the head has no row for."""

    def at(self, rows: torch.Tensor | slice) -> TeacherRows:
        """Of these [C]."""
        return TeacherRows(self.columns[rows], self.mass[rows])


@dataclass(frozen=True, slots=True)
class Batch:
    """B documents side by side."""

    token_ids: torch.Tensor
    """[B, T]; zeros behind the shorter ones, where nothing looks."""
    rows: torch.Tensor
    """[R]: those of the B * T places that are followed by a learned token."""
    following: torch.Tensor
    """[R]: the columns of those tokens; -1 where the head has none."""
    written: torch.Tensor
    """[R]: the target's log-probability of each."""
    likeliest: torch.Tensor
    """[R]: the columns of the target's likeliest tokens; -1 where the head has none."""
    teacher: TeacherRows
    sizes: list[int]
    """[B]: of the rows, how many each document has."""
    behind: torch.Tensor
    """[R]: how many rows of the same document come behind."""
    features: torch.Tensor
    """[R, D], float16: what the target's head read at each, or one of its layers put out; of width
    0 where neither was kept."""


class Dataset:
    """Documents with the target's answers, for a head over `token_ids` [N], ascending. A document
    goes by its index."""

    def __init__(self, cache: TeacherCache, token_ids: npt.NDArray[np.int64]) -> None:
        self.cache = cache
        self._columns = np.full(cache.vocab_size, -1, dtype=np.int64)
        self._columns[token_ids] = np.arange(len(token_ids))
        documents = cache.known
        self.held_out = [i for i, document in enumerate(documents) if document.is_held_out]
        self.learned = [i for i, document in enumerate(documents) if not document.is_held_out]

    def epoch(self, seed: int, number: int, batch_tokens: int) -> list[list[int]]:
        """All learned documents once, in batches of about so many tokens, padding included; a
        function of seed and number alone."""
        random = np.random.default_rng((seed, number))
        order = [self.learned[i] for i in random.permutation(len(self.learned))]
        batches: list[list[int]] = []
        for start in range(0, len(order), _POOL):
            batches += self.cache.batches(order[start : start + _POOL], batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]

    def batch(self, indices: Sequence[int]) -> Batch:
        documents = [self.cache.documents[index] for index in indices]
        ids, rows, following = packed(documents)
        answers = self.cache.answers(indices)
        sizes = [document.num_learned for document in documents]
        columns = self._columns[answers["ids"]]
        mass = np.where(columns < 0, 0.0, np.exp(answers["logprobs"].astype(np.float32)))
        return Batch(
            token_ids=self._put(ids),
            rows=self._put(rows),
            following=self._put(self._columns[following]),
            written=self._put(answers["written"].astype(np.float32)),
            likeliest=self._put(columns[:, 0]),
            teacher=TeacherRows(self._put(columns.clip(0)), self._put(mass.astype(np.float32))),
            sizes=sizes,
            behind=self._put(np.concatenate([np.arange(size)[::-1] for size in sizes])),
            features=self._put(answers.get("features", np.zeros((len(rows), 0), np.float16))),
        )

    def _put(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.cache.device)
