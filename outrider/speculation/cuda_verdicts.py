"""Verdicts on a CUDA device: those of all sessions in two kernels, with one wait for the device,
however many sessions there are. The law is `verification.py`'s."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from outrider.limits import DRAFT_SUPPORT_ENTRIES_MAX
from outrider.speculation.gumbel_max import BLOCK, IntArray, RealArray
from outrider.speculation.proposal import ENTRY_BYTES, ID_BYTES, DraftDistribution
from outrider.speculation.random_streams import RowKeys
from outrider.speculation.sampling_params import SamplingParams

ROW_WORDS = 10
JUDGED_WORDS = 3
_FOUND = 6
_WORD_BYTES = 8
_BLOCK = 8192
_WEIGHING_WARPS = 32
_WAITS = 32
_WARPS = 16


Place = tuple[int, DraftDistribution | None]
"""A draft token, and what it was drawn from; None = for certain."""


_FAILED: set[torch.device] = set()


def has_kernels(device: torch.device) -> bool:
    """Whether there is a device with the kernels' compiler, and no trial has failed on it."""
    return device.type == "cuda" and device not in _FAILED and _has_compiler()


@cache
def _has_compiler() -> bool:
    return importlib.util.find_spec("triton") is not None


def give_up(device: torch.device) -> None:
    """From now on `has_kernels` says no."""
    _FAILED.add(device)


@dataclass(frozen=True, slots=True, eq=False)
class JudgedRows:
    """What the kernels find, [R] each; on the CPU."""

    maxima: RealArray
    """The largest logit; NaN where any is."""
    behind: RealArray
    """Of a draft token that is judged here pi behind it, or min(1, p / q)."""
    left: RealArray
    """In a block Z."""
    drawn: IntArray
    """The token that follows, as a correction where a draft token was judged here."""


class RowJudge:
    """One call: the first kernel runs while the second one's words are made ready."""

    def __init__(
        self,
        logits: Tensor,
        sampling: Sequence[SamplingParams],
        sizes: Sequence[int],
        drafted: Sequence[int],
        keys: RowKeys,
    ) -> None:
        """Of `logits` [R, V], float32 or narrower: `sampling` of each session, `sizes` its rows;
        `drafted` [R] is the draft token that a row judges, or -1."""
        from outrider.speculation.triton_kernels import weigh_rows

        num_rows, width = logits.shape
        filters = np.repeat([_filters(each) for each in sampling], sizes, axis=0)
        rows = np.empty((num_rows, ROW_WORDS), dtype=np.int64)
        rows[:, :3] = filters.view(np.int64)[:, :3]
        rows[:, 3] = filters[:, 3]
        rows[:, 4] = drafted
        rows[:, 5:] = keys.view(np.int64)
        self._words = _sent(torch.from_numpy(rows), logits.device)
        self._weights = torch.empty((num_rows, width), dtype=torch.float32, device=logits.device)
        self._found = torch.empty((_FOUND, num_rows), dtype=torch.float64, device=logits.device)
        with _current(logits.device):
            weigh_rows[(num_rows,)](
                self._weights, self._found, logits, logits.stride(0), self._words, width,
                BLOCK=_BLOCK, num_warps=_WEIGHING_WARPS,
            )  # fmt: skip

    def settle(self, judged: Sequence[tuple[int, int, int]], places: Sequence[Place]) -> JudgedRows:
        """`judged` says of each row how many draft tokens of its chain come before the one that it
        judges (-1 = it judges none), the index of that one in `places`, and 1 for a block."""
        from outrider.speculation.triton_kernels import settle_rows

        num_rows, width = self._weights.shape
        device = self._weights.device
        packed = [b"" if q is None else q.packed for _, q in places]
        sizes = [len(each) // ENTRY_BYTES for each in packed]
        words = [*chain.from_iterable(judged)]
        for (token_id, _), end, size in zip(places, accumulate(sizes), sizes, strict=True):
            words += (token_id, end - size, size)
        parts = [
            struct.pack(f"{len(words)}q", *words),
            *(each[: size * ID_BYTES] for each, size in zip(packed, sizes, strict=True)),
            *(each[size * ID_BYTES :] for each, size in zip(packed, sizes, strict=True)),
        ]
        sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        ids_at = len(words) * _WORD_BYTES
        row_waits = 1 << (-(-width // BLOCK) - 1).bit_length()
        races = torch.empty((2, num_rows, row_waits), dtype=torch.float64, device=device)
        with _current(device):
            settle_rows[(num_rows,)](
                self._weights, self._found, self._words, _sent(sent, device),
                JUDGED_WORDS * num_rows * _WORD_BYTES, ids_at, ids_at + sum(sizes) * ID_BYTES,
                races, width,
                ENTRIES=DRAFT_SUPPORT_ENTRIES_MAX, WAITS=min(_WAITS, row_waits),
                ROW_WAITS=row_waits, num_warps=_WARPS,
            )  # fmt: skip
        maxima, _, _, behind, left, drawn = self._found.cpu().numpy()
        return JudgedRows(maxima, behind, left, drawn.astype(np.int64))


def _sent(words: Tensor, device: torch.device) -> Tensor:
    """The words on a CUDA device, without a wait for it."""
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are started on the device that is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _filters(sampling: SamplingParams) -> tuple[float, float, float, float]:
    """Temperature, min-p, top-p and top-k of a row; the greedy keep the likeliest token."""
    if sampling.greedy:
        return 1.0, 0.0, 1.0, 1.0
    return sampling.temperature, sampling.min_p, sampling.top_p, float(max(sampling.top_k, 0))
