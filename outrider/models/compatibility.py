"""Which models a paged engine can run, told from what they are and from what they answer.

A model is refused that keeps more of a token than one key and one value a layer, or whose result
for one sequence would depend on what else is in a step. What cannot be told from a configuration
is tried: a few tokens, in two steps and two sequences, against the module's own dense attention;
for a deterministic engine, some more of them in steps of all sizes, against themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine.attention import set_attention
from outrider.engine.interface import (
    Engine,
    FeatureEngine,
    ModelInfo,
    SequenceStep,
    ShallowEngine,
)
from outrider.errors import ConfigError

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layer whose whole state is one key and one value per token."""
TRIAL_SEQUENCES = 2
_TRIAL_TOKENS = 21
_TRIAL_CHUNK = 13
"""Tokens of one sequence of the trial that are run in a step before the others."""
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Of the norm of all logits of the trial: what rounding in another order may change. Attention over
the wrong slots, or at the wrong positions, changes it by about 1."""
_HALF_TOLERANCE = 0.2
_LONG_TRIAL_TOKENS = 136
"""Of the sequence that is tried in steps of all sizes: enough for more than one split."""
_ALONE_TOKENS = 5
"""Of it in a step of its own."""
_CROWDED_ROWS = (8, 16, 32, 64, 128, 256, 512)
"""Those sizes, in tokens of all sequences."""
CROWD_SLOTS = 1024
"""Slots that the largest of them takes, with the pages that are begun."""
_Model = Any


def check_supported(module: _Model, info: ModelInfo) -> None:
    """Raises `ConfigError` for a model whose configuration tells that it cannot be run."""
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
        raise ConfigError("it cannot be told the positions of its tokens")
    limit = _unscaled_length(config)
    if limit is not None and info.max_model_len > limit:
        raise ConfigError(
            f"beyond {limit} tokens its rotary embedding (longrope) depends on what else is in a "
            f"step; give a --max-model-len of {limit} or less"
        )


def _unscaled_length(config: Any) -> int | None:
    """Tokens up to which a model with the rotary embedding `longrope` uses fixed frequencies; None
    for a model without."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    lengths = [
        int(rope["original_max_position_embeddings"])
        for rope in by_layer
        if rope.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def trial_tokens(info: ModelInfo) -> tuple[int, ...]:
    """The tokens of the trial; fewer for a model that takes few."""
    return _varied_tokens(min(_TRIAL_TOKENS, info.max_model_len), info)


def _varied_tokens(num: int, info: ModelInfo) -> tuple[int, ...]:
    return tuple((7919 * i + 1) % info.vocab_size for i in range(num))


def dense_logits(module: _Model, token_ids: Sequence[int]) -> Tensor:
    """The module's own logits [T, V], without a cache; leaves it set to that attention."""
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


def check_first_layers(engine: ShallowEngine, expected: Tensor) -> None:
    """Runs the end of a sequence of the trial, which is over, once more through the first layers;
    raises `ConfigError` unless they put out `expected` [T, D]."""
    ids = trial_tokens(engine.info)
    chunk = min(_TRIAL_CHUNK, len(ids) - 1)
    engine.keep("whole", chunk)
    [found] = engine.forward_shallow([SequenceStep("whole", ids[chunk:], len(ids) - chunk)])
    what = "run alone, its first layers put out what differs by {} of its norm"
    _check_close(found, expected[chunk:], what)


def check_features(engine: FeatureEngine, expected: Tensor) -> None:
    """Raises `ConfigError` unless the features of the trial's last step, which has just been run,
    are `expected` [T, D]."""
    what = "with paged attention what a drafter reads of it differs by {} of its norm"
    _check_close(engine.features()[-1], expected, what)


def _check_close(found: Tensor, expected: Tensor, what: str) -> None:
    """By the norm of all rows: a model in half precision may have a single one that means little.
    (What the demo target's layer 15 reads of the trial's second token is 0.57 of its norm off in
    bfloat16, and 0.03 at most of any other.)"""
    exact = expected.double()
    difference = (found.double() - exact).norm() / exact.norm()
    tolerance = _TOLERANCES.get(expected.dtype, _HALF_TOLERANCE)
    if not difference <= tolerance:  # NaN satisfies no comparison
        raise ConfigError(f"{what.format(f'{difference:.2g}')}; {tolerance:g} is allowed")


def dependent_at(engine: Engine, max_num_seqs: int) -> int | None:
    """The fewest tokens of a step in which a sequence's logits are not bit-equal to those that it
    gets alone, of sizes up to those for which the engine has pages; None if there is none. Leaves
    nothing but remembered prefixes behind. Ranks that share a model all run all steps."""
    ids = _varied_tokens(min(_LONG_TRIAL_TOKENS, engine.info.max_model_len), engine.info)
    alone = _logits_in_parts(engine, ids, _ALONE_TOKENS, _ALONE_TOKENS, max_num_seqs)
    differ = []
    for num_rows in _CROWDED_ROWS:
        # One less than there are rows, so that no two stand at the same place in their steps.
        crowded = _logits_in_parts(engine, ids, num_rows - 1, num_rows, max_num_seqs)
        if not torch.equal(crowded, alone):
            differ.append(num_rows)
    return min(differ, default=None)


def _logits_in_parts(
    engine: Engine, ids: tuple[int, ...], part: int, num_rows: int, max_num_seqs: int
) -> Tensor:
    """Logits [T, V] of `ids`, run in such parts, each behind as many other tokens as make up
    `num_rows`, if there is room."""
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
    """New sequences of so many tokens together, or of as many as they take."""
    steps: list[SequenceStep] = []
    while num_tokens > 0 and len(steps) < num_sequences:
        ids = _varied_tokens(min(num_tokens, info.max_model_len), info)
        steps.append(SequenceStep(f"other-{len(steps)}", ids, 1))
        num_tokens -= len(ids)
    return steps
