"""Checkpoints quantised by the rules of their formats, compared with the weights they mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from outrider.interfaces.engine import SequenceStep
from outrider.models.eagle3 import load_eagle3
from outrider.models.student import target_ends
from tests.support.models import save_tiny_eagle3
from tests.support.vllm_models import MakeEngine, save

GROUP = 32
BITS = 4
BLOCK = 128
TOLERANCE = 0.2
"""Share of the norm of the logits by which bfloat16 and rounded activations may change them."""
Stored = dict[str, Tensor]


def by_gptq(weight: Tensor) -> tuple[Stored, Tensor]:
    """Four bits in groups of inputs, packed along the inputs."""
    rows, scale = _in_groups(weight)
    packed = _packed(rows.T.contiguous().view(-1, 8, len(weight)).movedim(1, 2), range(8))
    zeros = torch.full((len(scale), len(weight) // 8), 0x77777777, dtype=torch.int32)
    order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    stored = {"qweight": packed, "qzeros": zeros, "scales": scale.half(), "g_idx": order}
    return stored, _of_groups(rows, scale)


def by_awq(weight: Tensor) -> tuple[Stored, Tensor]:
    """Four bits in groups of inputs, packed along the outputs in AWQ's order."""
    rows, scale = _in_groups(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = _packed(rows.T.contiguous().view(weight.shape[1], -1, 8), order)
    zeros = torch.full((len(scale), len(weight) // 8), 0x88888888 - 2**32, dtype=torch.int32)
    return {"qweight": packed, "qzeros": zeros, "scales": scale.half()}, _of_groups(rows, scale)


def by_compressed_tensors(weight: Tensor) -> tuple[Stored, Tensor]:
    """Eight bits, and one scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    rows = (weight / scale).round().to(torch.int8)
    return {"weight": rows, "weight_scale": scale.bfloat16()}, rows * scale.bfloat16().float()


def by_fp8(weight: Tensor) -> tuple[Stored, Tensor]:
    """Float8, and one scale for each block of a matrix."""
    whole = functional.pad(weight, (0, -weight.shape[1] % BLOCK, 0, -len(weight) % BLOCK))
    blocks = whole.view(len(whole) // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    wide = scale.repeat_interleave(BLOCK, 0)[: len(weight)]
    wide = wide.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    rows = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": rows, "weight_scale_inv": scale}, rows.float() * wide


def _in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers 0 to 15 [out, in], of which 8 stands for zero, and scales [groups, out]."""
    grouped = weight.view(len(weight), -1, GROUP)
    scale = (grouped.abs().amax(2) / 7).half().float()
    rows = (grouped / scale.unsqueeze(2)).round().clamp(-8, 7) + 8
    return rows.view_as(weight).to(torch.int64), scale.T.contiguous()


def _of_groups(rows: Tensor, scale: Tensor) -> Tensor:
    return (rows - 8) * scale.T.repeat_interleave(GROUP, 1)


def _packed(numbers: Tensor, order: Any) -> Tensor:
    """Packs integers of four bits [.., 8] into an int32, `order[i]` at the i-th place."""
    total = sum(numbers[..., source] << (BITS * place) for place, source in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


INT8 = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {
        "num_bits": 8,
        "type": "int",
        "strategy": "token",
        "symmetric": True,
        "dynamic": True,
    },
}
KINDS: dict[str, tuple[Callable[[Tensor], tuple[Stored, Tensor]], dict[str, Any]]] = {
    "gptq": (by_gptq, {"bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (by_awq, {"bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "compressed-tensors": (
        by_compressed_tensors,
        {"format": "int-quantized", "config_groups": {"0": INT8}, "ignore": ["lm_head"]},
    ),
    "fp8": (by_fp8, {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_runs(kind: str, tmp_path: Path, make_engine: MakeEngine) -> None:
    """A head that was made for the checkpoint reads its layers."""
    if kind == "fp8" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM runs float8 on processors with AMX alone")
    quantise, settings = KINDS[kind]
    module = save("llama", tmp_path, hidden_size=128, intermediate_size=256)
    save_tiny_eagle3(tmp_path / "head", tmp_path, range(64))
    stored: Stored = {}
    for name, parameter in module.state_dict().items():
        path = name.rpartition(".")[0]
        if isinstance(module.get_submodule(path), nn.Linear) and path != "lm_head":
            parts, meant = quantise(parameter)
            stored |= {f"{path}.{part}": values for part, values in parts.items()}
            parameter.copy_(meant)
        else:
            stored[name] = parameter.bfloat16()
            parameter.copy_(parameter.bfloat16())
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text("utf-8"))
    written |= {"dtype": "bfloat16", "quantization_config": settings | {"quant_method": kind}}
    (tmp_path / "config.json").write_text(json.dumps(written), "utf-8")
    ends = target_ends(tmp_path, drafter="head", name="tiny", dtype="bfloat16")
    head = load_eagle3(tmp_path / "head", ends, name="head", target_name="tiny")
    engine = make_engine(
        tmp_path, dtype="bfloat16", draft_layer=head, draft_check=lambda loaded, *_: loaded
    )
    ids = tuple(7 * place % 64 for place in range(50))
    [found] = engine.forward([SequenceStep("a", ids, 50)])
    with torch.inference_mode():
        output = module(input_ids=torch.tensor([ids]), output_hidden_states=True)
        taps = torch.cat([output.hidden_states[layer] for layer in head.module.layer_ids], -1)
        features = head.module.float().fuse(taps[0])
    for ours, expected in ((found, output.logits[0]), (engine.features()[0], features)):
        assert (ours - expected).norm() <= TOLERANCE * expected.norm()
