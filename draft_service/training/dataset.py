"""What a drafter learns from: the documents that the target was asked about, in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.models.drafter_checkpoint import TrainedDescription
from outrider.speculation.text_acceptance import acceptance_of_windows, conditional_acceptance

from .documents import Document
from .teacher import TeacherCache, by_length, in_batches, packed

_POOL: Final = 1024
"""Documents that are sorted by length together, so that batches need little padding."""


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """What the target says at R places."""

    columns: torch.Tensor
    """[R, M]: of the head, for each listed token; any where `mass` is 0."""
    mass: torch.Tensor
    """[R, M], float32: p of each; 0 for a token that the head has no row for."""

    def at(self, rows: torch.Tensor) -> TeacherRows:
        """Of these [C]."""
        return TeacherRows(self.columns[rows], self.mass[rows])


@dataclass(frozen=True, slots=True)
class Example:
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


class Dataset:
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
        examples = [
            Example(number, index, document)
            for number, cache in enumerate(caches)
            for index, document in enumerate(cache.known)
        ]
        self.held_out = [example for example in examples if example.document.is_held_out]
        self.learned = [example for example in examples if not example.document.is_held_out]

    def epoch(self, seed: int, number: int, batch_tokens: int) -> list[list[Example]]:
        """All learned documents once, in batches of about so many tokens, padding included; a
        function of seed and number alone."""
        random = np.random.default_rng((seed, number))
        order = random.permutation(len(self.learned))
        batches: list[list[Example]] = []
        for start in range(0, len(order), _POOL):
            pool = [self.learned[i] for i in order[start : start + _POOL]]
            batches += alike(pool, batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]

    def batch(self, examples: Sequence[Example]) -> Batch:
        ids, rows, following = packed([example.document for example in examples])
        answers: dict[str, Any] = {
            name: np.concatenate(
                [
                    self._arrays[example.cache][name][
                        self._caches[example.cache].rows(example.index)
                    ]
                    for example in examples
                ]
            )
            for name in self._arrays[0]
        }
        lengths = [example.document.num_learned for example in examples]
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


def alike(examples: Sequence[Example], batch_tokens: int) -> list[list[Example]]:
    """In batches of similar length, of up to so many tokens with padding."""
    documents = [example.document for example in examples]
    batches = in_batches(documents, by_length(documents), batch_tokens)
    return [[examples[index] for index in batch] for batch in batches]


@dataclass(frozen=True, slots=True)
class Depth:
    """Draft token i of C chains, which go along the texts of a batch."""

    hidden: torch.Tensor
    """[C, D]: what the head reads of it."""
    rows: torch.Tensor
    """[C], ascending: the rows of the batch whose answers are about its place."""


class Learner:
    """A drafter that learns: what is trained of it, and what it drafts."""

    def __init__(
        self,
        module: Any,
        trained: nn.Module,
        frozen: Sequence[torch.Tensor],
        shape: str,
        save: Callable[[Path, Any, torch.Tensor, TrainedDescription], None],
        num_depths: int | None = None,
    ) -> None:
        """`trained` is the part of `module` that learns, without `frozen`, the last of which is the
        head. A step drafts `num_depths` tokens in a chain; None = one, and further ones come from
        further steps."""
        module.requires_grad_(False)
        trained.requires_grad_(True)
        for weight in frozen:
            weight.requires_grad_(False)
        self.module = module
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        self.head: torch.Tensor = frozen[-1]
        """[N, D], which stays as it is."""
        self.shape = shape
        """For people: what the weights are parts of, and how many."""
        self._write = save
        self._num_depths = num_depths

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    def draft(self, batch: Batch) -> list[Depth]:
        """Draft token 1, 2, .. that a step finds in each text, given the tokens before it; with a
        gradient where one is wanted."""
        raise NotImplementedError

    def by_position(
        self, texts: Sequence[Sequence[npt.NDArray[np.float64]]]
    ) -> tuple[float | None, ...]:
        """The chance of draft token 1, 2, .. given that those before it were accepted, from
        min(1, q(x) / p(x)) of each `Depth` along every text."""
        if self._num_depths is None:
            return conditional_acceptance([ratios.tolist() for [ratios] in texts])
        return acceptance_of_windows(texts, self._num_depths)

    def save(
        self, directory: Path, token_ids: torch.Tensor, description: TrainedDescription
    ) -> None:
        """Writes its files, but for the card; its logits are of `token_ids` [N]."""
        self._write(directory, self.module, token_ids, description)


def next_tokens(hidden: torch.Tensor) -> list[Depth]:
    """The first draft token of every row [R, D]; what comes behind it is that of the next row."""
    return [Depth(hidden, torch.arange(len(hidden), device=hidden.device))]


@dataclass(frozen=True, slots=True)
class Start:
    """A learner before it learns."""

    learner: Learner
    token_ids: npt.NDArray[np.int64]
    """[N], ascending: those of its head."""
    name: str
    """What it begins as; for people."""
    key: str
    """What tells it from every other of the same target and texts."""
    is_trained: bool
    """Whether it has learned before."""
