"""Measures how many draft tokens would be accepted in held-out texts, and writes the model card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.text_acceptance import acceptance_of_windows, conditional_acceptance

from .documents import HELD_OUT_EVERY, Array
from .learners import Learner
from .options import DistillOptions, draft_model
from .teacher import Batch, Dataset
from .training import Trainer

_ROWS_OF_A_BLOCK = 512
_TOKENS_OF_A_PASS = 4096


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """Acceptance in held-out answers. `greedy` is measured in answers at temperature 0, and
    `sampled` in answers at temperature 1. If a temperature has no answers, all texts are used."""

    measured_tokens: int
    greedy: float  # share of positions where p and q have the same likeliest token
    sampled: float
    """Mean of sum min(p, q) at temperature 1. The sum is over the target's 64 likeliest tokens, and
    q is truncated as in a proposal."""
    by_position: tuple[float | None, ...]
    """The probability at temperature 1 that each draft token is accepted, given that all earlier
    draft tokens were accepted."""


def measure(learner: Learner, dataset: Dataset) -> MeasuredAcceptance:
    """Measures drafts in the held-out documents. In conversations, measures only answers. User
    turns were given, or drawn with min-p, so they do not follow the target's distribution. `greedy`
    and `sampled` use the first token of each chain (see `learners.py`)."""
    firsts: dict[float | None, list[Array]] = {}
    texts: list[list[Array]] = []
    for chosen in dataset.cache.batches(dataset.held_out, _TOKENS_OF_A_PASS):
        depths = _drafted(learner, dataset.batch(chosen))
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
    return MeasuredAcceptance(len(everything), greedy, sampled, positions)


def _drafted(learner: Learner, batch: Batch) -> list[tuple[Array, Array]]:
    """Returns `Depth.rows` [C] and the `_scores` [C, 3] of each `Depth` that `learner` drafts."""
    drafted = []
    with torch.inference_mode():
        for depth in learner.draft(batch):
            blocks = zip(*(torch.split(part, _ROWS_OF_A_BLOCK) for part in depth), strict=True)
            parts = [_scores(block @ learner.head.t(), batch, some) for block, some in blocks]
            drafted.append((depth.rows.cpu().numpy(), torch.cat(parts).double().cpu().numpy()))
    return drafted


def _scores(logits: Tensor, batch: Batch, rows: Tensor) -> Tensor:
    """Compares the drafter's `logits` [C, N] with the target's distributions at these `rows` [C].
    Returns [C, 3]: whether the likeliest tokens are the same, sum min(p, q), and min(1, q(x) /
    p(x)), where x is the next token of the text."""
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


def render_card(
    options: DistillOptions,
    target: str,
    fingerprint: str,
    trainer: Trainer,
    dataset: Dataset,
    seconds: Sequence[float],
    measured: Mapping[str, MeasuredAcceptance],
) -> str:
    """Returns the model card. `fingerprint` identifies the target's tensors. `seconds` are the
    times of writing, scoring and training. The keys of `measured` are names of the texts."""
    learner, now = trainer.learner, trainer.progress
    writing, scoring, training = (f"{spent / 60:.1f} min" for spent in seconds)
    num_learned = sum(dataset.cache.known[index].num_learned for index in dataset.learned)
    start = ""
    if options.start_from is not None:
        start = (
            f"\n- Training began with the drafter `{options.start_from}`, "
            "whose training documents are not in the table. Held-out documents may be among them."
        )
    num_own = sum(weight.numel() for weight in learner.weights.values())
    return f"""# A drafter for {target}

Made by `outrider distill` for speculative decoding of the target {target}, whose tensors have the
fingerprint `{fingerprint}`. It fits no other target. Serve it with
`outrider serve {target} --draft-model {draft_model(options.kind, "DIR")}`.

- Its kind is `{options.kind}`. It has {num_own / 1e6:.1f} million parameters of its own, and can
  propose {len(learner.token_ids):,} of the target's tokens.
- {learner.stored_form}
- Training had {now.num_steps:,} steps over {now.num_tokens:,} tokens, which is
  {now.num_tokens / num_learned:.2f} times the training data. The seed was {options.seed}.
  The target wrote texts for {writing} and scored texts for {scoring}.
  Training took {training}.{start}

| written by | training documents | tokens of training documents | held-out documents |
| --- | --- | --- | --- |
{_data(dataset)}

About one document in {HELD_OUT_EVERY} is held out. A hash of its tokens decides, so every run holds
out the same documents. For a conversation, only the prompt is hashed. If a conversation has no
user turn, the beginning of the answer is also hashed.

## Acceptance

| in | places | greedy | sampled | by position |
| --- | --- | --- | --- | --- |
{_acceptance(measured)}

The drafter was measured in answers of conversations and in whole texts of the corpus, with its
weights as they are stored. `greedy` is the share of places where target and drafter have the same
likeliest token. `sampled` is the mean of sum min(p, q) at temperature 1. `by position` is the
probability at temperature 1 that draft token 1, 2, .. is accepted if all before it are accepted.
"""


def _data(dataset: Dataset) -> str:
    rows = []
    for name, is_given in (("the target", False), ("others (--corpus)", True)):
        own = [
            document
            for document in dataset.cache.known
            if (document.temperature is None) == is_given
        ]
        kept = [document.num_learned for document in own if not document.is_held_out]
        if own:
            rows.append(f"| {name} | {len(kept):,} | {sum(kept):,} | {len(own) - len(kept):,} |")
    return "\n".join(rows)


def _acceptance(measured: Mapping[str, MeasuredAcceptance]) -> str:
    rows = []
    for name, result in measured.items():
        positions = ", ".join("-" if p is None else f"{p:.3f}" for p in result.by_position)
        rates = f"{result.greedy:.3f} | {result.sampled:.3f}"
        rows.append(f"| {name} | {result.measured_tokens:,} | {rates} | {positions} |")
    return "\n".join(rows)
