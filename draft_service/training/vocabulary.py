"""Which tokens a drafter can propose, and how much of the target's probability they have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .teacher import TeacherCache

_DOCUMENTS_AT_ONCE = 512


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
