"""The model card: what a drafter was made from, in what time, and how much of it is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.drafter_checkpoint import TrainedKind

from .dataset import Start
from .documents import HELD_OUT_EVERY
from .measuring import Measured
from .options import draft_model
from .training import Point


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """How much came from one source."""

    num_learned: int
    """Documents to learn from."""
    num_tokens: int
    """Of these, to be learned."""
    num_held_out: int
    """Documents that were held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What the card says."""

    target: str
    target_fingerprint: str
    start: Start
    """What the drafter began as, and what it is now."""
    kind: TrainedKind
    covered: float
    """Part of the target's probability that the head's tokens have in held-out answers, at least;
    of 1."""
    sources: dict[str, SourceFacts]
    """By what wrote the documents."""
    has_texts: bool
    """Whether some of them are texts by others."""
    seconds: dict[str, float]
    """By stage: of all that `--minutes` is for, and of measuring."""
    seed: int
    num_steps: int
    num_trained_tokens: int
    """Repetitions included."""
    measured: Measured
    """In held-out texts."""
    of_prompts: Measured | None
    """In answers to prompts that were given for that alone ..."""
    num_prompts: int
    """... and how many these are."""
    points: Sequence[Point]


def render_card(facts: CardFacts) -> str:
    start, learner, num_rows = facts.start, facts.start.learner, len(facts.start.token_ids)
    passes = facts.num_trained_tokens / sum(s.num_tokens for s in facts.sources.values())
    served = draft_model(facts.kind, "DIR")
    times = ", ".join(f"{stage} {seconds / 60:.1f} min" for stage, seconds in facts.seconds.items())
    prompts = ""
    if facts.of_prompts is not None:
        prompts = f"""## Acceptance in answers to {facts.num_prompts:,} prompts

The prompts were given to measure with: no conversation that was learned from begins with one of
them{_unknown(facts)}.

{_tables(facts.of_prompts)}

"""
    learned, before = "first by cross-entropy, then by the likelihood that a draft is accepted", ""
    if facts.start.is_trained:
        learned = "mostly by the likelihood that a draft is accepted, from the first step on"
        before = (
            f"\nWhat {start.name} had learned from before is not listed. Some of what is held out "
            "here\nmay be among it, if another rule held texts out then.\n"
        )
    return f"""# A drafter for {facts.target}

Made by `outrider distill` for speculative decoding of the target {facts.target} with weights
`{facts.target_fingerprint}`, and for no other: its embeddings and head are the target's and are not
stored here. Serve it with `outrider serve {facts.target} --draft-model {served}`.

- Of the kind `{facts.kind}`.
- {learner.num_parameters / 1e6:.1f} million parameters of its own in {learner.shape}, begun
  as {start.name}.
- Of the head it has the rows for {num_rows:,} tokens, to which the target gives at
  least {facts.covered:.1%} of its probability in held-out answers; other tokens are never proposed.
- Matrices are stored as int8 with one scale a row. What is measured here was measured after that.
- {facts.num_steps:,} steps over {facts.num_trained_tokens:,} tokens, repetitions included: all that
  there is to learn from {passes:,.2f} times. Seed {facts.seed}; {times}.

## Data

| written by | documents to learn from | tokens of these | documents held out |
| --- | --- | --- | --- |
{_data(facts)}

About one text in {HELD_OUT_EVERY} is held out, a conversation by its prompt, or by its first tokens
where that says nothing, as a hash of these and nothing else says: so every run holds out the same
ones.
{before}
The target's 64 likeliest tokens at every place were what was learned:
{learned}.

`greedy` is the share of places where target and drafter find the same token likeliest, `sampled`
the mean of sum min(p, q) at temperature 1, with q as it goes on the wire; both of the first draft
token.

{prompts}## Acceptance in answers of held-out documents

Of conversations the answers alone are measured, which the target wrote at the temperature that is
stated; of texts by others everything.

{_tables(facts.measured)}

## Training

| step | tokens | loss | greedy | sampled |
| --- | --- | --- | --- | --- |
{_curve(facts.points)}
"""


def _data(facts: CardFacts) -> str:
    return "\n".join(
        f"| {name} | {source.num_learned:,} | {source.num_tokens:,} | {source.num_held_out:,} |"
        for name, source in facts.sources.items()
    )


def _unknown(facts: CardFacts) -> str:
    found = ""
    if facts.has_texts:
        found += "; texts by others were not searched for them"
    if facts.start.is_trained:
        found += f";\nwhat {facts.start.name} had learned from before is not known here"
    return found


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


def _curve(points: Sequence[Point]) -> str:
    """What was measured on the way; the loss is the mean since the row before."""
    return "\n".join(
        f"| {p.step:,} | {p.num_tokens:,} | {p.loss:.3f} | {p.greedy:.3f} | {p.sampled:.3f} |"
        for p in points
    )
