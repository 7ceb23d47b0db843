"""Computes the verdicts of `verification.py` on a CUDA device. All sessions together take at most
three kernels and one wait."""

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.grammar.token_mask import TokenMask
from outrider.limits import DRAFT_SUPPORT_ENTRIES_MAX
from outrider.speculation.gumbel_max import BLOCK, IntArray, RealArray
from outrider.speculation.logits_processing import TokenHistory, changed_tokens
from outrider.speculation.proposal import ENTRY_BYTES, DraftDistribution
from outrider.speculation.random_streams import RowKeys
from outrider.speculation.sampling_params import SamplingParams

ROW_WORDS = 12
JUDGED_WORDS = 9
FOUND = 6
_BLOCK = 8192
_WEIGHING_WARPS = 32
_ENTRIES = 1024
_WAITS = 32
_WARPS = 16


Transforms = tuple[SamplingParams, TokenHistory, Sequence[TokenMask | None]]
"""The parameters, history and masks that change the logits of one session. The sequence of masks
has an entry for each row, or is empty."""
_FAILED: set[torch.device] = set()


def has_kernels(device: torch.device) -> bool:
    """Whether verdicts and draws on the device use kernels. Kernels need CUDA and Triton, and
    `give_up` turns them off."""
    return device.type == "cuda" and device not in _FAILED and _has_compiler()


@cache
def _has_compiler() -> bool:
    return importlib.util.find_spec("triton") is not None


def give_up(device: torch.device) -> None:
    """Makes `has_kernels` return False for the device from now on."""
    _FAILED.add(device)


@dataclass(frozen=True, slots=True, eq=False)
class JudgedRows:
    """The kernels' results for each row: [R] each, on the CPU."""

    maxima: RealArray
    """The largest logit. NaN if any logit is NaN."""
    behind: RealArray
    """If the row judges a draft token: min(1, p / q), or, under block, pi of the path up to this
    token. NaN if the token is outside its q."""
    left: RealArray
    """Z of block verification (`verification.py`)."""
    drawn: IntArray
    """The token drawn from the row, or from the residual if the row judges a draft token."""


class RowJudge:
    """One batch of verdicts. `__init__` starts the first kernels, and `settle` runs the last one.
    The host can prepare the arguments of `settle` while the first kernels run."""

    def __init__(
        self, logits: Tensor, transforms: Sequence[Transforms], sizes: IntArray, drafted: IntArray
    ) -> None:
        """`logits` [R, V] are float32 or narrower. `transforms` and `sizes`, the numbers of rows,
        are by session. `drafted` [R] is the draft token that each row judges, or -1."""
        from outrider.speculation.triton_kernels import change_rows

        num_rows, width = logits.shape
        device = logits.device
        words = np.zeros((num_rows, ROW_WORDS), dtype=np.int64)
        kept = np.array([filters(sampling) for sampling, _, _ in transforms])
        words[:, :3] = kept.view(np.int64)[:, :3].repeat(sizes, axis=0)
        words[:, 3] = kept[:, 3].repeat(sizes)
        words[:, 4] = drafted
        changes = _changes(transforms, sizes, words, width)
        sent = send([words, *changes], device)
        self._words = sent[: words.nbytes].view(torch.int64).view(words.shape)
        self._weights = torch.empty((num_rows, width), dtype=torch.float32, device=device)
        self._found = torch.empty((FOUND, num_rows), dtype=torch.float64, device=device)
        with on_device(device):
            if changes:
                change_rows[(num_rows,)](
                    self._weights, self._found, logits, logits.stride(0), sent, width,
                    BLOCK=_BLOCK, ENTRIES=_ENTRIES, num_warps=_WARPS,
                )  # fmt: skip
                logits = self._weights
            weigh(self._weights, self._found, logits, self._words)

    def settle(
        self,
        keys: RowKeys,
        num_before: IntArray,
        blocks: npt.NDArray[np.bool_],
        q: Sequence[DraftDistribution | None],
    ) -> JudgedRows:
        """`keys` are for the noise of each row. `num_before` [R] is the number of draft tokens
        before the one that a row judges, or -1 if the row judges none. `blocks` [R] says whether
        the rule is block. `q` has the distribution of each judged draft token, or None if its draw
        was certain."""
        device = self._weights.device
        packed = [b"" if each is None else each.packed for each in q]
        words = np.zeros((len(keys), JUDGED_WORDS), dtype=np.int64)
        words[:, :5] = keys.view(np.int64)
        words[:, 5] = num_before
        words[:, 6] = blocks
        num_bytes = np.array([*map(len, packed)], dtype=np.int64)
        is_judged = num_before >= 0
        words[is_judged, 7] = words.nbytes + num_bytes.cumsum() - num_bytes
        words[is_judged, 8] = num_bytes // ENTRY_BYTES
        sent = send([words, np.frombuffer(b"".join(packed), dtype=np.uint8)], device)
        with on_device(device):
            settle(self._weights, self._found, self._words, sent, JUDGED_WORDS)
        maxima, _, _, behind, left, drawn = self._found.cpu().numpy()
        return JudgedRows(maxima, behind, left, drawn.astype(np.int64))


def weigh(weights: Tensor, found: Tensor, logits: Tensor, words: Tensor) -> None:
    """Runs `weigh_rows` on the current device."""
    from outrider.speculation.triton_kernels import weigh_rows

    num_rows, width = logits.shape
    weigh_rows[(num_rows,)](
        weights, found, logits, logits.stride(0), words, words.stride(0), width,
        BLOCK=_BLOCK, num_warps=_WEIGHING_WARPS,
    )  # fmt: skip


def settle(weights: Tensor, found: Tensor, words: Tensor, sent: Tensor, stride: int) -> None:
    """Runs `settle_rows` on the current device."""
    from outrider.speculation.triton_kernels import settle_rows

    num_rows, width = weights.shape
    row_waits = 1 << (-(-width // BLOCK) - 1).bit_length()
    races = torch.empty((2, num_rows, row_waits), dtype=torch.float64, device=weights.device)
    settle_rows[(num_rows,)](
        weights, found, words, words.stride(0), sent.view(torch.uint8), stride, races, width,
        ENTRIES=DRAFT_SUPPORT_ENTRIES_MAX, WAITS=min(_WAITS, row_waits),
        ROW_WAITS=row_waits, num_warps=_WARPS,
    )  # fmt: skip


def _changes(
    transforms: Sequence[Transforms], sizes: IntArray, words: IntArray, width: int
) -> list[npt.NDArray[Any]]:
    """Returns the arrays to send after the rows' words: tables of tokens with biases or penalties,
    and then masks. Writes the offsets of these arrays into `words`."""
    tables: list[npt.NDArray[Any]] = []
    masks: dict[int, tuple[int, TokenMask]] = {}
    words[:, 7] = -1
    end, at = words.nbytes, 0
    for (sampling, history, row_masks), size in zip(transforms, sizes.tolist(), strict=True):
        start, at = at, at + size
        if sampling.penalised or sampling.logit_bias:
            tables.append(changed_tokens(sampling, history, width))
            penalties = (
                sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
            )  # fmt: skip
            rows = words[start:at]
            rows[:, 5:7] = len(tables[-1]), end
            rows[:, 8] = np.arange(size)
            rows[:, 9:] = np.array(penalties, dtype=np.float64).view(np.int64)
            end += tables[-1].nbytes
        for row, mask in enumerate(row_masks, start):
            if mask is not None:
                words[row, 7] = masks.setdefault(id(mask), (len(masks), mask))[0]
    if not masks:
        return tables
    bits = np.zeros((len(masks), -(-width // 8)), dtype=np.uint8)
    for place, mask in masks.values():
        known = mask.bits[: bits.shape[1]]
        bits[place, : len(known)] = known
    words[:, 7] = np.where(words[:, 7] < 0, -1, words[:, 7] * bits.shape[1] + end)
    return [*tables, bits]


def send(parts: Sequence[npt.NDArray[Any]], device: torch.device) -> Tensor:
    """Copies the bytes of all parts to a device in one copy, without waiting for its end."""
    words = torch.from_numpy(np.concatenate([part.reshape(-1).view(np.uint8) for part in parts]))
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device current, because Triton starts kernels on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def filters(sampling: SamplingParams) -> tuple[float, float, float, float]:
    """Temperature, min-p, top-p and top-k of a row. A greedy row has top-k 1."""
    if sampling.greedy:
        return 1.0, 0.0, 1.0, 1.0
    return sampling.temperature, sampling.min_p, sampling.top_p, float(max(sampling.top_k, 0))
