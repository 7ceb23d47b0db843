"""The student: a few of the target's layers, its embeddings, and its head's rows for the tokens
that the target gives most of its probability to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.errors import SettingError
from outrider.models.drafter_checkpoint import TrainedDescription
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.first_layers import layers_of
from outrider.models.meta_models import parameters_on_meta
from outrider.models.student_checkpoint import load_drafter, narrow_head, save_drafter
from outrider.settings import blaming
from outrider.speculation.text_acceptance import conditional_acceptance

from .dense_attention import use_dense_attention
from .learner import Depth, Start
from .learning import Batch

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


class Student:
    """A `Learner` that is a small model: it reads a text as the target does, and its further draft
    tokens come from further steps."""

    def __init__(self, module: Any) -> None:
        """All of the module learns but what is the target's: embeddings and head."""
        module.requires_grad_(True)
        for shared in (module.get_input_embeddings(), module.get_output_embeddings()):
            shared.weight.requires_grad_(False)
        use_dense_attention(module)
        self.module = module
        self.weights: dict[str, nn.Parameter] = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        self.head: torch.Tensor = module.get_output_embeddings().weight
        self.shape = f"{module.config.get_text_config().num_hidden_layers} layers"

    def draft(self, batch: Batch) -> list[Depth]:
        """The first draft token of every row; what comes behind it is that of the next row."""
        hidden = self.module.base_model(
            input_ids=batch.token_ids, use_cache=False
        ).last_hidden_state
        wanted = hidden.reshape(-1, hidden.shape[-1])[batch.rows]
        return [Depth(wanted, torch.arange(len(wanted), device=wanted.device))]

    def by_position(
        self, texts: Sequence[Sequence[npt.NDArray[np.float64]]]
    ) -> tuple[float | None, ...]:
        """As `Learner`."""
        return conditional_acceptance([ratios.tolist() for [ratios] in texts])

    def save(
        self, directory: Path, token_ids: torch.Tensor, description: TrainedDescription
    ) -> None:
        """As `Learner`."""
        save_drafter(directory, self.module, token_ids, description)


def make_student(target: Any, layers: Sequence[int], token_ids: npt.NDArray[np.int64]) -> Start:
    """A module of the target's architecture with its embeddings, its head's rows for `token_ids`,
    and copies of these layers of it. Embeddings and head stay as they are: so students need less
    data, and nothing of both has to be kept. It learns as it is served, without dropout."""
    found = layers_of(target)
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
    for mine, index in zip(layers_of(student), layers, strict=True):
        copies = {name: values.clone() for name, values in found[index].state_dict().items()}
        mine.load_state_dict(copies, assign=True)
    student.get_input_embeddings().weight = embedding
    rows = torch.from_numpy(token_ids).to(embedding.device)
    narrow_head(student, len(token_ids)).weight = nn.Parameter(before[rows])
    student = student.to(embedding.device).eval()
    name = f"the target's layers {', '.join(map(str, layers))}"
    key = f"{layers}, {len(token_ids)}"
    return Start(Student(student), token_ids, name, key, is_trained=False)


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
    return Start(Student(student), token_ids, f"the drafter `{name}`", key, is_trained=True)
