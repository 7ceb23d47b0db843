"""MTP layers on their target's pages, compared with their definition."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.module_replacement import speed_up
from outrider.models.mtp import check_mtp, load_mtp
from outrider.models.student import target_ends
from tests.support.models import save_tiny_model, twin
from tests.support.mtp_models import FAMILIES, MtpReference, mtp_target

VOCAB, LENGTH, DEPTHS = 32, 310, 3
INFO = ModelInfo("tiny", VOCAB, LENGTH, "float32", (), "w", "t")
LENGTHS = (1, 2, 15, 16, 17, 100, 300)
CLOSE = 2e-4  # allowed difference in float32, relative to a row's norm


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= CLOSE * expected.norm())


@pytest.fixture(params=FAMILIES)
def reference(request: pytest.FixtureRequest) -> MtpReference:
    return MtpReference(mtp_target(request.param, VOCAB, LENGTH))


@pytest.mark.parametrize(
    ("is_fast", "carries_normed", "is_apart"),
    [(False, True, False), (True, True, False), (False, False, False), (False, True, True)],
)
def test_chains_on_pages_are_those_of_the_definition(
    reference: MtpReference, is_fast: bool, carries_normed: bool, is_apart: bool, tmp_path: Path
) -> None:
    """Hidden states, logits and greedy tokens agree, for both ways to continue. The native engine
    refuses targets with linear attention, so for these the layer alone is run, without its target's
    module."""
    module = twin(reference.target)
    before = {key: values.clone() for key, values in module.state_dict().items()}
    loaded = load_mtp(reference.save(tmp_path), module, target_name="tiny")
    if is_apart:
        ends = target_ends(tmp_path, drafter="mtp", name="tiny", device="cpu")
        loaded = load_mtp(tmp_path, ends, target_name="tiny", reads_output=True)
        assert len(loaded.module.ways(1)) == 2
    assert all(torch.equal(before[key], values) for key, values in module.state_dict().items())
    assert loaded.token_ids == tuple(range(VOCAB))
    if is_fast:
        for each in (module, loaded.module):
            speed_up(each)
    random = torch.Generator().manual_seed(0)
    head: Any = loaded.module
    head.read_as((True, carries_normed))
    text = torch.randint(VOCAB, (LENGTHS[-1] + 1,), generator=random)
    engine = None
    if reference.family == "qwen3_next":
        with pytest.raises(ConfigError, match="cannot be rolled back"):
            PagedEngine(module, INFO, draft_layer=loaded)
    elif not is_apart:
        engine = PagedEngine(module, INFO, draft_layer=loaded)
    for num in LENGTHS:
        hidden, drafted = reference.chain(text[: num + 1], DEPTHS, carries_normed=carries_normed)
        if engine is None:
            behind = torch.cat([text[1 : num + 1], torch.tensor(drafted[:-1])])
            features = reference.features(text[:num])
            assert not is_apart or head.fuse(features) is features
            found = [rows[0, -1] for rows in head.unroll(features[None], behind[None], DEPTHS)]
        else:
            found = drafted_by(engine, head, text[: num + 1].tolist(), drafted)
        assert [int(head.logits(row).argmax()) for row in found] == drafted
        for row, expected in zip(found, hidden, strict=True):
            assert close(head.layer.post_norm(row), expected)
            assert close(head.logits(row), reference.target.lm_head(expected))


def drafted_by(engine: Any, head: Any, text: list[int], drafted: list[int]) -> list[torch.Tensor]:
    """h [D] of a chain after a text whose last token has not been run, in two steps."""
    half = len(text) // 2
    for tokens in (text[:half], text[half:-1]):
        if tokens:
            engine.forward([SequenceStep("a", tuple(tokens), 1)])
    feature, found = engine.features()[0][-1], []
    for token in (text[-1], *drafted[:-1]):
        [row] = engine.forward_draft([SequenceStep("a", (token,), 1)], [feature])
        found.append(row)
        feature = head.carry(row)
    engine.release("a")
    return found


def test_what_its_files_hold_beside_is_used(tmp_path: Path) -> None:
    """Float8 weights and their scales are used; a second layer and copies of the target's
    embeddings and head are ignored. A tensor that is missing, unknown, of another shape or stored
    differently is named."""
    reference = MtpReference(mtp_target("deepseek_v3"))
    path, prefix = reference.save(tmp_path) / "model.safetensors", reference.prefix
    stored, target = load_file(path), reference.target

    def load(**changed: torch.Tensor | None) -> LoadedDraftHead:
        tensors = stored | {prefix + key: values for key, values in changed.items()}
        kept = {key: values.clone() for key, values in tensors.items() if values is not None}
        save_file(kept, path, metadata={"format": "pt"})
        return load_mtp(tmp_path, target, target_name="tiny")

    weight = stored[f"{prefix}mlp.experts.1.up_proj.weight"]
    for name in (f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"):
        stored[name] = 2 * target.lm_head.weight
    stored["model.layers.3.enorm.weight"] = torch.ones(1)
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 20]}}
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | blocks))
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    rounded = (weight / 4).to(torch.float8_e4m3fn)
    name = "mlp.experts.1.up_proj.weight"
    head: Any = load(**{name: rounded, f"{name}_scale_inv": scales}).module
    assert head.embed_tokens.weight is target.model.embed_tokens.weight
    assert head.lm_head.weight is target.lm_head.weight
    expected = rounded.float().unflatten(0, (2, 8))
    expected = torch.cat(
        [expected[..., :20] * scales[:, None, :1], expected[..., 20:] * scales[:, None, 1:]], -1
    ).flatten(0, 1)
    assert torch.equal(head.layer.mtp_block.mlp.experts.gate_up_proj[1][16:], expected)
    for changed, message in (
        ({name: rounded}, f"{name} is stored as torch.float8_e4m3fn; "),
        ({"enorm.weight": None}, "its files lack the weights layers.0.enorm.weight"),
        ({"more.weight": weight + 1}, "its files have the weights .*more.weight, which an MTP"),
        ({"enorm.weight": weight}, r"layers.0.enorm.weight has shape \[16, 32\]; \[32\] is needed"),
        ({"enorm.weight": torch.full((32,), torch.nan)}, "layers.0.enorm.weight is not finite"),
    ):
        with pytest.raises(
            ConfigError, match=f"^model tiny: its MTP layer cannot be loaded: .*{message}"
        ):
            load(**changed)


def test_targets_without_such_layers_are_refused(tmp_path: Path) -> None:
    plain = save_tiny_model(tmp_path / "plain")
    served = "only MTP layers of deepseek_v3, glm4_moe are served"
    with pytest.raises(ConfigError, match=f"^model PLAIN: model_type is 'llama'; {served}$"):
        check_mtp(plain, "PLAIN")
    mtp_target("glm4_moe").save_pretrained(tmp_path / "glm")
    stated = json.loads((tmp_path / "glm/config.json").read_text())
    stated["num_nextn_predict_layers"] = 0
    (tmp_path / "glm/config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="no MTP layers: num_nextn_predict_layers is 0, and no"):
        check_mtp(tmp_path / "glm", "GLM")
