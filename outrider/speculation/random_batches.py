"""The noise (`random_streams.py`) of one round in each of many sessions, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.errors import check
from outrider.speculation.philox import RowKeys, WordArray
from outrider.speculation.random_streams import (
    INDEX_TAG,
    NO_ACCEPT_NOISE,
    SIBLING_SHIFT,
    WORD_MASK,
    RoundNoise,
    Stream,
)
from outrider.speculation.sampling_params import Rule


class NoiseBatch:
    """The noise of one round in each of B sessions that share a rule, for work on rows."""

    def __init__(self, seeds: WordArray, rule: Rule, committed_lengths: WordArray) -> None:
        self.seeds = seeds
        self.rule = rule
        self.committed_lengths = committed_lengths

    @classmethod
    def of(cls, noises: Sequence[RoundNoise]) -> NoiseBatch:
        """Puts rounds side by side; they must share their rule."""
        rules = {noise.rule for noise in noises}
        check(len(rules) == 1, "rounds of one batch share their rule")
        lengths = np.array([noise.committed_length for noise in noises], dtype=np.uint64)
        seeds = np.array([noise.seed for noise in noises], dtype=np.uint64)
        return cls(seeds, rules.pop(), lengths)

    def __len__(self) -> int:
        return len(self.seeds)

    def draft_keys(self, indices: Sequence[int] | WordArray) -> RowKeys:
        """Of the draft's draw in session b at depth indices[b]: B rows."""
        stream = RoundNoise(0, self.rule, 0).draft_stream
        streams = np.full(len(self), int(stream), dtype=np.uint64)
        return self._keys(np.asarray(indices, dtype=np.uint64), streams)

    def correction_keys(self, num_draft_tokens: int) -> RowKeys:
        """Of the corrections n = 0..K of every session: B * (K + 1) rows, session by session."""
        width = num_draft_tokens + 1
        residual = RoundNoise(0, self.rule, 0).residual_stream
        streams = np.full((len(self), width), int(residual), dtype=np.uint64)
        streams[:, -1] = int(Stream.TARGET)
        indices = np.arange(width, dtype=np.uint64)[None].repeat(len(self), axis=0)
        return self._keys(indices, streams)

    def accept_uniforms(self, num_draft_tokens: int, sibling: int = 0) -> torch.Tensor:
        """`RoundNoise.accept_uniforms` of every session: [B, K], float64."""
        shape = (len(self), num_draft_tokens)
        if self.rule.absolute_noise or num_draft_tokens == 0:
            return torch.full(shape, NO_ACCEPT_NOISE, dtype=torch.float64)
        indices = np.arange(num_draft_tokens, dtype=np.uint64)[None].repeat(len(self), axis=0)
        streams = np.full(shape, int(Stream.ACCEPT), dtype=np.uint64)
        words = self._keys(indices, streams, sibling).words()[0]
        return torch.from_numpy((words + 0.5) * 2.0**-32).view(shape)

    def _keys(self, indices: WordArray, streams: WordArray, sibling: int = 0) -> RowKeys:
        """Keys of the places of `indices` ([B] or [B, N]) in every session, row-major."""
        spread = (len(self),) + (1,) * (indices.ndim - 1)
        lengths = self.committed_lengths.reshape(spread)
        a, b = self._places(lengths, indices, sibling)
        zeros = np.zeros(indices.shape, dtype=np.uint64)  # what is added to them gets their shape
        seeds = (zeros + self.seeds.reshape(spread)).ravel()
        return RowKeys(
            seed_low=seeds & np.uint64(WORD_MASK),
            seed_high=seeds >> np.uint64(32),
            a=(zeros + a).ravel(),
            b=(zeros + b).ravel(),
            stream=streams.ravel(),
        )

    def _places(
        self, lengths: WordArray, indices: WordArray, sibling: int
    ) -> tuple[WordArray, WordArray]:
        """`RoundNoise.place` for many: (a, b)."""
        if self.rule.absolute_noise:
            positions = lengths + indices
            return positions & np.uint64(WORD_MASK), positions >> np.uint64(32)
        return lengths, indices | np.uint64(INDEX_TAG | sibling << SIBLING_SHIFT)
