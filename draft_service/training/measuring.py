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
"""The target answers each prompt to measure with once at each of these temperatures."""
MEASURED_TOKENS_MAX = 128
"""Largest number of tokens of an answer to such a prompt. `outrider bench acceptance` has the same
default."""
MEASURED_PROMPT_TOKENS_MAX = 4096
"""Largest number of tokens of a prompt to measure with. One pass reads a prompt and its answer. In
this pass over T tokens, attention holds up to three tensors [heads, T, T]. For 9 heads in half
precision, each of these tensors takes 0.3 GB."""
_ROWS_OF_A_BLOCK = 512
_TOKENS_OF_A_PASS = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """Acceptance in answers of held-out documents. Tokens that are not among the target's 64
    likeliest count as rejected."""

    num_tokens: int
    """Number of measured tokens, in texts of all temperatures."""
    greedy: float
    """Share of positions where p and q have the same likeliest token. The positions are in texts
    that the target wrote at temperature 0, or in all texts if there are no such texts."""
    sampled: float
    """Mean of sum min(p, q) at temperature 1, where q is truncated as in a proposal. The positions
    are in texts that the target wrote at temperature 1, or in all texts if there are no such
    texts."""
    by_position: tuple[float | None, ...]
    """At temperature 1: for each draft token, the probability that it is accepted if all draft
    tokens before it are accepted."""


def measure(learner: Learner, dataset: Dataset) -> Measured:
    """Drafts along the held-out documents. Measures only answers, because user turns were drawn
    with other sampling parameters. p and q have temperature 1, whatever the text's temperature.
    `greedy` and `sampled` measure only the first draft token of each chain."""
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
    """Compares `logits` [C, N] with the target's answers at these `rows` [C]. Returns [C, 3]:
    whether the likeliest tokens agree, sum min(p, q), and min(1, q(x) / p(x)) of the text's token
    x."""
    q = logits.float().softmax(dim=1)
    kept = q.topk(min(DRAFT_SUPPORT_ENTRIES, q.shape[1]), dim=1)
    q = torch.zeros_like(q).scatter_(1, kept.indices, kept.values)
    q /= kept.values.sum(dim=1, keepdim=True)
    teacher, following = batch.teacher.at(rows), batch.following[rows]
    overlap = torch.minimum(q.gather(1, teacher.columns), teacher.mass).sum(dim=1)
    drafted = q.gather(1, following.clamp(min=0)[:, None])[:, 0] * (following >= 0)
    ratio = (drafted / batch.written[rows].exp()).clamp(max=1.0)
    is_same = kept.indices[:, 0] == batch.likeliest[rows]
    return torch.stack([is_same, overlap, ratio], dim=1)
