"""Decides whether a paged engine can run a model, by the model's configuration and by a self-check.

For each token, a layer of the model may keep one key and one value and nothing else. The logits of
a sequence must not depend on the other sequences of a step. The self-check runs the same tokens as
two sequences: the first in one step, the second in two steps. Up to rounding, both sequences must
have the logits that the model's own dense attention yields. A deterministic engine must also yield
bit-equal logits in steps of several sizes (`dependent_at`).

Some numerics couple the rows of a step: one scale for the activations of all rows, or a matrix
product whose rounding depends on how many rows an expert gets. Then a token's logits depend on the
tokens after it. Such models can run, but `row_coupling` finds them."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.interfaces.engine import DraftingEngine, Engine, ModelInfo, SequenceStep
from outrider.kv_cache.attention import set_attention

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layers of these kinds keep one key and one value for each token, and nothing else."""
SELF_CHECK_SEQUENCES = 2
_CHECK_TOKENS = 37  # more than a page of any engine
_CHECK_CHUNK = 29
"""The first step of the self-check runs this many tokens of one sequence. The second step runs all
other tokens of both sequences."""
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.2  # for dtypes of 16 bits
"""The largest allowed relative difference between two results of the self-check. Rounding makes
smaller differences. Attention to wrong cache slots or positions makes a difference of about 1."""
_LONG_CHECK_TOKENS = 136
"""The length of the sequence in `dependent_at`. A deterministic engine divides the cache slots of
such a long sequence into several splits (`SPLIT_SLOTS`)."""
_COUPLING_PREFIX = 5
"""The number of tokens that `row_coupling` runs before its steps. They include the first token of a
text, whose activations are the largest in many models, and would hide those of other tokens."""
_NOISE_FACTOR = 4
"""If even steps with the same input differ, steps with other input must differ by more than this
factor times as much to show a coupling."""
_ALONE_TOKENS = 5  # number of tokens in a step that runs one sequence alone
_CROWDED_ROWS = (8, 16, 32, 64, 128, 256, 512)  # numbers of tokens in steps with other sequences
CROWD_SLOTS = 1024
"""Slots of the cache for `dependent_at`. The sequences of the largest step fit into these slots,
even if the last page of each sequence is partly empty."""
_Model = Any


def check_supported(module: _Model, info: ModelInfo) -> None:
    """Raises `ConfigError` if the configuration shows that the model cannot run."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    recurrent = getattr(module, "_is_stateful", False)
    if kinds or recurrent or getattr(module.config, "is_encoder_decoder", False):
        kind = ", ".join(sorted(kinds)) or ("recurrent state" if recurrent else "encoder-decoder")
        raise ConfigError(
            f"its state ({kind}) cannot be rolled back to an earlier token; "
            "only decoders made of attention layers can be served"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError("some of its layers read the keys and values of other layers")
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise ConfigError("it does not take the positions of its tokens (position_ids)")
    limit = _unscaled_length(config)
    if limit is not None and info.max_model_len > limit:
        raise ConfigError(
            f"beyond {limit} tokens its rotary embedding (longrope) depends on the other sequences "
            f"of a step; give a --max-model-len of {limit} or less"
        )


def _unscaled_length(config: Any) -> int | None:
    """Returns the length up to which the rotary embedding `longrope` has fixed frequencies. Returns
    None for other rotary embeddings."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    lengths = [
        int(rope["original_max_position_embeddings"])
        for rope in by_layer
        if rope.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def self_check_tokens(info: ModelInfo) -> tuple[int, ...]:
    """The tokens of the self-check."""
    return _varied_tokens(min(_CHECK_TOKENS, info.max_model_len), info)


def _varied_tokens(num: int, info: ModelInfo) -> tuple[int, ...]:
    return tuple((7919 * i + 1) % info.vocab_size for i in range(num))


def dense_logits(module: _Model, token_ids: Sequence[int]) -> Tensor:
    """Returns the logits [T, V] of the module's own dense attention, without a cache. Afterwards
    the module is set to dense attention."""
    set_attention(module, "eager")
    with torch.inference_mode():
        ids = torch.tensor([token_ids], device=next(module.parameters()).device)
        logits: Tensor = module(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return logits


def check_answers(engine: Engine, expected: Tensor) -> None:
    """Runs the self-check. Raises `ConfigError` if the logits differ from `expected` [T, V]."""
    ids = self_check_tokens(engine.info)
    chunk = min(_CHECK_CHUNK, len(ids) - 1)
    whole, rest = SequenceStep("whole", ids, len(ids)), len(ids) - chunk
    first = engine.forward([SequenceStep("chunks", ids[:chunk], chunk)]) if chunk else []
    last, other = engine.forward([SequenceStep("chunks", ids[chunk:], rest), whole])
    if expected.shape[-1] == 0:
        return  # Only the leader of several ranks has logits.
    for answer in (torch.cat([*first, last]), other):
        _check_close(answer, expected, "logits")


def check_features(engine: DraftingEngine, expected: Tensor) -> None:
    """Raises `ConfigError` if the features of the self-check's last sequence differ from `expected`
    [T, D]. Call this right after `check_answers`."""
    _check_close(engine.features()[-1], expected, "features")


def _check_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compares the norms of whole tensors, because in 16 bits a single row may differ much."""
    exact = expected.double()
    difference = (actual.double() - exact).norm() / exact.norm()
    tolerance = _TOLERANCES.get(expected.dtype, _HALF_TOLERANCE)
    if not difference <= tolerance:  # Also true if the difference is NaN.
        raise ConfigError(
            f"its {what} with a paged cache differ from the expected {what} by {difference:.2g} of "
            f"their norm; {tolerance:g} is allowed"
        )


def row_coupling(engine: Engine) -> float:
    """Returns by how much a token's logits depend on the tokens after it in the same step, or 0 if
    not at all. This is the norm of the difference between its logits in two steps with different
    later tokens, divided by the norm of the logits.

    Both steps have the same shapes, so kernels that compute each row by itself yield the same bits.
    A third step, equal to the first, shows whether the kernels always yield the same bits. All
    ranks of a model must make this call. Ranks without logits return 0. Afterwards the engine holds
    no sequence."""
    info = engine.info
    ids = self_check_tokens(info)
    prefix = min(_COUPLING_PREFIX, len(ids) - 2)
    if prefix < 1 or info.vocab_size < 2:
        return 0.0  # Too short for a token and a later token.
    tail = ids[prefix:]
    shift = info.vocab_size // 2
    others = (tail[0], *((token_id + shift) % info.vocab_size for token_id in tail[1:]))
    engine.forward([SequenceStep("self-check", ids[:prefix], 1)])
    rows = []
    for tokens in (tail, others, tail):
        [logits] = engine.forward([SequenceStep("self-check", tokens, len(tokens))])
        rows.append(logits[0].to(torch.float64, copy=True))
        engine.keep("self-check", prefix)
    engine.release("self-check")
    first, other, again = rows
    changed, noise = float((other - first).norm()), float((again - first).norm())
    if not changed > _NOISE_FACTOR * noise:
        return 0.0
    return changed / max(float(first.norm()), float(other.norm()))


def dependent_at(engine: Engine, max_num_seqs: int) -> int | None:
    """Runs a sequence alone, and then again in steps with other sequences. Compares its logits.
    Returns the number of tokens of the smallest step in which any bit differs, or None if no bit
    differs. Runs all steps even after a difference, because all ranks of a model must run the same
    steps. Afterwards the engine holds no sequence."""
    ids = _varied_tokens(min(_LONG_CHECK_TOKENS, engine.info.max_model_len), engine.info)
    alone = _logits_in_parts(engine, ids, _ALONE_TOKENS, _ALONE_TOKENS, max_num_seqs)
    differ = []
    for num_rows in _CROWDED_ROWS:
        # Each part leaves room for at least one token of another sequence.
        crowded = _logits_in_parts(engine, ids, num_rows - 1, num_rows, max_num_seqs)
        if not torch.equal(crowded, alone):
            differ.append(num_rows)
    return min(differ, default=None)


def _logits_in_parts(
    engine: Engine, ids: tuple[int, ...], part: int, num_rows: int, max_num_seqs: int
) -> Tensor:
    """Runs `ids` in parts of `part` tokens, one part in each step, and returns the logits [T, V].
    Other sequences precede the part, and fill the step up to `num_rows` tokens. If the engine has
    too few pages for these sequences, the part runs alone."""
    rows = []
    for start in range(0, len(ids), part):
        chunk = ids[start : start + part]
        own = SequenceStep("self-check", chunk, len(chunk))
        others = _filler_steps(engine.info, num_rows - len(chunk), max_num_seqs - 1)
        if not engine.can_hold([*others, own]):
            others = []
        rows.append(engine.forward([*others, own])[-1])
        for other in others:
            engine.release(other.sequence_id)
    engine.release("self-check")
    return torch.cat(rows)


def _filler_steps(info: ModelInfo, num_tokens: int, num_sequences: int) -> list[SequenceStep]:
    steps: list[SequenceStep] = []
    while num_tokens > 0 and len(steps) < num_sequences:
        ids = _varied_tokens(min(num_tokens, info.max_model_len), info)
        steps.append(SequenceStep(f"other-{len(steps)}", ids, 1))
        num_tokens -= len(ids)
    return steps
