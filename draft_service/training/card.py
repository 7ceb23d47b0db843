"""The model card: how a drafter was made, and how many of its draft tokens are accepted."""

from collections.abc import Mapping

from .documents import HELD_OUT_EVERY
from .measuring import Measured
from .options import DistillOptions, draft_model
from .teacher import Dataset
from .training import Trainer


def render_card(
    options: DistillOptions,
    target: str,
    fingerprint: str,
    trainer: Trainer,
    dataset: Dataset,
    seconds: Mapping[str, float],
    measured: Mapping[str, Measured],
) -> str:
    """Returns the model card. `target` is the target's name, and `fingerprint` is that of the
    target's tensors. `seconds` are by stage. `measured` is by the name of the texts."""
    learner, now = trainer.learner, trainer.progress
    times = ", ".join(f"{stage} {spent / 60:.1f} min" for stage, spent in seconds.items())
    start = ""
    if options.start_from is not None:
        start = (
            f"\n- Training began with the drafter `{options.start_from}`. "
            "The texts that it was trained with are not listed here. They may contain texts that "
            "are held out here."
        )
    num_own = sum(weight.numel() for weight in learner.weights.values())
    return f"""# A drafter for {target}

Made by `outrider distill` for speculative decoding of the target {target} with tensors
`{fingerprint}`, and for no other. Serve it with
`outrider serve {target} --draft-model {draft_model(options.kind, "DIR")}`.

- Of the kind `{options.kind}`, with {num_own / 1e6:.1f} million parameters of its own. It can
  propose {len(learner.token_ids):,} different tokens.
- {learner.stored_form}
- {now.num_steps:,} steps over {now.num_tokens:,} tokens, repetitions included. Seed {options.seed};
  {times}.{start}

| written by | documents to learn from | tokens of these | documents held out |
| --- | --- | --- | --- |
{_data(dataset)}

About one text in {HELD_OUT_EVERY} is held out. A hash of its tokens decides, so every run holds out
the same texts. For a conversation, only the prompt is hashed. If a conversation has no user's turn,
the beginning of the answer is also hashed.

## Acceptance

| in | places | greedy | sampled | by position |
| --- | --- | --- | --- | --- |
{_acceptance(measured)}

The drafter was measured in answers of conversations and in whole texts of the corpus, with its
weights as they are stored. `greedy`: the share of places where target and drafter have the same
likeliest token. `sampled`: the mean of sum min(p, q) at temperature 1. `by position`: the
probability at temperature 1 that draft token 1, 2, .. is accepted if all earlier ones are.
"""


def _data(dataset: Dataset) -> str:
    rows = []
    for name, is_given in (("the target", False), ("others (--corpus)", True)):
        own = [one for one in dataset.cache.known if (one.temperature is None) == is_given]
        kept = [one.num_learned for one in own if not one.is_held_out]
        if own:
            rows.append(f"| {name} | {len(kept):,} | {sum(kept):,} | {len(own) - len(kept):,} |")
    return "\n".join(rows)


def _acceptance(measured: Mapping[str, Measured]) -> str:
    rows = []
    for name, found in measured.items():
        positions = ", ".join("-" if p is None else f"{p:.3f}" for p in found.by_position)
        rates = f"{found.greedy:.3f} | {found.sampled:.3f}"
        rows.append(f"| {name} | {found.num_tokens:,} | {rates} | {positions} |")
    return "\n".join(rows)
