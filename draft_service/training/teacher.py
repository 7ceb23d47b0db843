"""What the target says of every learned token, computed once and kept on disk.

array       a row for each learned token, in the order of the documents
`ids`       [64] the likeliest tokens, likeliest first: uint16, or uint32 for a large vocabulary
`logprobs`  [64] float16, of the target's own distribution (temperature 1)
`written`   float16, of the token that stands there
`features`  [D] float16: what its head read to say so, or one of its layers put out there; for
            what drafts from that alone

Rows are only ever appended; `progress.json` says how many documents are whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.engine.interface import ModelInfo
from outrider.errors import ConfigError, InvariantError, check
from outrider.models.early_exit import watched_layer
from outrider.models.loading import load_model
from outrider.speculation.logits_processing import largest

from .documents import Document, Encode, Template
from .storage import Spent, read_json, write_whole

ENTRIES: Final = 64
_TOKENS_OF_A_PASS: Final = {"cpu": 4096, "cuda": 65_536}
_ROWS_OF_A_BLOCK: Final = {"cpu": 256, "cuda": 8192}
"""Rows of logits that are made at once."""
_POOL: Final = 64
"""Documents that are asked about before anything is kept."""
_PROGRESS: Final = "progress.json"
_FEATURES: Final = "features"


@dataclass(frozen=True, slots=True)
class Features:
    """What of the target is kept beside its answers."""

    width: int
    """D."""
    layer: int | None
    """What the last of so many layers puts out, divided by its root mean square, as an exit head
    does first: it may be beyond float16; None = what the head reads."""

    @classmethod
    def of(cls, module: Any, layer: int | None = None) -> Features:
        return cls(module.get_input_embeddings().weight.shape[1], layer)

    @property
    def key(self) -> list[object]:
        return [_FEATURES] if self.layer is None else [_FEATURES, self.layer, "normed"]


class TeacherCache:
    """The answers about one list of documents, of which the first ones are known."""

    def __init__(
        self,
        directory: Path,
        documents: Sequence[Document],
        vocab_size: int,
        features: Features | None = None,
    ) -> None:
        """With these features; None = without."""
        self.documents = documents
        self.spent = Spent(directory)
        self._directory = directory
        small = vocab_size <= np.iinfo(np.uint16).max + 1
        self._entries = min(ENTRIES, vocab_size)
        self._kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
            "ids": (np.uint16 if small else np.uint32, (self._entries,)),
            "logprobs": (np.float16, (self._entries,)),
            "written": (np.float16, ()),
        }
        self._features = features
        if features is not None:
            self._kinds[_FEATURES] = (np.float16, (features.width,))
        self._num_documents = int(read_json(directory / _PROGRESS) or 0)
        lengths = [document.num_learned for document in documents]
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        check(self._num_documents <= len(documents), "a cache is of these documents or fewer")

    @property
    def name(self) -> str:
        return self._directory.name

    @property
    def num_documents(self) -> int:
        return self._num_documents

    @property
    def known(self) -> Sequence[Document]:
        return self.documents[: self._num_documents]

    @property
    def is_whole(self) -> bool:
        return self._num_documents == len(self.documents)

    def rows(self, index: int) -> slice:
        return slice(int(self._starts[index]), int(self._starts[index + 1]))

    def answer_rows(self, index: int) -> slice:
        rows = self.rows(index)
        return slice(rows.start + self.documents[index].num_before_answer, rows.stop)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        num = int(self._starts[self._num_documents])
        return {
            name: np.memmap(self._path(name), dtype=kind, mode="r", shape=(num, *shape))
            if num
            else np.zeros((0, *shape), dtype=kind)
            for name, (kind, shape) in self._kinds.items()
        }

    def fill(self, module: Any, seconds: float, progress: Callable[[float], None]) -> None:
        """Asks the target (its module, with attention of its own) about the documents that are not
        known, until all are or the time, earlier runs included, is over; about some in any case."""
        device = module.get_input_embeddings().weight.device
        size = _TOKENS_OF_A_PASS["cpu" if device.type == "cpu" else "cuda"]
        with ExitStack() as stack:
            stack.enter_context(self.spent.working())
            files = {name: stack.enter_context(self._append_to(name)) for name in self._kinds}
            while not self.is_whole and (self._num_documents == 0 or self.spent.seconds < seconds):
                last = min(self._num_documents + _POOL, len(self.documents))
                pool = self.documents[self._num_documents : last]
                answers = _answers(module, pool, size, self._entries, self._features)
                for name, rows in answers.items():
                    files[name].write(rows.astype(self._kinds[name][0]).tobytes())
                    files[name].flush()
                self._num_documents = last
                write_whole(self._directory / _PROGRESS, json.dumps(last).encode())
                self.spent.save()
                by_time = self.spent.seconds / max(seconds, 1e-9)
                progress(min(1.0, max(by_time, last / len(self.documents))))

    def _append_to(self, name: str) -> Any:
        """The array's file, without rows of documents that a kill has cut off."""
        kind, shape = self._kinds[name]
        row_bytes = np.dtype(kind).itemsize * int(np.prod(shape, dtype=np.int64))
        file = self._path(name).open("ab")
        file.truncate(int(self._starts[self._num_documents]) * row_bytes)
        return file

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.bin"


def in_batches(
    documents: Sequence[Document], order: Iterable[int], size: int
) -> Iterator[list[int]]:
    """The indices of `order`, neighbours together: up to so many tokens, with what pads each to the
    longest; at least one."""
    batch: list[int] = []
    longest = 0
    for index in order:
        length = len(documents[index].token_ids)
        longest = max(longest, length)
        if batch and longest * (len(batch) + 1) > size:
            yield batch
            batch, longest = [], length
        batch.append(index)
    if batch:
        yield batch


def by_length(documents: Sequence[Document]) -> list[int]:
    """Their indices, shorter ones first: batches of neighbours need little padding."""
    return sorted(range(len(documents)), key=lambda index: len(documents[index].token_ids))


def _answers(
    module: Any, pool: Sequence[Document], size: int, entries: int, features: Features | None
) -> dict[str, npt.NDArray[Any]]:
    """`ask` about a pool, in batches of documents of similar length; rows in the pool's order."""
    found: dict[int, dict[str, npt.NDArray[Any]]] = {}
    for batch in in_batches(pool, by_length(pool), size):
        answers = ask(module, [pool[index] for index in batch], entries, features)
        ends = np.cumsum([pool[index].num_learned for index in batch])[:-1]
        split = {name: np.split(rows, ends) for name, rows in answers.items()}
        for place, index in enumerate(batch):
            found[index] = {name: parts[place] for name, parts in split.items()}
    return {
        name: np.concatenate([found[index][name] for index in range(len(pool))])
        for name in found[0]
    }


def ask(
    module: Any, documents: Sequence[Document], entries: int, features: Features | None
) -> dict[str, npt.NDArray[Any]]:
    """The target's answers about the learned tokens of `documents`, one after another, by the names
    of the arrays."""
    device = module.get_input_embeddings().weight.device
    ids, rows, following = packed(documents)
    block = _ROWS_OF_A_BLOCK["cpu" if device.type == "cpu" else "cuda"]
    with torch.inference_mode():
        hidden, shown = _read(module, torch.from_numpy(ids).to(device), features)
        where = torch.from_numpy(rows).to(device)
        wanted, shown = (part.reshape(-1, part.shape[-1])[where] for part in (hidden, shown))
        follow = torch.from_numpy(following).to(device)
        found = [
            _likeliest(module, part, token_ids, entries)
            for part, token_ids in zip(
                torch.split(wanted, block), torch.split(follow, block), strict=True
            )
        ]
    columns = [torch.cat(column).cpu().numpy() for column in zip(*found, strict=True)]
    answers = dict(zip(("ids", "logprobs", "written"), columns, strict=True))
    if features is not None:
        kept = shown.half()
        if not kept.isfinite().all():
            raise ConfigError("what the target's head reads is beyond the range of float16")
        answers[_FEATURES] = kept.cpu().numpy()
    return answers


def _read(
    module: Any, token_ids: torch.Tensor, features: Features | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target's head reads of B texts, and what is to be kept of them: both [B, T, D]."""
    # Padding stands behind every text, where a causal model does not look: no mask is needed.
    if features is None or features.layer is None:
        hidden = module.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return hidden, hidden
    with watched_layer(module, features.layer) as watched:
        hidden = module.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    if watched.output is None:
        raise InvariantError("a layer of the target was not called")
    return hidden, nn.functional.rms_norm(watched.output.float(), watched.output.shape[-1:])


def packed(
    documents: Sequence[Document],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Token ids [B, T] of B documents, with zeros behind; which of the B * T places say something
    of a learned token, [R]; and those tokens, [R]."""
    width = max(len(document.token_ids) for document in documents)
    ids = np.zeros((len(documents), width), dtype=np.int64)
    rows = []
    for row, document in enumerate(documents):
        length = len(document.token_ids)
        ids[row, :length] = document.token_ids
        rows.append(row * width + np.arange(document.first - 1, length - 1))
    places = np.concatenate(rows)
    return ids, places, ids.reshape(-1)[places + 1]


def _likeliest(
    module: Any, hidden: torch.Tensor, following: torch.Tensor, entries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For rows `hidden` [R, D]: ids and log-probabilities [R, entries] of the likeliest tokens,
    and the log-probability [R] of `following`."""
    logits = final_logits(module, hidden)
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    values, ids = largest(logits, entries)
    written = logits.gather(1, following[:, None]) - normaliser
    return ids, (values - normaliser).half(), written[:, 0].half()


def final_logits(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the head makes of the last layer's output [R, D]: [R, V], float32."""
    logits: torch.Tensor = module.get_output_embeddings()(hidden)
    return logits.float()


def check_head(module: Any) -> None:
    """Raises `ConfigError` for a model that does more to its logits than its head does: a student
    would have to learn with that, too."""
    ids = torch.arange(min(8, module.get_input_embeddings().weight.shape[0]))[None]
    with torch.inference_mode():
        ids = ids.to(module.get_input_embeddings().weight.device)
        hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        whole = module(input_ids=ids, use_cache=False).logits.float()
        same = torch.allclose(final_logits(module, hidden), whole, rtol=1e-2, atol=1e-2)
    if not same or module.get_output_embeddings().bias is not None:
        raise ConfigError(
            f"no drafter can be made of a {type(module).__name__} yet: its logits are not its "
            "head's product alone"
        )


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a drafter is made for."""

    name: str
    directory: Path
    template: Template
    encode: Encode | None
    """None for a target without a tokenizer."""
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def load(self) -> tuple[Any, ModelInfo]:
        """A module of its own for each stage. Raises `ConfigError`."""
        return load_model(
            self.directory, name=self.name, dtype=self.dtype, device=self.device,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip


_DOCUMENTS_AT_ONCE = 512


def likeliest_tokens(
    caches: Sequence[TeacherCache], num_wanted: int, vocab_size: int
) -> npt.NDArray[np.int64]:
    """The tokens [N], ascending, with the most of the target's probability over the documents that
    are learned from (ties: lowest ids)."""
    learned = np.zeros(vocab_size)
    for cache in caches:
        rows = [cache.rows(i) for i, d in enumerate(cache.known) if not d.is_held_out]
        learned += _mass(cache, rows, vocab_size)
    return np.sort(np.argsort(-learned, kind="stable")[:num_wanted])


def covered_share(
    caches: Sequence[TeacherCache], token_ids: npt.NDArray[np.int64], vocab_size: int
) -> float:
    """The part of the target's probability that these tokens have in the answers of held-out
    documents, of 1. Tokens that the target did not list count as impossible: it is no less."""
    mass, num_rows = np.zeros(vocab_size), 0
    for cache in caches:
        rows = [cache.answer_rows(i) for i, d in enumerate(cache.known) if d.is_held_out]
        mass += _mass(cache, rows, vocab_size)
        num_rows += sum(part.stop - part.start for part in rows)
    return float(mass[token_ids].sum() / max(num_rows, 1))


def _mass(cache: TeacherCache, rows: Sequence[slice], vocab_size: int) -> npt.NDArray[np.float64]:
    """The target's probability of each token [V], summed over these rows."""
    arrays = cache.arrays()
    mass = np.zeros(vocab_size)
    for start in range(0, len(rows), _DOCUMENTS_AT_ONCE):
        parts = rows[start : start + _DOCUMENTS_AT_ONCE]
        ids, logprobs = (
            np.concatenate([arrays[name][part] for part in parts]).ravel()
            for name in ("ids", "logprobs")
        )
        weights = np.exp(logprobs.astype(np.float32))
        mass += np.bincount(ids, weights, minlength=vocab_size)
    return mass
