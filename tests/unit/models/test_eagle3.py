"""EAGLE-3 heads: what they compute, and how their files are read and written."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models import eagle3
from outrider.models.student import target_ends
from tests.support.models import as_raw, tiny_config, tiny_eagle3, tiny_module

VOCAB = 32
DRAFT_IDS = (1, 4, 5, 9, 20, 21, 30)
EPS = 1e-5
THETA = 500.0


@pytest.fixture
def target() -> Any:
    return tiny_module(tiny_config("llama", VOCAB, num_hidden_layers=8))


def tiny_head(target: Any, **changes: Any) -> eagle3.Eagle3Head:
    """A random head with another width than its target's, and grouped heads."""
    layer = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 16,
    } | changes.pop("layer", {})
    config = eagle3.Eagle3Config(
        layer=eagle3.Eagle3LayerConfig(**layer),
        draft_vocab_size=len(DRAFT_IDS),
        layer_ids=changes.pop("layer_ids", (0, 2, 5)),
        target_width=target.config.hidden_size,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = eagle3.Eagle3Head(config).requires_grad_(False).eval()
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return head


def save(directory: Path, head: eagle3.Eagle3Head, token_ids: Sequence[int] = DRAFT_IDS) -> Path:
    eagle3.save_speculators(
        directory,
        head,
        token_ids,
        target_name="tiny",
        architectures=["LlamaForCausalLM"],
        num_draft_tokens=3,
    )
    return directory


def load(directory: Path, target: Any) -> eagle3.LoadedEagle3:
    return eagle3.load_eagle3(directory, target, name="HEAD", target_name="TARGET")


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(vector: Tensor, position: int) -> Tensor:
    """The values as complex numbers, the i-th turned by position / THETA^(2i / E)."""
    half = len(vector) // 2
    turns = torch.polar(torch.ones(half), position * THETA ** (-torch.arange(half) / half))
    turned = torch.complex(vector[:half], vector[half:]) * turns
    return torch.cat([turned.real, turned.imag])


def hidden_by_definition(head: eagle3.Eagle3Head, pairs: list[tuple[Tensor, int, int]]) -> Tensor:
    """h of the last of the (feature, token, position), which attends to all of them."""
    config, weights = head.config, dict(head.named_parameters())

    def of(name: str) -> Tensor:
        return weights[f"layers.0.{name}.weight"]

    def heads(projection: str, x: Tensor, normed: str = "") -> Tensor:
        found = (of(f"self_attn.{projection}") @ x).view(-1, head.key_width)
        return norm(found, of(f"self_attn.{normed}")) if normed and config.qk_norm else found

    seen = []
    for feature, token_id, position in pairs:
        embedded = norm(weights["embed_tokens.weight"][token_id], of("input_layernorm"))
        normed = norm(feature, of("hidden_norm"))
        x = torch.cat([embedded, normed])
        queries = [turned(each, position) for each in heads("q_proj", x, "q_norm")]
        keys = [turned(each, position) for each in heads("k_proj", x, "k_norm")]
        seen.append((queries, keys, heads("v_proj", x)))
        residual = normed if config.norm_before_residual else feature
    mixed = []
    for index, query in enumerate(seen[-1][0]):
        group = index * head.num_kv_heads // head.config.layer.num_attention_heads
        scores = torch.stack([query @ keys[group] for _, keys, _ in seen])
        values = torch.stack([values[group] for *_, values in seen])
        mixed.append((scores / math.sqrt(head.key_width)).softmax(0) @ values)
    y = residual + of("self_attn.o_proj") @ torch.cat(mixed)
    z = norm(y, of("post_attention_layernorm"))
    inner = torch.nn.functional.silu(of("mlp.gate_proj") @ z) * (of("mlp.up_proj") @ z)
    return y + of("mlp.down_proj") @ inner


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"qk_norm": True, "layer": {"num_key_value_heads": 4}},
    ],
    ids=["plain", "normed", "qk"],
)
def test_chains_are_those_of_the_definition(target: Any, changes: dict[str, Any]) -> None:
    head = tiny_head(target, **changes)
    torch.manual_seed(0)
    features, tokens = torch.randn(2, 5, head.width), torch.randint(0, VOCAB, (2, 7))
    found = list(head.unroll(features, tokens, 3))
    for row in range(2):
        for start in range(5):
            pairs = [(features[row, i], int(tokens[row, i]), i) for i in range(start + 1)]
            for depth in range(3):
                hidden = hidden_by_definition(head, pairs)
                torch.testing.assert_close(found[depth][row, start], hidden, rtol=1e-4, atol=1e-4)
                normed = norm(hidden, head.norm.weight)
                logits = head.logits(found[depth][row, start])
                torch.testing.assert_close(logits, head.lm_head(normed), rtol=1e-4, atol=1e-4)
                place = start + depth + 1
                carried = normed if head.config.norm_output else hidden
                if depth < 2:
                    pairs.append((carried, int(tokens[row, place]), place))


@pytest.mark.parametrize("flag", ["", "fc_norm", "norm_before_fc"])
def test_taps_are_normed_as_the_files_say(flag: str, target: Any, tmp_path: Path) -> None:
    head = tiny_head(target, **({flag: True} if flag else {}))
    torch.manual_seed(0)
    taps = torch.randn(4, 3, target.config.hidden_size)
    normed = taps
    if head.fc_norm is not None:
        normed = norm(taps, torch.stack([each.weight for each in head.fc_norm]))
    elif head.input_norm is not None:
        normed = norm(taps.flatten(1), head.input_norm.weight)
    expected = normed.flatten(1) @ head.fc.weight.T
    loaded = load(save(tmp_path, head), target).module
    torch.testing.assert_close(loaded.fuse(taps.flatten(1)), expected, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_weight(target: Any) -> None:
    head = tiny_head(target).requires_grad_(True)
    features = head.fuse(torch.randn(1, 6, 3 * head.config.target_width))
    outputs = head.unroll(features, torch.randint(0, VOCAB, (1, 8)), 3)
    sum(head.logits(hidden).logsumexp(-1).sum() for hidden in outputs).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


def test_a_head_comes_back_as_it_was_saved(target: Any, tmp_path: Path) -> None:
    head = tiny_head(
        target,
        qk_norm=True,
        norm_before_residual=True,
        norm_output=True,
        layer={
            "hidden_size": 20,
            "num_attention_heads": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    )
    loaded = load(save(tmp_path, head), target)
    assert loaded.token_ids == DRAFT_IDS
    assert loaded.module.layer_ids == (0, 2, 5)
    assert loaded.module.state_dict().keys() == head.state_dict().keys()
    inputs = torch.randn(1, 5, head.width), torch.arange(6)[None]
    for found, expected in zip(
        loaded.module.unroll(*inputs, 2), head.unroll(*inputs, 2), strict=True
    ):
        assert torch.equal(found, expected)
        assert torch.equal(loaded.module.logits(found), head.logits(expected))
    bias = "layers.0.self_attn.o_proj.bias"
    assert loaded.module.get_parameter(bias).any()
    change_tensors(tmp_path, {bias: None})
    assert not load(tmp_path, target).module.get_parameter(bias).any()


def change(directory: Path, changes: dict[str, Any]) -> None:
    """Changes values of the configuration and of its layer's part; None removes a value."""
    file = directory / "config.json"
    stated = json.loads(file.read_text())
    layer = stated["transformer_layer_config"]
    for key, value in changes.items():
        absent = ("layer_types", "partial_rotary_factor", "sliding_window")
        place = layer if key in (*layer, *absent) else stated
        place[key] = value
        if value is None:
            del place[key]
    file.write_text(json.dumps(stated))


def change_tensors(directory: Path, changes: dict[str, Tensor | None]) -> None:
    """Changes tensors; None removes a tensor."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({key: one for key, one in tensors.items() if one is not None}, file)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}, (0, 3, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7)),
        ({"eagle_aux_hidden_state_layer_ids": []}, (2, 4, 5)),
        ({"target_layer_ids": [2, 3, 5]}, (2, 3, 5)),
    ],
)
def test_raw_files_are_read(
    stated: dict[str, Any], expected: tuple[int, ...], target: Any, tmp_path: Path
) -> None:
    head = tiny_head(target)
    as_raw(save(tmp_path, head), **stated)
    loaded = load(tmp_path, target)
    assert loaded.module.layer_ids == expected
    inputs = torch.randn(1, 5, head.width), torch.arange(5)[None], 1
    assert torch.equal(*(next(each.unroll(*inputs)) for each in (loaded.module, head)))


def test_rows_are_put_in_the_order_of_their_tokens(target: Any, tmp_path: Path) -> None:
    head = tiny_head(target)
    order = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    d2t = torch.tensor(DRAFT_IDS)[order] - torch.arange(len(order))
    change_tensors(save(tmp_path, head), {"lm_head.weight": head.lm_head.weight[order], "d2t": d2t})
    loaded = load(tmp_path, target)
    assert loaded.token_ids == DRAFT_IDS
    assert torch.equal(loaded.module.lm_head.weight, head.lm_head.weight)


def save_without_ends(directory: Path, target: Any) -> Path:
    """A head as wide as its target, without embeddings and a last matrix."""
    save(directory, tiny_head(target, layer={"hidden_size": target.config.hidden_size}))
    change_tensors(directory, {"embed_tokens.weight": None, "lm_head.weight": None})
    return directory


def test_what_is_not_stored_is_the_targets(target: Any, tmp_path: Path) -> None:
    save_without_ends(tmp_path, target)
    module = load(tmp_path, target).module
    assert module.embed_tokens.weight is target.get_input_embeddings().weight
    assert torch.equal(module.lm_head.weight, target.lm_head.weight[list(DRAFT_IDS)])


def test_ends_of_a_quantised_target_are_read_from_its_files(target: Any, tmp_path: Path) -> None:
    stored = {name: values.clone() for name, values in target.state_dict().items()}
    stored["model.layers.0.self_attn.q_proj.qweight"] = torch.zeros(4, dtype=torch.int32)
    head, place = save_without_ends(tmp_path / "head", target), tmp_path / "target"
    target.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    target.config.save_pretrained(place)

    def read(**changed: Tensor | None) -> Any:
        tensors = {key: values for key, values in (stored | changed).items() if values is not None}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        ends = target_ends(place, drafter="HEAD", name="TARGET")
        return eagle3.load_eagle3(head, ends, name="HEAD", target_name="TARGET").module

    assert torch.equal(read().embed_tokens.weight, stored["model.embed_tokens.weight"])
    float8 = stored["lm_head.weight"].to(torch.float8_e4m3fn)
    for changed, message in (
        ({"lm_head.weight": None, "lm_head.qweight": torch.zeros(2)}, "lack the weights lm_head"),
        ({"lm_head.weight": float8}, "files have lm_head.weight as torch.float8_e4m3fn"),
    ):
        with pytest.raises(ConfigError, match=f"^drafter HEAD: .* the target's .*{message}"):
            read(**changed)


def test_a_whole_vocabulary_needs_no_table(target: Any, tmp_path: Path) -> None:
    save(tmp_path, tiny_eagle3(target, range(VOCAB)).module, range(VOCAB))
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    assert load(tmp_path, target).token_ids == tuple(range(VOCAB))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is 0"),
        ({"head_dim": 4}, r"mismatch for layers.0.self_attn.q_proj.weight: .*\[16, 48\]"),
        ({"vocab_size": 33}, "vocab_size is 33"),
        ({"attention_bias": True}, r"Missing .*layers.0.self_attn.q_proj.bias"),
        ({"fc_norm": True}, "Missing .*fc_norm.0.weight"),
        ({"layer_types": ["sliding_attention"]}, "full_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.*llama3, yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "must be one entry"),
        ({"rope_scaling": "linear", "rope_parameters": None}, "cannot be loaded: 'str' object"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; only divisors of 4"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5; only 1 is supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1 is supported"),
        ({"sliding_window": 8}, "sliding_window is 8"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings"),
        ({"aux_hidden_state_layer_ids": "x", "eagle_aux_hidden_state_layer_ids": None}, " is 'x'"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 9]}, "of TARGET, from 0 to 7"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, r"mismatch for fc.weight: .*\[24, 64\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"fc.weight": None}, "lack the weights fc.weight"),
        ({"norm.weight": None}, "Missing .*norm.weight"),
        ({"norm.weight": torch.full((24,), torch.nan)}, "norm.weight is not finite"),
        ({"norm.weight": torch.ones(24, dtype=torch.int8)}, "norm.weight is stored as torch.int8"),
        ({"norm.weight": torch.ones(25)}, "mismatch for norm.weight"),
        ({"layers.1.x": torch.ones(1)}, "Unexpected .*layers.1.x"),
        ({"embed_tokens.weight": torch.ones(31, 24)}, r"embed_tokens.weight is \[31, 24\]"),
        ({"embed_tokens.weight": None}, r"mismatch for embed_tokens.weight: .*\[32, 32\]"),
        ({"d2t": torch.full((7,), 30)}, r"d2t: token range is \(30, 36\)"),
        ({"d2t": torch.tensor([0, 0, 0, 0, 0, 0, -1])}, "d2t: number of distinct tokens is 6"),
        ({"d2t": None}, r"lm_head.weight is \[7, 24\]; it needs 32 rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, target: Any, tmp_path: Path
) -> None:
    save(tmp_path, tiny_head(target))
    in_tensors = any(key == "d2t" or "." in key for key in changes)
    (change_tensors if in_tensors else change)(tmp_path, changes)
    with pytest.raises(ConfigError, match=f"drafter HEAD: .*{message}"):
        load(tmp_path, target)


def test_pickled_files_run_nothing(target: Any, tmp_path: Path) -> None:
    as_raw(save(tmp_path, tiny_head(target)))
    torch.save({"fc.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"drafter HEAD: .*cannot be read as plain tensors"):
        load(tmp_path, target)
