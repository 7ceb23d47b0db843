"""Measures how many draft tokens would be accepted in the answers of held-out documents."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.text_acceptance import acceptance_of_windows, conditional_acceptance

from .documents import Array
from .learners import Learner
from .teacher import Batch, Dataset

MEASURED_TEMPERATURES = (0.0, 1.0)
"""The target answers each prompt of `--measure` once at each of these temperatures."""
MEASURED_TOKENS_MAX = 128
"""Largest number of tokens in an answer to a prompt of `--measure`. `outrider bench acceptance` has
the same default."""
MEASURED_PROMPT_TOKENS_MAX = 4096
"""Largest number of tokens in a prompt of `--measure`. One pass reads the prompt and its answer.
For T tokens, attention then holds up to three tensors [heads, T, T]. With 9 heads in half
precision, each tensor takes 0.3 GB."""
_ROWS_OF_A_BLOCK = 512
_TOKENS_OF_A_PASS = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """Acceptance in held-out answers."""

    num_tokens: int
    greedy: float
    """Share of positions where p and q have the same likeliest token, in texts that the target
    wrote at temperature 0. Without such texts, the share is from all texts."""
    sampled: float
    """Mean of sum min(p, q) at temperature 1, with q truncated as in a proposal, in texts that the
    target wrote at temperature 1. Without such texts, the mean is from all texts. The sum is over
    the target's 64 likeliest tokens."""
    by_position: tuple[float | None, ...]
    """The probability at temperature 1 that each draft token is accepted, given that all earlier
    draft tokens were accepted."""


def measure(learner: Learner, dataset: Dataset) -> Measured:
    """Drafts along the held-out documents. Measures only answers, because user turns were drawn
    with other parameters. `greedy` and `sampled` are about the first draft token of each chain."""
    firsts: dict[float | None, list[Array]] = {}
    texts: list[list[Array]] = []
    for chosen in dataset.cache.batches(dataset.held_out, _TOKENS_OF_A_PASS):
        depths = _read(learner, dataset.batch(chosen))
        first = 0
        for document in (dataset.cache.documents[index] for index in chosen):
            start = first + document.answer_first - document.first
            end = first + document.num_learned
            parts = [
                scores[slice(*np.searchsorted(rows, [start + depth, end]))]
                for depth, (rows, scores) in enumerate(depths)
            ]
            firsts.setdefault(document.temperature, []).append(parts[0])
            if document.temperature == 1.0:
                texts.append([part[:, 2] for part in parts])
            first = end
    everything = np.concatenate([part for parts in firsts.values() for part in parts])
    if learner.num_depths is None:  # Consecutive tokens of the text act as a chain.
        positions = conditional_acceptance([ratios.tolist() for [ratios] in texts])
    else:
        positions = acceptance_of_windows(texts, learner.num_depths)
    greedy, sampled = (
        float(np.concatenate(firsts.get(temperature, [everything]))[:, column].mean())
        for column, temperature in enumerate((0.0, 1.0))
    )
    return Measured(len(everything), greedy, sampled, positions)


_Depth = tuple[Array, Array]
"""For one draft token of each of C chains: its row in the batch [C], and its `_scores` [C, 3]."""


def _read(learner: Learner, batch: Batch) -> list[_Depth]:
    found = []
    with torch.inference_mode():
        for depth in learner.draft(batch):
            blocks = zip(*(torch.split(part, _ROWS_OF_A_BLOCK) for part in depth), strict=True)
            parts = [_scores(block @ learner.head.t(), batch, some) for block, some in blocks]
            found.append((depth.rows.cpu().numpy(), torch.cat(parts).double().cpu().numpy()))
    return found


def _scores(logits: Tensor, batch: Batch, rows: Tensor) -> Tensor:
    """Compares the drafter's `logits` [C, N] with the target's answers at these `rows` [C]. Returns
    [C, 3]: whether the likeliest tokens are the same, sum min(p, q), and min(1, q(x) / p(x)) of the
    text's token x."""
    q = logits.float().softmax(dim=1)
    kept = q.topk(min(DRAFT_SUPPORT_ENTRIES, q.shape[1]), dim=1)
    q = torch.zeros_like(q).scatter_(1, kept.indices, kept.values)
    q /= kept.values.sum(dim=1, keepdim=True)
    following = batch.following[rows]
    overlap = torch.minimum(q.gather(1, batch.columns[rows]), batch.mass[rows]).sum(dim=1)
    drafted = q.gather(1, following.clamp(min=0)[:, None])[:, 0] * (following >= 0)
    ratio = (drafted / batch.written[rows].exp()).clamp(max=1.0)
    is_same = kept.indices[:, 0] == batch.likeliest[rows]
    return torch.stack([is_same, overlap, ratio], dim=1)
