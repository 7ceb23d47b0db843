"""The model card: what a drafter was made from, how long it took, and how much of it is
accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .documents import HELD_OUT_EVERY
from .measuring import Measured
from .options import DistillOptions, draft_model
from .storage import MADE_HERE
from .teacher import Dataset, TeacherCache
from .training import Point, Trainer

_RATES = """\
`greedy` is the share of places where target and drafter find the same token likeliest, `sampled`
the mean of sum min(p, q) at temperature 1, with q as it goes on the wire; both of the first draft
token."""


def render_card(
    options: DistillOptions,
    target: str,
    fingerprint: str,
    trainer: Trainer,
    dataset: Dataset,
    seconds: Mapping[str, float],
    measured: Sequence[Measured],
) -> str:
    """The card of a drafter for `target`, whose tensors have this fingerprint. `seconds` by stage;
    `measured` is the acceptance in held-out texts, then in answers to `options.measure`."""
    learner, cache, now = trainer.learner, dataset.cache, trainer.now
    learned = [cache.documents[index] for index in dataset.learned]
    passes = now.num_tokens / sum(document.num_learned for document in learned)
    times = ", ".join(f"{stage} {spent / 60:.1f} min" for stage, spent in seconds.items())
    before = _before(learner.began) if learner.is_trained else ""
    prompts = ""
    for of_prompts in measured[1:]:
        prompts = f"""## Acceptance in answers to {len(options.measure):,} prompts

The prompts were given to measure with: no conversation that was learned from here begins with
one of them. Texts by others were not searched.

{_tables(of_prompts)}

"""
    return f"""# A drafter for {target}

{MADE_HERE} for speculative decoding of the target {target} with tensors
`{fingerprint}`, and for no other: its embeddings and head are the target's{learner.said_of_ends}.
Serve it with `outrider serve {target} --draft-model {draft_model(options.kind, "DIR")}`.

- Of the kind `{options.kind}`.
- {sum(w.numel() for w in learner.weights.values()) / 1e6:.1f} million parameters of its own, begun
  as {learner.began}.
- Of the head it has the rows for {len(learner.token_ids):,} tokens, to which the target gives at
  least {measured[0].covered:.1%} of its probability in held-out answers; other \
tokens are never proposed.
- {learner.said_of_storage} What is measured here was measured after that.
- {now.num_steps:,} steps over {now.num_tokens:,} tokens, repetitions included: all that
  there is to learn from {passes:,.2f} times. Seed {options.seed}; {times}.

## Data

| written by | documents to learn from | tokens of these | documents held out |
| --- | --- | --- | --- |
{_data(cache)}

About one text in {HELD_OUT_EVERY} is held out, a conversation by its prompt, or by its first tokens
where that says nothing, as a hash of these and nothing else says: so every run holds out the same
ones.
{before}
The target's 64 likeliest tokens at every place were what was learned.

{_RATES}

{prompts}## Acceptance in answers of held-out documents

Of conversations the answers alone are measured, which the target wrote at the temperature that is
stated; of texts by others everything.

{_tables(measured[0])}

## Training

| step | tokens | loss | greedy | sampled |
| --- | --- | --- | --- | --- |
{_curve(now.points)}
"""


def _before(began: str) -> str:
    return f"""
What {began} had learned from before is not listed. Some of what is held out here
may be among it, if another rule held texts out then.
"""


def _data(cache: TeacherCache) -> str:
    sources = []
    for name, is_given in (("the target, for this", False), ("given by --corpus", True)):
        own = [document for document in cache.known if document.is_given == is_given]
        if own:
            kept = [document.num_learned for document in own if not document.is_held_out]
            sources.append(f"| {name} | {len(kept):,} | {sum(kept):,} | {len(own) - len(kept):,} |")
    return "\n".join(sources)


def _curve(points: Sequence[Point]) -> str:
    return "\n".join(
        f"| {p.step:,} | {p.num_tokens:,} | {p.loss:.3f} | {p.greedy:.3f} | {p.sampled:.3f} |"
        for p in points
    )


def _tables(measured: Measured) -> str:
    temperatures = "\n".join(
        f"| {'others' if r.temperature is None else f'target, {r.temperature:g}'} "
        f"| {r.num_tokens:,} | {r.greedy:.3f} | {r.sampled:.3f} |"
        for r in measured.by_temperature
    )
    positions = " | ".join("-" if p is None else f"{p:.3f}" for p in measured.by_position)
    depths = " | ".join(str(depth + 1) for depth in range(len(measured.by_position)))
    rule = "|".join(["---"] * (len(measured.by_position) + 1))
    return f"""| written by, at temperature | places | greedy | sampled |
| --- | --- | --- | --- |
{temperatures}

Given that all draft tokens before it were accepted, at temperature 1:

| draft token | {depths} |
|{rule}|
| accepted | {positions} |"""
