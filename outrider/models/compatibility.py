"""Decides which models a paged engine can run, by their configuration and by a trial.

A model is refused if it keeps more for a token than one key and one value in each layer, or if its
result for one sequence would depend on what else is in a step. The trial runs a few tokens, in two
steps and two sequences, against the module's own dense attention. For a deterministic engine it
also compares steps of all sizes with each other.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine.attention import set_attention
from outrider.engine.interface import (
    DraftingEngine,
    Engine,
    ModelInfo,
    SequenceStep,
)
from outrider.errors import ConfigError

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose whole state is one key and one value per token."""
TRIAL_SEQUENCES = 2
_TRIAL_TOKENS = 21
_TRIAL_CHUNK = 13
"""Tokens of one sequence of the trial that are run in a first step of their own."""
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Allowed difference, relative to the norm of all logits of the trial, for rounding in another
order. Attention to wrong slots, or at wrong positions, makes a difference of about 1."""
_HALF_TOLERANCE = 0.2
_LONG_TRIAL_TOKENS = 136
"""Tokens of the sequence for steps of all sizes: enough for more than one split."""
_ALONE_TOKENS = 5
"""How many of them each reference step runs."""
_CROWDED_ROWS = (8, 16, 32, 64, 128, 256, 512)
"""The sizes of the other steps, in tokens of all sequences."""
CROWD_SLOTS = 1024
"""Slots that the largest step takes, with partial pages."""
_Model = Any


def check_supported(module: _Model, info: ModelInfo) -> None:
    """Raises `ConfigError` for a model whose configuration shows that it cannot run."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    recurrent = getattr(module, "_is_stateful", False)
    if kinds or recurrent or getattr(module.config, "is_encoder_decoder", False):
        kind = ", ".join(sorted(kinds)) or ("recurrent state" if recurrent else "encoder-decoder")
        raise ConfigError(
            f"tokens cannot be taken back from its state ({kind}); "
            "only decoders made of attention layers can be served"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError("some of its layers read the keys and values of others")
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise ConfigError("it does not take the positions of its tokens (position_ids)")
    limit = _unscaled_length(config)
    if limit is not None and info.max_model_len > limit:
        raise ConfigError(
            f"beyond {limit} tokens its rotary embedding (longrope) depends on what else is in a "
            f"step; give a --max-model-len of {limit} or less"
        )


def _unscaled_length(config: Any) -> int | None:
    """The length up to which a model with the rotary embedding `longrope` uses fixed frequencies;
    None for other models."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    lengths = [
        int(rope["original_max_position_embeddings"])
        for rope in by_layer
        if rope.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def trial_tokens(info: ModelInfo) -> tuple[int, ...]:
    """The tokens of the trial; fewer for a model with a short `max_model_len`."""
    return _varied_tokens(min(_TRIAL_TOKENS, info.max_model_len), info)


def _varied_tokens(num: int, info: ModelInfo) -> tuple[int, ...]:
    return tuple((7919 * i + 1) % info.vocab_size for i in range(num))


def dense_logits(module: _Model, token_ids: Sequence[int]) -> Tensor:
    """The module's own logits [T, V], without a cache; leaves it set to dense attention."""
    set_attention(module, "eager")
    with torch.inference_mode():
        ids = torch.tensor([token_ids], device=next(module.parameters()).device)
        logits: Tensor = module(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return logits


def check_answers(engine: Engine, expected: Tensor) -> None:
    """Runs the trial; raises `ConfigError` unless its logits are `expected` [T, V]."""
    ids = trial_tokens(engine.info)
    chunk = min(_TRIAL_CHUNK, len(ids) - 1)
    whole, rest = SequenceStep("whole", ids, len(ids)), len(ids) - chunk
    first = engine.forward([SequenceStep("chunks", ids[:chunk], chunk)]) if chunk else []
    last, other = engine.forward([SequenceStep("chunks", ids[chunk:], rest), whole])
    if expected.shape[-1] == 0:
        return  # of the ranks that share a model, only the leader has logits
    for answer in (torch.cat([*first, last]), other):
        _check_close(
            answer, expected,
            "with paged attention its logits differ from its own by {} of their norm",
        )  # fmt: skip


def check_features(engine: DraftingEngine, expected: Tensor) -> None:
    """Raises `ConfigError` unless the features of the trial's last step, which has just been run,
    are `expected` [T, D]."""
    what = "with paged attention what a drafter reads of it differs by {} of its norm"
    _check_close(engine.features()[-1], expected, what)


def _check_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Compares by the norm of all rows, as in half precision a single row may be far off: what the
    demo target's layer 15 reads at the trial's second token is off by 0.57 of its norm in bfloat16,
    and by 0.03 at most at any other token."""
    exact = expected.double()
    difference = (found.double() - exact).norm() / exact.norm()
    tolerance = _TOLERANCES.get(expected.dtype, _HALF_TOLERANCE)
    if not difference <= tolerance:  # NaN satisfies no comparison
        raise ConfigError(f"{what.format(f'{difference:.2g}')}; {tolerance:g} is allowed")


def dependent_at(engine: Engine, max_num_seqs: int) -> int | None:
    """The size in tokens of the smallest step in which a sequence's logits are not bit-equal to
    those that it gets alone; None if they always are. Tries sizes for which the engine has pages,
    and leaves only remembered prefixes behind. All ranks of a model run all steps."""
    ids = _varied_tokens(min(_LONG_TRIAL_TOKENS, engine.info.max_model_len), engine.info)
    alone = _logits_in_parts(engine, ids, _ALONE_TOKENS, _ALONE_TOKENS, max_num_seqs)
    differ = []
    for num_rows in _CROWDED_ROWS:
        # One less than the rows of a step, so that parts begin at different rows of their steps.
        crowded = _logits_in_parts(engine, ids, num_rows - 1, num_rows, max_num_seqs)
        if not torch.equal(crowded, alone):
            differ.append(num_rows)
    return min(differ, default=None)


def _logits_in_parts(
    engine: Engine, ids: tuple[int, ...], part: int, num_rows: int, max_num_seqs: int
) -> Tensor:
    """Logits [T, V] of `ids`, run in parts of `part` tokens, each after other sequences that fill
    the step up to `num_rows`, if there is room."""
    rows = []
    for start in range(0, len(ids), part):
        chunk = ids[start : start + part]
        own = SequenceStep("trial", chunk, len(chunk))
        others = _crowd(engine.info, num_rows - len(chunk), max_num_seqs - 1)
        if not engine.can_hold([*others, own]):
            others = []
        rows.append(engine.forward([*others, own])[-1])
        for other in others:
            engine.release(other.sequence_id)
    engine.release("trial")
    return torch.cat(rows)


def _crowd(info: ModelInfo, num_tokens: int, num_sequences: int) -> list[SequenceStep]:
    """At most `num_sequences` new sequences with up to `num_tokens` tokens in total."""
    steps: list[SequenceStep] = []
    while num_tokens > 0 and len(steps) < num_sequences:
        ids = _varied_tokens(min(num_tokens, info.max_model_len), info)
        steps.append(SequenceStep(f"other-{len(steps)}", ids, 1))
        num_tokens -= len(ids)
    return steps
