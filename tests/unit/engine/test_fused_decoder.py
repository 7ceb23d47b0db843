"""Which models do not run on fused kernels, whether rows depend on others, and what TorchScript
computes."""

from typing import Any

import pytest
import torch

from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.cpu import fused_decoder
from outrider.interfaces.engine import SequenceStep
from outrider.kernels import processor
from outrider.kernels.cpu import KernelsUnavailable, load_pace
from outrider.kv_cache.attention import find_layers
from outrider.kv_cache.storage import KVCache, LayerShape
from outrider.limits import PAGE_SIZE
from outrider.models.decoder_parts import CannotFuse, DecoderParts
from outrider.models.module_replacement import speed_up
from tests.support.models import tiny_config, tiny_module
from tests.support.paged_engines import VOCAB, WIDE, ids, pace_kernels
from tests.support.reference_kernels import ReferenceKernels, ReferenceLayers

MAX_MODEL_LEN = 256


def decoder_of(kernels: Any, family: str, **changes: Any) -> fused_decoder.FusedDecoder:
    module = tiny_module(tiny_config(family, VOCAB, MAX_MODEL_LEN, **changes), dtype=kernels.dtype)
    speed_up(module, kernels=kernels)
    parts = DecoderParts(module, find_layers(module, MAX_MODEL_LEN), MAX_MODEL_LEN)
    return fused_decoder.FusedDecoder(parts, kernels, MAX_MODEL_LEN, [1])


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {}, "its LM head"),
        ("gpt_neox", {}, "not those of a Llama"),
        ("gpt2", {}, "not those of a Llama"),
        ("llama", {"hidden_act": "relu"}, "an unsupported activation"),
        ("llama", {"mlp_bias": True}, "MLP has a bias"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "depend on the length",
        ),
    ],
)
def test_others_are_refused_by_name(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CannotFuse, match=reason):
        decoder_of(ReferenceKernels(torch.float32), family, **changes)


@pytest.mark.parametrize("operator", ["linear", "norm", "rotate", "mlp", "attend"])
def test_rows_that_depend_on_others_are_found(operator: str) -> None:
    """The planted operator rounds differently with more than 4 rows."""

    def dependent(self: Any, *given: Any) -> Any:
        found = getattr(ReferenceLayers, operator)(self, *given)
        rows = given[1] if operator == "attend" else given[0][0]
        for changed in [given[4]] if operator == "attend" else found:
            changed.mul_(1 + (len(rows) > 4) / 64)
        return found

    layers = type("Dependent", (ReferenceLayers,), {operator: dependent})
    decoder = decoder_of(ReferenceKernels(torch.bfloat16, layers), "qwen3")
    assert not decoder.rows_are_equal


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_pace.cache_clear()
    try:
        monkeypatch.setattr(processor, "has_bfloat16", lambda: False)
        with pytest.raises(KernelsUnavailable, match="no AVX-512 BF16"):
            load_pace()
        monkeypatch.setattr(processor, "has_bfloat16", lambda: True)
        monkeypatch.setattr("outrider.kernels.cpu.PACKAGE", "no-such-package")
        with pytest.raises(KernelsUnavailable, match="no-such-package is not installed"):
            load_pace()
    finally:
        load_pace.cache_clear()


@torch.inference_mode()
def outputs(steps: fused_decoder.FusedSteps) -> list[torch.Tensor]:
    """Outputs of steps of one and of two sequences, most of them of different lengths, some of them
    longer than a span."""
    first, second = [3, 1, 5], [0, 4, 2]

    def held(name: str, num: int, length: int, pages: list[int]) -> HeldSequence:
        return HeldSequence(SequenceStep(name, ids(num, length), num), length, pages)

    run = [
        [held("a", 20, 0, first), held("b", 30, 0, second)],
        [held("a", 5, 20, first)],
        [held("a", 1, 25, first), held("b", 1, 30, second)],
        [held("a", 3, 26, first), held("b", 1 + fused_decoder.SPAN_TOKENS_MAX, 31, second)],
    ]
    return [steps.run(HeldStep(sequences, PAGE_SIZE)) for sequences in run]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_one_call_of_torchscript_is_what_operators_make_one_by_one(family: str) -> None:
    """Bit for bit. Layers have windows, a bias, norms of queries and keys, or four norms."""
    decoder = decoder_of(pace_kernels(), family, **WIDE)
    shape = LayerShape(1, 64, 64, torch.bfloat16, torch.device("cpu"))
    caches = KVCache([shape] * len(decoder.layers.weights), 8, PAGE_SIZE, is_blocked=True).layers
    steps = fused_decoder.FusedSteps(decoder, caches)
    at_once = outputs(steps)
    written = [torch.cat([cache.keys, cache.values]) for cache in caches]
    assert [row.isfinite().all() for row in at_once] == [True] * 4
    for cache in caches:
        cache.keys.zero_()
        cache.values.zero_()
    steps._layers = decoder.layers
    for mine, theirs in zip(at_once, outputs(steps), strict=True):
        assert torch.equal(mine, theirs)
    for cache, before in zip(caches, written, strict=True):
        assert torch.equal(torch.cat([cache.keys, cache.values]), before)
