"""Which models run on fused kernels, and whether their rows depend on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import tiny_config, tiny_module, twin
from paged_engines import VOCAB, checked_engines, dense, gap, ids, run
from reference_kernels import ReferenceKernels
from transformers.activations import ACT2FN

from outrider.engine.attention import find_layers
from outrider.engine.cpu.decoder import CannotFuse, FusedDecoder, _activation, fused_decoder
from outrider.engine.cpu.fused_steps import SpanLimits, find_span_limits
from outrider.engine.cpu.kernels import KernelsUnavailable, Spans, load_pace
from outrider.engine.interface import SequenceStep
from outrider.kv_cache.storage import BlockedKeysAndValues
from outrider.models.module_replacement import speed_up

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3")
MAX_MODEL_LEN = 256


def module_for(kernels: Any, family: str, **changes: Any) -> Any:
    config = tiny_config(family, VOCAB, MAX_MODEL_LEN)
    for name, value in changes.items():
        setattr(config, name, value)
    module = tiny_module(config, dtype=kernels.dtype)
    speed_up(module, kernels=kernels)
    return module


def decoder_of(kernels: Any, family: str, **changes: Any) -> FusedDecoder:
    module = module_for(kernels, family, **changes)
    return fused_decoder(module, find_layers(module, MAX_MODEL_LEN), MAX_MODEL_LEN, kernels)


@pytest.mark.parametrize("family", FUSED)
def test_the_llama_family_is_fused(family: str) -> None:
    module = tiny_module(tiny_config(family, VOCAB), dtype=torch.float64)
    with checked_engines(fused=True) as make_engine:
        engine = make_engine(module)
        assert engine.kernels_name == ReferenceKernels.name
        assert gap(run(engine, "s", ids(40), 40), dense(twin(module), ids(40))) <= 1e-10


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {}, "its head"),
        ("gpt_neox", {}, "not those of a Llama"),
        ("gpt2", {}, "not those of a Llama"),
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


@pytest.mark.parametrize(
    ("dtype", "activation", "name"),
    [
        (torch.bfloat16, "silu", "silu"),
        (torch.bfloat16, "gelu", "gelu"),
        (torch.bfloat16, "gelu_pytorch_tanh", "gelu"),
        (torch.bfloat16, "quick_gelu", None),
        (torch.bfloat16, "relu", None),
        (torch.float32, "gelu_pytorch_tanh", None),
    ],
)
def test_activations_are_told_apart(dtype: torch.dtype, activation: str, name: str | None) -> None:
    assert _activation(ACT2FN[activation], ReferenceKernels(dtype)) == name


def test_a_layer_that_was_not_replaced_is_refused() -> None:
    kernels = ReferenceKernels(torch.float32)
    module = module_for(kernels, "llama")
    module.model.layers[1].mlp = torch.nn.Identity()
    with pytest.raises(CannotFuse, match="MLP of another build, Identity"):
        fused_decoder(module, find_layers(module, MAX_MODEL_LEN), MAX_MODEL_LEN, kernels)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_spans_are_limited_where_attention_depends_on_them(family: str) -> None:
    """Attention whose sums change with spans of more than 8 tokens beyond 128."""

    class Tiled(ReferenceKernels):
        def attend(
            self, query: torch.Tensor, cache: Any, spans: Spans, *given: Any
        ) -> torch.Tensor:
            output = super().attend(query, cache, spans, *given)
            sizes = spans.starts.diff()
            tiled = (sizes > 8) & (spans.ends > 128)
            return output + output * tiled.repeat_interleave(sizes.long())[:, None, None] / 64

    assert find_limits(decoder_of(ReferenceKernels(torch.bfloat16), family)) == SpanLimits(
        (128, 256), (64, 64)
    )
    assert find_limits(decoder_of(Tiled(torch.bfloat16), family)) == SpanLimits((128, 256), (64, 8))


def find_limits(decoder: FusedDecoder) -> SpanLimits | None:
    return find_span_limits(decoder, 16, MAX_MODEL_LEN, [1])


@pytest.mark.parametrize("operator", ["linear", "norm", "rotate", "attend"])
def test_rows_that_depend_on_others_are_found(operator: str) -> None:
    """An operator that rounds otherwise where there are more than 4 rows."""
    kernels = ReferenceKernels(torch.bfloat16)
    decoder = decoder_of(kernels, "qwen3")
    assert find_limits(decoder) is not None
    whole = getattr(kernels, operator)

    def dependent(rows: torch.Tensor, *given: Any) -> Any:
        found = whole(rows, *given)
        many = (rows.shape[0] if operator == "attend" else rows.shape[1]) > 4
        first = found[0] if isinstance(found, tuple) else found
        changed = first * (1 + many / 64)
        return (changed, *found[1:]) if isinstance(found, tuple) else changed

    if operator == "linear":  # whose products the decoder has bound
        decoder = decoder_of(_patched(operator, dependent), "qwen3")
    else:
        setattr(kernels, operator, dependent)
    assert find_limits(decoder) is None


def _patched(operator: str, function: Any) -> ReferenceKernels:
    kernels = ReferenceKernels(torch.bfloat16)
    setattr(kernels, operator, function)
    return kernels


def test_size_of_a_span() -> None:
    limits = SpanLimits((128, 256), (64, 8))
    begins = ((0, 100), (60, 64), (100, 20), (120, 20), (128, 1), (250, 20), (256, 9))
    assert [limits.size(*begin) for begin in begins] == [64, 64, 20, 8, 1, 6, 1]


def test_a_cache_in_blocks_copies_pages_and_slots() -> None:
    kernels = ReferenceKernels(torch.float32)
    decoder = decoder_of(kernels, "llama")
    layer = decoder.layers[0]
    module = module_for(kernels, "llama")
    shape = find_layers(module, MAX_MODEL_LEN)[0].shape
    cache = BlockedKeysAndValues(shape, 4, 16)
    states = torch.arange(64.0)[:, None, None].expand(64, layer.heads[1], layer.width)
    kernels.write(cache, torch.arange(64), states, -states)
    cache.copy(torch.tensor([1]), torch.tensor([3]), 16)
    cache.copy(torch.tensor([5, 6]), torch.tensor([6, 40]), 1)
    keys, values = kernels._gathered(cache, torch.arange(4))
    expected = [*range(5), 5, 5, *range(7, 40), 6, *range(41, 48), *range(16, 32)]
    assert keys[0, :, 0].tolist() == expected
    assert (-values[1, :, 3]).tolist() == expected


def test_pages_of_another_size_run_as_the_library_does() -> None:
    module = tiny_module(tiny_config("llama", VOCAB))
    with checked_engines(fused=True) as make_engine:
        engine = make_engine(module, page_size=5)
        assert not engine.kernels_name
        engine.forward([SequenceStep("s", ids(9), 1)])


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_pace.cache_clear()
    has_all = {"avx512_f": True, "avx512_bf16": True}
    try:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
        with pytest.raises(KernelsUnavailable, match="no AVX-512 BF16"):
            load_pace()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has_all)
        monkeypatch.setattr("outrider.engine.cpu.kernels.PACKAGE", "no-such-package")
        with pytest.raises(KernelsUnavailable, match="no-such-package is not installed"):
            load_pace()
        monkeypatch.setattr("outrider.engine.cpu.kernels.PACKAGE", "torch")
        with pytest.raises(KernelsUnavailable, match=r"torch .* is installed, not"):
            load_pace()
        monkeypatch.setattr("outrider.engine.cpu.kernels.VERSION", str(torch.__version__))
        monkeypatch.setattr("outrider.engine.cpu.kernels.TORCH_VERSION", "1.0")
        with pytest.raises(KernelsUnavailable, match=r"is built for torch 1\.0; this is"):
            load_pace()
        monkeypatch.setattr("outrider.engine.cpu.kernels._LIBRARY", "no-such-library.so")
        version = ".".join(torch.__version__.split(".")[:2])
        monkeypatch.setattr("outrider.engine.cpu.kernels.TORCH_VERSION", version)
        with pytest.raises(KernelsUnavailable, match="library cannot be loaded"):
            load_pace()
    finally:
        load_pace.cache_clear()
