"""The student: a few of the target's layers, its embeddings, and its head's rows for the tokens
that the target gives most of its probability to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.distillation.teacher import TeacherCache
from outrider.engine.empty_models import parameters_on_meta
from outrider.engine.fingerprints import tensors_fingerprint
from outrider.engine.trained_drafters import load_drafter, narrow_head
from outrider.errors import ConfigError, SettingError
from outrider.settings import blaming

_DOCUMENTS_AT_ONCE = 512
_LAYERS_TO_COPY = 4
"""A student of fewer has the first layers and the last alone."""


def kept_layers(
    num_wanted: int, num_layers: int, copying: tuple[int, int] | None = None
) -> list[int]:
    """Of so many layers those that a student starts from: the last, two that copy where the target
    has them and there is room for four, and the first ones. (Acceptance after 80,000 tokens of the
    demo target, of four layers: the first ones and the last 0.235; spread evenly 0.230, two at each
    end 0.231.)"""
    if num_wanted > num_layers:
        raise SettingError("layers", f"{num_wanted} is more than the target's {num_layers}")
    if num_wanted == 1:
        return [0]
    kept = {num_layers - 1}
    if copying is not None and num_wanted >= _LAYERS_TO_COPY:
        kept |= set(copying)
    for layer in range(num_layers):
        if len(kept) < num_wanted:
            kept.add(layer)
    return sorted(kept)


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


@dataclass(frozen=True, slots=True)
class Start:
    """A student before it learns."""

    student: Any
    token_ids: npt.NDArray[np.int64]
    """[N], ascending: those of its head."""
    name: str
    """What it begins as; for people."""
    key: str
    """What tells it from every other of the same target and texts."""
    is_trained: bool
    """Whether it has learned before."""


def make_student(target: Any, layers: Sequence[int], token_ids: npt.NDArray[np.int64]) -> Start:
    """A module of the target's architecture with its embeddings, its head's rows for `token_ids`,
    and copies of these layers of it. Embeddings and head stay as they are: so students need less
    data, and nothing of both has to be kept. It learns as it is served, without dropout."""
    found = _layers_of(target)
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = len(layers)
    kinds = getattr(text_config, "layer_types", None)
    if kinds:
        text_config.layer_types = [kinds[index] for index in layers]
    config.tie_word_embeddings = text_config.tie_word_embeddings = False
    embedding = target.get_input_embeddings().weight
    with parameters_on_meta():
        # In this way rotations keep float32, which a `to(dtype)` would take from them.
        student: Any = type(target)._from_config(config, dtype=embedding.dtype)
    before = target.get_output_embeddings().weight.detach()
    shared = {embedding.data_ptr(), before.data_ptr()}
    kept = {
        name: values.clone()
        for name, values in target.state_dict().items()
        if ".layers." not in name and values.data_ptr() not in shared
    }
    student.load_state_dict(kept, strict=False, assign=True)
    for mine, index in zip(_layers_of(student), layers, strict=True):
        copies = {name: values.clone() for name, values in found[index].state_dict().items()}
        mine.load_state_dict(copies, assign=True)
    student.get_input_embeddings().weight = embedding
    rows = torch.from_numpy(token_ids).to(embedding.device)
    narrow_head(student, len(token_ids)).weight = nn.Parameter(before[rows])
    student = _learning(student).to(embedding.device).eval()
    name = f"the target's layers {', '.join(map(str, layers))}"
    return Start(student, token_ids, name, f"{layers}, {len(token_ids)}", is_trained=False)


def load_student(
    drafter: Path,
    target: Path,
    *,
    name: str,
    target_name: str,
    dtype: str,
    device: str,
    trust_remote_code: bool,
) -> Start:
    """A drafter of this target, both by the names that people know, to learn on. Raises
    `SettingError` for one that was made for another, or that cannot be read."""
    with blaming("start_from"):
        student, info = load_drafter(
            drafter,
            target,
            name=name,
            target=target_name,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        key = tensors_fingerprint(drafter)
    token_ids = np.array(info.logit_token_ids, dtype=np.int64)
    return Start(_learning(student), token_ids, f"the drafter `{name}`", key, is_trained=True)


def _learning(student: Any) -> Any:
    """All of it learns but what is the target's: embeddings and head."""
    student.requires_grad_(True)
    for shared in (student.get_input_embeddings(), student.get_output_embeddings()):
        shared.weight.requires_grad_(False)
    return student


def _layers_of(module: Any) -> nn.ModuleList:
    """The decoder's layers. Raises `ConfigError` for an architecture that keeps them elsewhere."""
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"a student cannot be made of a {type(module).__name__}: it has no list of layers"
        )
    return layers
