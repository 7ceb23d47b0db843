"""Masks on logits: what a grammar forbids has no probability. The mask comes first: bias, penalties
and filters then see what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.errors import Incompatible, OutriderError
from outrider.grammar.token_mask import Allowed, TokenMask
from outrider.speculation.draft_vocabulary import DraftVocabulary
from outrider.speculation.proposal import Proposal
from outrider.speculation.trees import ROOT


def masked_logits(
    logits: torch.Tensor,
    masks: Sequence[TokenMask | None],
    vocabulary: DraftVocabulary | None = None,
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


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of a proposal's rows."""

    masks: list[TokenMask | None]
    """[N + 1]: what may follow the committed tokens, then what may follow each draft token. None
    behind a draft token that its own mask forbids: it has p = 0, and no outcome uses the row."""
    untold: frozenset[int]
    """Rows of legal draft tokens behind which the constraint cannot be followed, and which have no
    mask therefore. An outcome that reaches one ends with the draft token: see `ending_at`."""


def row_masks(allowed: Allowed, proposal: Proposal) -> RowMasks:
    """The masks for the rows of a proposal. Raises `Incompatible` where the mask behind the
    committed tokens cannot be told; behind a draft token, which may be refused, that is no error
    yet: drafts change no outcome, failures included."""
    masks = [allowed.after(())]
    untold: set[int] = set()
    paths: list[tuple[int, ...]] = []
    for index, token_id in enumerate(proposal.token_ids):
        parent = proposal.tree.parents[index]
        path = (*(() if parent == ROOT else paths[parent]), token_id)
        paths.append(path)
        before = masks[parent + 1]
        mask = None
        if before is not None and before.has(token_id):
            try:
                mask = allowed.after(path)
            except Incompatible:
                mask = None
            if mask is None:
                untold.add(index + 1)
        masks.append(mask)
    return RowMasks(masks, frozenset(untold))


def draft_mask(
    allowed: Allowed, drafted: Sequence[int], vocabulary: DraftVocabulary | None = None
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
    mask: TokenMask, width: int, vocabulary: DraftVocabulary | None
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
