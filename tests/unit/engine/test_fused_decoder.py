"""Which models do not run on fused kernels, and whether rows depend on others."""

from typing import Any

import pytest
import torch
from models import tiny_config, tiny_module
from paged_engines import VOCAB
from reference_kernels import ReferenceKernels, ReferenceLayers

from outrider.engine.attention import find_layers
from outrider.engine.cpu.decoder import CannotFuse, FusedDecoder
from outrider.engine.cpu.fused_steps import find_span_tokens
from outrider.engine.cpu.kernels import KernelsUnavailable, load_pace
from outrider.models.module_replacement import speed_up

MAX_MODEL_LEN = 256


def decoder_of(kernels: Any, family: str, **changes: Any) -> FusedDecoder:
    module = tiny_module(tiny_config(family, VOCAB, MAX_MODEL_LEN, **changes), dtype=kernels.dtype)
    speed_up(module, kernels=kernels)
    return FusedDecoder(module, find_layers(module, MAX_MODEL_LEN), MAX_MODEL_LEN, kernels)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {}, "its head"),
        ("gpt_neox", {}, "not those of a Llama"),
        ("gpt2", {}, "not those of a Llama"),
        ("llama", {"hidden_act": "relu"}, "an activation of another kind"),
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
    assert find_span_tokens(decoder, MAX_MODEL_LEN, [1]) is None


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
    finally:
        load_pace.cache_clear()
