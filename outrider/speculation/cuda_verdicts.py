"""Computes the verdicts of `verification.py` on a CUDA device. `judge_by_kernels` starts at most
three kernels for all sessions together, and waits for the device once."""

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.grammar.token_mask import TokenMask
from outrider.limits import DRAFT_SUPPORT_ENTRIES_MAX
from outrider.speculation.gumbel_max import BLOCK, IntArray
from outrider.speculation.kernel_rows import JUDGED, RESULTS, ROW, num_words
from outrider.speculation.logits_processing import DraftVocabulary, changed_tokens
from outrider.speculation.proposal import ENTRY_BYTES
from outrider.speculation.proposal_rows import JudgedRows, ProposalRows
from outrider.speculation.sampling_params import SamplingParams, TokenHistory

_BLOCK = 8192
_WEIGHING_WARPS = 32
_ENTRIES = 1024
_WAITS = 32
_WARPS = 16
Transforms = tuple[SamplingParams, TokenHistory, Sequence[TokenMask | None]]
"""A session's parameters, history, and masks (none, or one a row; a None allows all tokens)."""
_FAILED: set[torch.device] = set()


def has_kernels(device: torch.device) -> bool:
    """Whether verdicts and draws on the device use kernels, which need CUDA and Triton."""
    return device.type == "cuda" and device not in _FAILED and _has_compiler()


@cache
def _has_compiler() -> bool:
    return importlib.util.find_spec("triton") is not None


def give_up(device: torch.device) -> None:
    _FAILED.add(device)


def judge_by_kernels(
    logits: Tensor, transforms: Sequence[Transforms], rows: ProposalRows
) -> JudgedRows:
    """Computes `JudgedRows`. `logits` [R, V] are those of `rows`, in float32 or a narrower type."""
    num_rows, device = len(logits), logits.device
    results = torch.empty((len(RESULTS), num_rows), dtype=torch.float64, device=device)
    nothing = np.empty((num_rows, 0), dtype=np.int64)
    with on_device(device):
        words, _, changed = send_rows(logits, transforms, rows.sizes, rows.drafted, nothing)
        is_same = changed is logits
        weights = torch.empty_like(logits, dtype=torch.float32) if is_same else changed
        weigh(weights, results, changed, words)
        # The host prepares the last kernel's arguments while the device runs the first kernels.
        packed = [b"" if each is None else each.packed for each in rows.q]
        num_bytes = np.array([*map(len, packed)], dtype=np.int64)
        judged = np.zeros(num_rows, dtype=JUDGED)
        judged["keys"] = rows.keys()
        judged["num_before"] = rows.num_before
        judged["is_block"] = rows.is_block
        is_judged = rows.num_before >= 0
        judged["q_at"][is_judged] = judged.nbytes + num_bytes.cumsum() - num_bytes
        judged["q_size"][is_judged] = num_bytes // ENTRY_BYTES
        sent = send([judged, np.frombuffer(b"".join(packed), dtype=np.uint8)], device)
        settle(weights, results, words, sent)
    maxima, _, _, acceptance, left, drawn = results.cpu().numpy()
    return JudgedRows(acceptance, left, drawn.astype(np.int64), np.isfinite(maxima))


def send_rows(
    logits: Tensor,
    transforms: Sequence[Transforms],
    sizes: IntArray,
    drafted: IntArray | int,
    extra: IntArray,
    vocabulary: DraftVocabulary | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends the kernels' arguments to the device. `logits` are [R, V], or [R, N] for a `vocabulary`
    of N tokens, in float32 or narrower. Each session has an entry in `transforms`, and its number
    of rows in `sizes`. `drafted` has the draft token after each row, or -1. `extra` [R, E] has
    further arguments of the rows.

    Returns the words of `ROW` for each row [R, 12] and `extra` on the device, and the logits after
    masks, biases and penalties (`change_rows`)."""
    num_rows, width = logits.shape
    rows = np.zeros(num_rows, dtype=ROW)
    kept = np.array([filters(sampling) for sampling, _, _ in transforms])
    for name, values in zip(("temperature", "min_p", "top_p", "top_k"), kept.T, strict=True):
        rows[name] = values.repeat(sizes)
    rows["drafted"] = drafted
    num_bytes = end = rows.nbytes + extra.nbytes
    changes: list[npt.NDArray[Any]] = []  # tables of tokens with biases or penalties, then masks
    masks: dict[int, tuple[int, TokenMask]] = {}
    mask_of = np.full(num_rows, -1, dtype=np.int64)
    at = 0
    for (sampling, history, row_masks), size in zip(transforms, sizes.tolist(), strict=True):
        start, at = at, at + size
        if sampling.penalised or sampling.logit_bias:
            changes.append(changed_tokens(sampling, history, width, vocabulary))
            own = rows[start:at]
            own["num_changed"], own["changed_at"] = len(changes[-1]), end
            own["num_before"] = np.arange(size)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                own[name] = getattr(sampling, name)
            end += changes[-1].nbytes
        for row, mask in enumerate(row_masks, start):
            if mask is not None:
                mask_of[row] = masks.setdefault(id(mask), (len(masks), mask))[0]
    if masks:
        bits = np.zeros((len(masks), -(-width // 8)), dtype=np.uint8)
        for place, given in masks.values():
            known = given.bits[: bits.shape[1]]
            bits[place, : len(known)] = known
        mask_of = np.where(mask_of < 0, -1, mask_of * bits.shape[1] + end)
        changes.append(bits)
    rows["mask_at"] = mask_of
    sent = send([rows, extra, *changes], logits.device)
    if changes:
        from outrider.speculation.triton_kernels import change_rows

        changed = torch.empty_like(logits, dtype=torch.float32)
        change_rows[(num_rows,)](
            changed,
            logits,
            logits.stride(0),
            sent,
            width,
            BLOCK=_BLOCK,
            ENTRIES=_ENTRIES,
            num_warps=_WARPS,
        )
        logits = changed
    num_own = num_rows * num_words(ROW)
    words, others = torch.split(sent[:num_bytes].view(torch.int64), [num_own, extra.size])
    return words.view(num_rows, -1), others.view(extra.shape), logits


def weigh(weights: Tensor, results: Tensor, logits: Tensor, words: Tensor) -> None:
    from outrider.speculation.triton_kernels import weigh_rows

    num_rows, width = logits.shape
    weigh_rows[(num_rows,)](
        weights,
        results,
        logits,
        logits.stride(0),
        words,
        width,
        BLOCK=_BLOCK,
        num_warps=_WEIGHING_WARPS,
    )


def settle(weights: Tensor, results: Tensor, words: Tensor, sent: Tensor) -> None:
    from outrider.speculation.triton_kernels import settle_rows

    num_rows, width = weights.shape
    row_waits = 1 << (-(-width // BLOCK) - 1).bit_length()
    races = torch.empty((2, num_rows, row_waits), dtype=torch.float64, device=weights.device)
    settle_rows[(num_rows,)](
        weights,
        results,
        words,
        sent.view(torch.uint8),
        races,
        width,
        ENTRIES=DRAFT_SUPPORT_ENTRIES_MAX,
        WAITS=min(_WAITS, row_waits),
        ROW_WAITS=row_waits,
        num_warps=_WARPS,
    )


def send(parts: Sequence[npt.NDArray[Any]], device: torch.device) -> Tensor:
    """Copies the bytes of all parts to a device in one transfer, without waiting for its end."""
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
