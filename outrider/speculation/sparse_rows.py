"""Rows of a few tokens each, side by side: what a draft draws from, for many rows at a time on the
CPU. A row on its own costs more in calls than in arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.errors import check
from outrider.speculation.philox import COUNTER_TOKENS, RowKeys, flat_uniforms
from outrider.speculation.proposal import COUNT_TOTAL
from outrider.speculation.supports import IdArray, MassArray, Support, draw, host_rows
from outrider.speculation.transforms import check_maxima


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """R rows, one after another: `ids` [N], ascending in each, and `mass` [N], positive."""

    ids: IdArray
    mass: MassArray
    sizes: npt.NDArray[np.int64]
    """[R], at least 1 each; N together."""

    @classmethod
    def of(cls, rows: Sequence[Support]) -> SparseRows:
        """Puts rows side by side."""
        return cls(
            np.concatenate([row.ids for row in rows]),
            np.concatenate([row.mass for row in rows]),
            np.array([len(row.ids) for row in rows], dtype=np.int64),
        )

    @classmethod
    def likeliest(
        cls, logits: torch.Tensor, temperature: float, floor: float, share_max: float = 1.0
    ) -> tuple[SparseRows, npt.NDArray[np.bool_]]:
        """Of softmax(`logits` / `temperature`) [R, V] the tokens with at least `floor` > 0 of the
        likeliest one's probability; `mass` is relative to that. Flat rows, in which these are more
        than such a share of V, are left out; [R]: which ones. Raises as `target_probabilities`
        does."""
        values = host_rows(logits)
        maxima = values.max(axis=1)
        check_maxima(maxima.tolist())
        least = maxima + temperature * math.log(floor)
        likely = values >= least[:, None].astype(values.dtype)
        # In one dimension, which the library looks through ten times as fast as in two.
        sizes = np.array([np.count_nonzero(row) for row in likely], dtype=np.int64)
        flat = sizes > share_max * values.shape[1]
        likely[flat] = False
        rows, ids = np.divmod(np.flatnonzero(likely), values.shape[1])
        mass = values[rows, ids].astype(np.float64)
        mass -= maxima[rows]
        mass /= temperature
        np.exp(mass, out=mass)
        return cls(ids, mass, sizes[~flat]), flat

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[R]: where each row begins."""
        starts = np.zeros_like(self.sizes)
        np.cumsum(self.sizes[:-1], out=starts[1:])
        return starts

    def split(self, values: npt.NDArray[np.int64]) -> list[list[int]]:
        """Numbers [N], one for each token, row by row."""
        listed = values.tolist()
        return [
            listed[start : start + size]
            for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        ]

    def row(self, index: int) -> Support:
        """One of them; a view."""
        end = int(self.sizes[: index + 1].sum())
        start = end - int(self.sizes[index])
        return Support(self.ids[start:end], self.mass[start:end])

    def with_ids(self, ids: IdArray) -> SparseRows:
        """The same rows of other tokens [N], that ascend in each."""
        return SparseRows(ids, self.mass, self.sizes)

    def largest(self, count: int) -> SparseRows:
        """Of each row the `count` likeliest (ties: lowest ids)."""
        if self.sizes.max() <= count:
            return self
        return SparseRows.of([Support(ids, mass).largest(count) for ids, mass in self._parts()])

    def _parts(self) -> list[tuple[IdArray, MassArray]]:
        """The tokens and the mass of each row."""
        ends = np.cumsum(self.sizes).tolist()
        return [
            (self.ids[start:end], self.mass[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def speeds(self, keys: RowKeys) -> MassArray:
        """[N]: the mass of each token over its wait, by the rows' keys [R]. The fastest of a row
        wins its race (`race.race`)."""
        waits = flat_uniforms(keys, self.sizes.tolist(), self.ids)
        np.log(waits, out=waits)
        np.negative(waits, out=waits)
        return np.divide(self.mass, waits, out=waits)

    def draw(self, keys: RowKeys) -> list[int]:
        """The winner of each row's race (ties: lowest id): [R]."""
        starts = self.starts
        last = self.ids[starts + self.sizes - 1]
        if (self.sizes * COUNTER_TOKENS > last).any():
            return draw(self._parts(), keys)  # Some row is best drawn as a whole.
        speeds = self.speeds(keys)
        first = np.flatnonzero(speeds == np.maximum.reduceat(speeds, starts).repeat(self.sizes))
        if len(first) > len(starts):
            first = first[np.searchsorted(first, starts)]
        drawn: list[int] = self.ids[first].tolist()
        return drawn

    def ranked(self, keys: RowKeys, counts: Sequence[int]) -> list[list[int]]:
        """The first `counts[r]` tokens that arrive in the race of row r, or all, in that order
        (ties: lowest ids): draws without replacement."""
        raced = SparseRows(self.ids, self.speeds(keys), self.sizes)
        return [
            ids[np.argsort(-speeds, kind="stable")[:count]].tolist()
            for (ids, speeds), count in zip(raced._parts(), counts, strict=True)
        ]

    def quantised(self) -> SparseRows:
        """Each row's mass as counts that sum to `COUNT_TOTAL`, by largest remainders (ties: lowest
        ids); tokens left without a count are dropped."""
        starts = self.starts
        shares = self.mass / np.add.reduceat(self.mass, starts).repeat(self.sizes)
        shares *= COUNT_TOTAL
        counts = np.floor(shares)
        missing = COUNT_TOTAL - np.add.reduceat(counts, starts)
        enough = bool(((missing >= 0) & (missing <= self.sizes)).all())
        check(enough, "draft probabilities are numbers with a positive sum")
        rows = np.arange(len(self)).repeat(self.sizes)
        by_remainder = np.lexsort((counts - shares, rows))
        rank = np.arange(len(rows)) - starts.repeat(self.sizes)
        counts[by_remainder[rank < missing.repeat(self.sizes)]] += 1
        kept = counts > 0
        sizes = np.add.reduceat(kept.astype(np.int64), starts)
        return SparseRows(self.ids[kept], counts[kept], sizes)
