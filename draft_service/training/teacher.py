"""Runs the target over documents. Stores its distribution for every token that a drafter learns.

In this module, the target's *answers* about a document with R learned tokens are these arrays:

ids         [R, 64]: the target's likeliest tokens, likeliest first; uint16 or uint32
logprobs    [R, 64]: their log-probabilities at temperature 1; float16
written     [R]: the log-probability of the learned token itself; float16
features    [T, W]: only for an EAGLE-3 head. For each of the document's T tokens, the
            concatenated inputs of some of the target's layers; bfloat16, stored as int16"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.config.deployment import TargetConfig
from outrider.errors import ConfigError
from outrider.models.target_layers import tapped_layers
from outrider.speculation.logits_processing import largest

from .documents import Array, Document, Encode, Template
from .storage import Stopwatch, folder_name, replacing

ENTRIES = 64
_TOKENS_OF_A_PASS = {"cpu": 4096, "cuda": 65_536}
ROWS_OF_A_BLOCK = {"cpu": 256, "cuda": 8192}  # number of rows of logits that are computed at once
_DOCUMENTS_OF_A_FILE = 64


@dataclass(frozen=True, slots=True)
class Target:
    """The model for which a drafter is made."""

    config: TargetConfig
    template: Template
    encode: Encode | None  # None for a target without a tokenizer

    @property
    def name(self) -> str:
        return self.config.model

    @property
    def directory(self) -> Path:
        return Path(self.config.directory)


class TeacherCache:
    """The target's answers about documents, in files of `_DOCUMENTS_OF_A_FILE` documents each."""

    def __init__(
        self, place: Path, documents: Sequence[Document], module: Any, taps: Sequence[int] = ()
    ) -> None:
        """`module` is the target's module. The inputs of its layers `taps`, counted from 0, are
        kept as features."""
        self.documents: list[Document] = []
        for start in range(0, len(documents), _DOCUMENTS_OF_A_FILE):
            pool = documents[start : start + _DOCUMENTS_OF_A_FILE]
            self.documents += sorted(pool, key=lambda document: len(document.token_ids))
        self.name = folder_name("answers", str(module.dtype), _fingerprint(documents), tuple(taps))
        self._directory = place / self.name
        self.spent = Stopwatch(self._directory)
        self.vocab_size = len(module.get_input_embeddings().weight)
        self.device: torch.device = module.device
        self._module = module
        self.taps = taps
        self._files: list[Any] = []
        while self._path.exists():
            self._files.append(safe_open(self._path, framework="np"))

    @property
    def known(self) -> list[Document]:
        """The documents whose answers are kept. These are the first of `documents`."""
        return self.documents[: len(self._files) * _DOCUMENTS_OF_A_FILE]

    def answers(self, name: str, indices: Iterable[int]) -> list[Array]:
        """Returns the array `name` of each document in `indices`."""
        return [
            self._files[index // _DOCUMENTS_OF_A_FILE].get_tensor(f"{name} {index}")
            for index in indices
        ]

    def batches(self, indices: Sequence[int], size: int) -> list[list[int]]:
        """Puts documents of similar length into the same batch. A batch has at most `size` tokens,
        padding included, or a single longer document."""
        batches: list[list[int]] = []
        for index in sorted(indices, key=lambda index: len(self.documents[index].token_ids)):
            length = len(self.documents[index].token_ids)
            if not batches or length * (len(batches[-1]) + 1) > size:
                batches.append([])
            batches[-1].append(index)
        return batches

    def fill(self, seconds: float, progress: Callable[[float], None]) -> None:
        """Runs the target over further documents, until all answers are known or the time is over.
        The `seconds` include earlier runs. The documents of the first file have no time limit."""
        size = _TOKENS_OF_A_PASS[self.device.type]
        with self.spent.working():
            while (start := len(self.known)) < len(self.documents) and (
                not self._files or self.spent.seconds < seconds
            ):
                pool = range(start, min(start + _DOCUMENTS_OF_A_FILE, len(self.documents)))
                by_time = self.spent.seconds / max(seconds, 1e-9) if self._files else 0.0
                answers: dict[str, Array] = {}
                num_asked = start
                for batch in self.batches(pool, size):
                    progress(min(1.0, max(by_time, num_asked / len(self.documents))))
                    documents = [self.documents[index] for index in batch]
                    for name, arrays in ask(self._module, documents, self.taps).items():
                        for index, array in zip(batch, arrays, strict=True):
                            answers[f"{name} {index}"] = array
                    num_asked += len(batch)
                with replacing(self._path) as partial:
                    save_file(answers, partial)
                self._files.append(safe_open(self._path, framework="np"))
                self.spent.save()

    def likeliest_tokens(self, num_wanted: int) -> Array:
        """Returns the ids, ascending, of the `num_wanted` tokens to which the target gives the most
        probability in the training documents."""
        mass = np.zeros(self.vocab_size)
        for index, document in enumerate(self.known):
            if not document.is_held_out:
                [ids], [logprobs] = (self.answers(name, [index]) for name in ("ids", "logprobs"))
                weights = np.exp(logprobs.astype(np.float32)).ravel()
                mass += np.bincount(ids.ravel(), weights, minlength=self.vocab_size)
        return np.sort(np.argsort(-mass, kind="stable")[:num_wanted])

    @property
    def _path(self) -> Path:
        return self._directory / f"{len(self._files):06}.safetensors"


def _fingerprint(documents: Sequence[Document]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        digest.update(np.array([len(document.token_ids), document.first], np.int32).tobytes())
        digest.update(document.token_ids.tobytes())
    return digest.hexdigest()


def ask(module: Any, documents: Sequence[Document], taps: Sequence[int]) -> dict[str, list[Array]]:
    """Runs the target over `documents`. Returns, by array name, an array for each document."""
    device = module.device
    ids, rows, following = (torch.from_numpy(part).to(device) for part in packed(documents))
    with torch.inference_mode(), tapped_layers(module, taps) as watched:
        # A causal model does not read the padding after a text, so no mask is needed.
        hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        read = hidden.flatten(0, 1)[rows]
        blocks = (torch.split(part, ROWS_OF_A_BLOCK[device.type]) for part in (read, following))
        likeliest = [_likeliest(module, *block) for block in zip(*blocks, strict=True)]
    tokens, logprobs, written = (
        torch.cat(column).cpu().numpy() for column in zip(*likeliest, strict=True)
    )
    is_small = len(module.get_output_embeddings().weight) <= np.iinfo(np.uint16).max + 1
    tokens = tokens.astype(np.uint16 if is_small else np.uint32)
    ends = np.cumsum([document.num_learned for document in documents])[:-1]
    joined = {"ids": tokens, "logprobs": logprobs, "written": written}
    answers = {name: np.split(values, ends) for name, values in joined.items()}
    if taps:
        features = torch.cat([layer.read for layer in watched], -1)
        texts = features.bfloat16().view(torch.int16).cpu().numpy()
        answers["features"] = [
            text[: len(document.token_ids)] for text, document in zip(texts, documents, strict=True)
        ]
    return answers


def packed(documents: Sequence[Document]) -> tuple[Array, Array, Array]:
    """Returns the token ids [B, T] of B documents, padded with zeros. Also returns two arrays about
    the documents' R learned tokens. The first [R] has the positions before the learned tokens, as
    indices of the flattened [B * T]. The second [R] has the learned tokens."""
    width = max(len(document.token_ids) for document in documents)
    ids = np.zeros((len(documents), width), dtype=np.int64)
    rows = []
    for row, document in enumerate(documents):
        length = len(document.token_ids)
        ids[row, :length] = document.token_ids
        rows.append(row * width + np.arange(document.first - 1, length - 1))
    places = np.concatenate(rows)
    return ids, places, ids.reshape(-1)[places + 1]


def _likeliest(module: Any, hidden: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ids and the log-probabilities [R, 64] of the likeliest tokens after the rows
    `hidden` [R, D], and the log-probabilities [R] of the tokens `following` [R]."""
    logits = module.get_output_embeddings()(hidden).float()
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    values, ids = largest(logits, min(ENTRIES, logits.shape[1]))
    written = logits.gather(1, following[:, None]) - normaliser
    return ids, (values - normaliser).half(), written[:, 0].half()


def check_head(module: Any) -> None:
    """Raises `ConfigError` if the model changes the output of its LM head (for example scales it),
    or if this head has a bias, because drafters multiply by the head's matrix only."""
    embeddings, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    ids = torch.arange(min(8, len(embeddings)), device=embeddings.device)[None]
    with torch.inference_mode():
        hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        whole = module(input_ids=ids, use_cache=False).logits.float()
        same = torch.allclose(head(hidden).float(), whole, rtol=1e-2, atol=1e-2)
    if not same or head.bias is not None:
        raise ConfigError(
            f"no drafter can be made for a {type(module).__name__}: its logits are not computed "
            "by its LM head alone"
        )


_POOL = 1024  # documents are sorted by length within groups of this size


@dataclass(frozen=True, slots=True)
class Batch:
    """B documents side by side."""

    token_ids: Tensor  # [B, T], padded with zeros
    rows: Tensor  # [R]: positions before the learned tokens, as indices of the flattened [B * T]
    following: Tensor  # [R]: the learned tokens' columns in the drafter's LM head; -1 = no column
    written: Tensor  # [R]: the target's log-probabilities of the learned tokens
    likeliest: Tensor  # [R]: the columns of the target's likeliest tokens; -1 = no column
    columns: Tensor  # [R, M]: the columns of the M likeliest tokens; arbitrary where `mass` is 0
    mass: Tensor  # [R, M], float32: p of the M likeliest tokens; 0 for tokens without a column
    num_later: Tensor  # [R]: how many later rows belong to the same document
    features: Tensor  # [B, T, W], bfloat16: each token's features; empty if the cache has none


class Dataset:
    """Documents with the target's answers, for one drafter. Indices refer to `cache.documents`."""

    def __init__(self, cache: TeacherCache, token_ids: Array) -> None:
        """`token_ids` [N], ascending, are the tokens of the columns of the drafter's LM head."""
        self.cache = cache
        self._columns = np.full(cache.vocab_size, -1, dtype=np.int64)
        self._columns[token_ids] = np.arange(len(token_ids))
        documents = cache.known
        self.held_out = [i for i, document in enumerate(documents) if document.is_held_out]
        self.learned = [i for i, document in enumerate(documents) if not document.is_held_out]

    def epoch(self, seed: int, number: int, batch_tokens: int) -> list[list[int]]:
        """Returns all training documents, in batches. The arguments determine the order."""
        random = np.random.default_rng((seed, number))
        order = [self.learned[i] for i in random.permutation(len(self.learned))]
        batches: list[list[int]] = []
        for start in range(0, len(order), _POOL):
            batches += self.cache.batches(order[start : start + _POOL], batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]

    def batch(self, indices: Sequence[int]) -> Batch:
        documents = [self.cache.documents[index] for index in indices]
        ids, rows, following = packed(documents)
        likeliest, logprobs, written = (
            np.concatenate(self.cache.answers(name, indices))
            for name in ("ids", "logprobs", "written")
        )
        sizes = [document.num_learned for document in documents]
        columns = self._columns[likeliest]
        mass = np.where(columns < 0, 0.0, np.exp(logprobs.astype(np.float32)))
        arrays = {
            "token_ids": ids,
            "rows": rows,
            "following": self._columns[following],
            "written": written.astype(np.float32),
            "likeliest": columns[:, 0],
            "columns": columns.clip(0),
            "mass": mass.astype(np.float32),
            "num_later": np.concatenate([np.arange(size)[::-1] for size in sizes]),
        }
        device = self.cache.device
        tensors = {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
        features = torch.empty(0)
        if self.cache.taps:
            texts = map(torch.from_numpy, self.cache.answers("features", indices))
            padded = pad_sequence([*texts], batch_first=True)
            features = padded.view(torch.bfloat16).to(device)
        return Batch(**tensors, features=features)
