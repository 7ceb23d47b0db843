"""A head that drafts from what its target's own head read, apart from the target.

    x_i = J [norm(f_i), norm(e_{i+1})]           f_i: read at place i; e_{i+1}: the token behind it
    y_i = x_i + O attention(q_i, keys and values of the pairs up to i, rotated by their places)
    g_i = f_i + y_i + D (silu(G n_i) * (U n_i)),                                n_i = norm(y_i)
    logits of the token behind the pair i = H g_i

What a pair's place had to say of the next one is guessed as g_i, which stands for f_{i+1} in the
next pair of a proposal. norm divides by the root mean square; H has the rows of the target's head
for a part of its vocabulary. Of committed pairs the last `FEATURES_MAX` are seen. A layer over
features, trained on what it will be given, is EAGLE's (arXiv 2401.15077, and 2503.01840 for
training on its own guesses).

A pair's key and value depend on nothing but the pair, so that one which was seen once is never
looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from outrider.engine.interface import ModelInfo
from outrider.limits import FEATURES_MAX
from outrider.models.drafter_checkpoint import (
    LoadedHead,
    TargetHead,
    TrainedKind,
    Whose,
    load_head,
)
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.loading import LoadOptions, describe, refusing
from outrider.models.student import target_ends

_EPS = 1e-6
"""Under the root of the mean square."""
_HEAD_WIDTH_MAX = 64
_ROTATION_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """What attention sees of pairs; all [.., heads, width of one], rotated where they must be."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    joined: Tensor
    """x [.., D]."""


class EagleLayer(nn.Module):
    """What is trained, for features of width D and an inner width M."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.join = nn.Linear(2 * width, width, bias=False)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)


class EagleHead(TargetHead):
    """The layer, with embeddings [V, D] and a head [N, D] that are the target's."""

    def __init__(
        self, embeddings: nn.Parameter, head: nn.Parameter, inner: int, _: int = 1
    ) -> None:
        """The weights of the layer are without values."""
        super().__init__(head)
        self.embeddings = embeddings
        width = head.shape[1]
        with torch.device("meta"):
            self.layer = EagleLayer(width, inner).to(head.dtype)
        self.head_width = max(
            size for size in range(1, _HEAD_WIDTH_MAX + 1) if width % size == 0 and size % 2 == 0
        )
        """Of each attention head."""

    def pairs(self, features: Tensor, token_ids: Tensor, places: Tensor) -> Pairs:
        """Of features [.., D] read at `places` [..], and the tokens [..] behind these."""
        embedded = nn.functional.embedding(token_ids, self.embeddings)
        joined = self.layer.join(torch.cat([_normed(features), _normed(embedded)], -1))
        seen = self.layer.attend(_normed(joined))
        queries, keys, values = seen.unflatten(-1, (3, -1, self.head_width)).unbind(-3)
        queries, keys = (_rotated(vectors, places) for vectors in (queries, keys))
        return Pairs(queries, keys, values, joined)

    def guess(self, features: Tensor, joined: Tensor, mixed: Tensor) -> Tensor:
        """g [.., D] of features and x of pairs, and what attention made of their queries
        [.., heads, width of one]."""
        y = joined + self.layer.out(mixed.flatten(-2))
        gate, up = self.layer.gate_up(_normed(y)).chunk(2, -1)
        guessed: Tensor = features + y + self.layer.down(nn.functional.silu(gate) * up)
        return guessed

    def unroll(self, features: Tensor, token_ids: Tensor, num_depths: int) -> Iterator[Tensor]:
        """g [B, L, D] of the first, second, .. token of a chain behind each pair of B texts, which
        goes on as the text does: of features [B, L, D] and the tokens [B, L + num_depths - 1]
        behind them."""
        num_pairs = features.shape[1]
        first: Pairs | None = None
        own: list[Pairs] = []
        for depth in range(num_depths):
            behind = token_ids[:, depth : depth + num_pairs]
            places = torch.arange(depth, depth + num_pairs, device=features.device)
            pairs = self.pairs(features, behind, places.expand_as(behind))
            if first is None:
                first = pairs
            else:
                own.append(pairs)
            mixed = _attend_in_windows(pairs.queries, first, own)
            features = self.guess(features, pairs.joined, mixed)
            yield features


def _attend_in_windows(queries: Tensor, first: Pairs, own: Sequence[Pairs]) -> Tensor:
    """[B, L, heads, E]: of the queries of chains behind each pair of a text, over the last
    `FEATURES_MAX` pairs of the text up to there and over the `own` ones of the chain."""
    num_pairs, width = queries.shape[1], queries.shape[-1]
    blocked = -(-num_pairs // FEATURES_MAX) * FEATURES_MAX

    def blocks(vectors: Tensor) -> Tensor:
        """[B, blocks, heads, FEATURES_MAX, E]"""
        padded = nn.functional.pad(vectors, (0, 0, 0, 0, 0, blocked - num_pairs))
        shape = (len(padded), -1, FEATURES_MAX, *padded.shape[2:])
        return padded.reshape(shape).transpose(2, 3)

    def with_earlier(vectors: Tensor) -> Tensor:
        """The block before each one, then itself."""
        return torch.cat([nn.functional.pad(vectors, (0, 0) * 3 + (1, 0))[:, :-1], vectors], 3)

    asked = blocks(queries) / math.sqrt(width)
    scores = asked @ with_earlier(blocks(first.keys)).transpose(-1, -2)
    row = torch.arange(FEATURES_MAX, device=queries.device)[:, None]
    column = torch.arange(2 * FEATURES_MAX, device=queries.device)
    seen = (column > row) & (column <= row + FEATURES_MAX)
    is_first = torch.arange(scores.shape[1], device=queries.device)[:, None, None, None] == 0
    seen = seen & ~(is_first & (column < FEATURES_MAX))
    scores = scores.masked_fill(~seen, -torch.inf)
    chains = [(asked * blocks(pairs.keys)).sum(-1, keepdim=True) for pairs in own]
    weights = torch.cat([scores, *chains], -1).softmax(-1)
    mixed = weights[..., : 2 * FEATURES_MAX] @ with_earlier(blocks(first.values))
    for index, pairs in enumerate(own):
        place = 2 * FEATURES_MAX + index
        mixed = mixed + weights[..., place : place + 1] * blocks(pairs.values)
    return mixed.transpose(2, 3).flatten(1, 2)[:, :num_pairs]


def _normed(rows: Tensor) -> Tensor:
    return nn.functional.rms_norm(rows, rows.shape[-1:], eps=_EPS)


def _rotated(vectors: Tensor, places: Tensor) -> Tensor:
    """[.., heads, E], each half a rotation of the other by its place [..]."""
    half = vectors.shape[-1] // 2
    powers = torch.arange(half, device=vectors.device, dtype=torch.float64) / half
    angles = places[..., None] * _ROTATION_BASE**-powers
    cos, sin = (part.to(vectors.dtype)[..., None, :] for part in (angles.cos(), angles.sin()))
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


LoadedEagle = LoadedHead[EagleHead]


def load_eagle(
    path: Path, target_directory: Path, *, target: str, **options: Unpack[LoadOptions]
) -> tuple[LoadedEagle, ModelInfo]:
    """The head in `path`, with embeddings and head of the target in `target_directory`, and what
    it is. Raises `ConfigError`, also for a target that it was not made for."""
    name = options.get("name", str(path))
    named: LoadOptions = {**options, "name": target}
    empty, embeddings, rows = target_ends(target_directory, drafter=name, **named)
    info = describe(empty, target_directory, **options)
    with refusing(f"drafter {name}:"):
        loaded = load_eagle_on(
            path, embeddings, rows,
            name=name, target_directory=target_directory, target_name=target,
        )  # fmt: skip
        fingerprint = tensors_fingerprint(path)
    info = replace(info, weights_fingerprint=fingerprint, logit_token_ids=loaded.token_ids)
    return loaded, info


def load_eagle_on(
    path: Path, embeddings: nn.Parameter, rows: Tensor, **whose: Unpack[Whose]
) -> LoadedEagle:
    """The head in `path` with these embeddings and head rows [V, D] of its target, of their dtype
    and on their device. Raises `ConfigError`, also for a target that it was not made for."""
    return load_head(path, TrainedKind.EAGLE, rows, partial(EagleHead, embeddings), **whose)
