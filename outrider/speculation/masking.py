"""Masks on logits: what a grammar forbids has no probability. The mask comes first: bias, penalties
and filters then see what is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.constraints.allowed import Allowed, TokenMask
from outrider.errors import Incompatible, OutriderError
from outrider.speculation.proposal import Proposal
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.trees import ROOT


def masked_logits(
    logits: torch.Tensor,
    masks: Sequence[TokenMask | None],
    vocabulary: ReducedVocabulary | None = None,
) -> torch.Tensor:
    """`logits` [R, V], or [R, N] of a `vocabulary`'s columns, with -inf for what each row's mask
    forbids: a copy, or themselves where no row has one. On any device."""
    wanted = [row for row, mask in enumerate(masks) if mask is not None]
    given = [mask for mask in masks if mask is not None]
    if not given:
        return logits
    width = logits.shape[1]
    if vocabulary is not None or logits.device.type == "cpu":
        forbidden = torch.from_numpy(np.stack([~_flags(mask, width, vocabulary) for mask in given]))
        forbidden = forbidden.to(logits.device)
    else:  # Eight times less to send.
        forbidden = _unpacked(given, width, logits.device)
    masked = logits.clone()
    if len(wanted) == len(masked):
        return masked.masked_fill_(forbidden, float("-inf"))
    masked[wanted] = masked[wanted].masked_fill_(forbidden, float("-inf"))
    return masked


def row_masks(allowed: Allowed, proposal: Proposal) -> list[TokenMask | None]:
    """[N + 1] masks for the rows of a proposal: what may follow the committed tokens, then what may
    follow each draft token. None behind one that must not stand where it does: it has p = 0, so
    nobody looks at what follows it. Raises `Incompatible` where a mask cannot be told."""
    masks = [allowed.after(())]
    paths: list[tuple[int, ...]] = []
    for parent, token_id in zip(proposal.tree.parents, proposal.token_ids, strict=True):
        path = (*(() if parent == ROOT else paths[parent]), token_id)
        paths.append(path)
        before = masks[parent + 1]
        if before is None or not before.has(token_id):
            masks.append(None)
            continue
        mask = allowed.after(path)
        if mask is None:  # Else its row would be looked at without one.
            raise Incompatible(f"a constraint lets token {token_id} stand, and cannot follow it")
        masks.append(mask)
    return masks


def draft_mask(
    allowed: Allowed, drafted: Sequence[int], vocabulary: ReducedVocabulary | None = None
) -> TokenMask | None:
    """What a draft may draw after `drafted`; None where it had better stop there: the completion
    has ended, or nothing that the draft knows may follow. That is settled by tokens which are
    proposed, and by none that is not."""
    try:
        mask = allowed.after(drafted)
    except OutriderError:
        return None  # The target says so to whom it concerns.
    if mask is None or mask.is_over:
        return None
    if vocabulary is not None and not _flags(mask, 0, vocabulary).any():
        return None
    return mask


def _flags(
    mask: TokenMask, width: int, vocabulary: ReducedVocabulary | None
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    if vocabulary is None:
        return mask.flags(width)
    flags = mask.flags(int(vocabulary.token_ids[-1]) + 1)
    return flags[vocabulary.token_ids]


def _unpacked(masks: Sequence[TokenMask], width: int, device: torch.device) -> torch.Tensor:
    """[R, V]: what is forbidden, unpacked on the device."""
    bits = torch.from_numpy(np.stack([mask.bits for mask in masks])).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    flags = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :width]
    forbidden = torch.ones(len(masks), width, dtype=torch.bool, device=device)
    forbidden[:, : flags.shape[1]] = flags == 0
    return forbidden
