"""Models that cannot be run on pages are refused, each with its reason, before they serve."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError
from outrider.interfaces.engine import ModelInfo
from outrider.models.compatibility import check_features, row_coupling
from outrider.models.module_replacement import speed_up
from tests.support.models import tiny_config, tiny_module
from tests.support.paged_engines import (
    FAMILIES,
    VOCAB,
    WIDE,
    EngineMaker,
    checked_engines,
    dense,
    gap,
    ids,
    pace_kernels,
    run,
)

SIZES = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def refused(module: Any, reason: str, max_model_len: int = 128) -> None:
    with pytest.raises(ConfigError, match=f"^model tiny: .*{reason}"):
        EngineMaker()(module.eval(), max_model_len=max_model_len)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "num_local_experts": 1}


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("Mamba", {"hidden_size": 16, "state_size": 4}, "cannot be rolled back"),
        ("GPTJ", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, "cannot be replaced"),
        ("Bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}, "the positions of its tokens"),
        ("GptOss", {**SMALL, **EXPERTS, "num_experts_per_tok": 1}, "s_aux"),
        (
            "Llama4Text",
            {
                **SMALL,
                **EXPERTS,
                "intermediate_size_mlp": 16,
                "attention_chunk_size": 8,
                "layer_types": ["chunked_attention"],
            },
            "neither causal nor a sliding window",
        ),
    ],
)
def test_other_attention_is_refused(name: str, sizes: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    refused(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), reason)


def test_one_layer_without_keys_and_values() -> None:
    module = tiny_module(tiny_config("qwen3", VOCAB))
    module.config.layer_types = ["full_attention", "linear_attention"]
    refused(module, "linear_attention")


def test_a_scale_of_positions_that_depends_on_the_batch() -> None:
    """longrope has one set of frequencies up to a length and another beyond it, for all tokens of a
    step. So the model may run up to that length only."""
    config = tiny_config("llama", VOCAB, 128)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **factors,
    }
    refused(tiny_module(config), "--max-model-len of 32")
    module = tiny_module(config, dtype=torch.float64)
    with checked_engines() as make_engine:
        expected = dense(module, ids(32))
        assert gap(run(make_engine(module, max_model_len=32), "s", ids(32), 32), expected) < 1e-5


def test_a_layer_that_runs_twice() -> None:
    """The second run would overwrite the keys of the first."""
    module = tiny_module(tiny_config("llama", VOCAB))
    module.model.layers[1] = module.model.layers[0]
    refused(module, "runs twice")


def test_a_model_that_does_not_heed_positions() -> None:
    """Its configuration does not show it, but it answers wrongly when a text is run in parts."""
    module = tiny_module(tiny_config("llama", VOCAB))
    rotary = module.model.rotary_emb.forward

    def counted(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return rotary(states, torch.arange(position_ids.shape[1])[None])

    module.model.rotary_emb.forward = counted
    refused(module, "with a paged cache differ from the expected logits by")


def test_features_may_differ_in_one_row_as_half_precision_has_it_and_not_in_many() -> None:
    expected = torch.randn((21, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    found = expected.clone()
    found[1] *= 1.5
    check_features(Mock(features=lambda: [found]), expected)
    with pytest.raises(
        ConfigError, match=r"differ from the expected features by 0.5 of their norm; 0.2 is allowed"
    ):
        check_features(Mock(features=lambda: [1.5 * expected]), expected)


class Quantised(nn.Module):
    """A linear layer whose input is rounded to 8 bits at each call, with one scale for all rows or
    with one for each row."""

    def __init__(self, linear: Any, per_row: bool) -> None:
        super().__init__()
        self.linear, self.per_row = linear, per_row

    def forward(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(-1, keepdim=True) if self.per_row else rows.abs().max()
        scale = largest / 127
        return self.linear((rows / scale).round() * scale)


class Experts(nn.Module):
    """A mixture of experts, which multiplies each row by itself, or all rows of an expert at once,
    with a rounding that depends on their number."""

    def __init__(self, linear: Any, per_row: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList([linear, linear])
        self.per_row = per_row

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.view(-1, rows.shape[-1])
        chosen = (flat.sum(-1) > 0).long()
        found = flat.new_empty(len(flat), self.experts[0].out_features)
        for index, expert in enumerate(self.experts):
            for row in range(len(flat)):
                if chosen[row] == index:
                    found[row] = expert(flat[row : row + 1])[0]
            if not self.per_row:
                found[chosen == index] *= 1 + 2**-20 * int((chosen == index).sum())
        return found.view(*rows.shape[:-1], -1)


@pytest.mark.parametrize("kind", [Quantised, Experts])
@pytest.mark.parametrize("per_row", [False, True])
def test_layers_that_couple_rows_are_found(kind: Any, per_row: bool) -> None:
    """Those that compute each row by itself are not."""
    # In 16 bits, the engine's trial allows the differences that a common scale makes.
    dtype = torch.bfloat16 if kind is Quantised else torch.float32
    module = tiny_module(tiny_config("llama", VOCAB), dtype=dtype)
    mlp = module.model.layers[0].mlp
    mlp.down_proj = kind(mlp.down_proj, per_row)
    engine = EngineMaker()(module)
    found = row_coupling(engine)
    assert engine.page_counts().num_free + engine.page_counts().num_evictable == (
        engine.page_counts().num_pages
    )
    if per_row:
        assert found == 0
    else:
        assert (1e-3 if kind is Quantised else 1e-8) < found < 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_models_couple_no_rows(family: str, dtype: torch.dtype) -> None:
    module = tiny_module(tiny_config(family, VOCAB), dtype=dtype)
    speed_up(module)
    assert row_coupling(EngineMaker()(module)) == 0


def test_fused_kernels_couple_no_rows() -> None:
    kernels = pace_kernels()
    module = tiny_module(tiny_config("llama", VOCAB, **WIDE), dtype=torch.bfloat16)
    speed_up(module, kernels=kernels)
    info = ModelInfo("tiny", VOCAB, 128, "bfloat16", (), "", "")
    engine = PagedEngine(module, info, kernels=kernels)
    assert engine.kernels_name
    assert row_coupling(engine) == 0


class Noisy:
    """An engine whose logits differ from call to call by `noise` in each entry, and depend on the
    last token by up to `coupled`."""

    info = ModelInfo("noisy", VOCAB, 64, "float32", (), "", "")

    def __init__(self, noise: float, coupled: float) -> None:
        self.noise, self.coupled = noise, coupled
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, steps: Any) -> list[Tensor]:
        [step] = steps
        rows = torch.ones(step.num_logits, 1000)
        rows += self.noise * torch.randn(rows.shape, generator=self.generator)
        return [rows + self.coupled * step.token_ids[-1] / VOCAB]

    def keep(self, _: str, length: int) -> int:
        return length

    def release(self, _: str) -> None:
        pass


@pytest.mark.parametrize(
    ("noise", "coupled", "expected"),
    [(0, 0, False), (0, 1e-6, True), (1e-3, 0, False), (1e-3, 0.02, True)],
)
def test_kernels_that_never_yield_the_same_bits_are_no_coupling(
    noise: float, coupled: float, expected: bool
) -> None:
    """The norms of two differences of noise in 1,000 entries are nearly equal."""
    assert (row_coupling(Noisy(noise, coupled)) > 0) is expected


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 4])
def test_too_short_a_length_is_no_coupling(max_model_len: int) -> None:
    module = tiny_module(tiny_config("llama", VOCAB))
    assert row_coupling(EngineMaker()(module, max_model_len=max_model_len)) == 0
