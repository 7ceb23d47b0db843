"""Students: what they store, what they share with their target, and which targets they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draft_service.model_drafter import ModelDrafter
from outrider.config.deployment import load_config
from outrider.drafters.drafter import DraftRequest
from outrider.errors import ConfigError, SettingError
from outrider.fleet.preflight import resolve_models
from outrider.interfaces.engine import SequenceStep
from outrider.models.fingerprint import PICKLED_FILE, tensors_fingerprint
from outrider.models.loading import WEIGHTS_FILE
from outrider.models.student import DESCRIPTION_FILE, load_student
from outrider.replica.engines import build_engine
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.models import save_tiny_drafter, save_tiny_model, tiny_drafter, tiny_module
from tests.support.mtp_models import mtp_target

TOKEN_IDS = (1, 4, 5, 9, 20, 21, 31)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    return save_tiny_drafter(tmp_path / "drafter", target, TOKEN_IDS)


def load(drafter: Path, target: Path) -> tuple[torch.nn.Module, tuple[int, ...]]:
    module, info = load_student(drafter, target, name="drafter", target="target")
    return module, info.logit_token_ids


def test_a_drafter_computes_what_was_saved(target: Path, drafter: Path) -> None:
    module, token_ids = load(drafter, target)
    assert token_ids == TOKEN_IDS
    made = tiny_drafter(AutoModelForCausalLM.from_pretrained(target), TOKEN_IDS)
    for name, parameter in made.named_parameters():
        if "layers" in name and parameter.dim() == 2:
            scales = parameter.abs().amax(1, keepdim=True) / 127
            parameter.data = (parameter / scales).round() * scales
    ids = torch.tensor([PROMPT])
    expected = made(ids).logits
    assert expected.shape == (1, len(PROMPT), len(TOKEN_IDS))
    torch.testing.assert_close(module(ids).logits, expected)
    kept = {name.split(".")[1] for name in load_file(drafter / WEIGHTS_FILE) if "." in name}
    assert kept == {"layers", "norm"}


def test_the_routers_biases_are_kept(tmp_path: Path) -> None:
    """These are buffers. The files of older students lack them."""
    config = mtp_target("deepseek_v3").config
    config.first_k_dense_replace = 0
    place, target = tmp_path / "target", tiny_module(config)
    target.save_pretrained(place)
    made = tiny_drafter(target, TOKEN_IDS)
    bias = made.model.layers[0].mlp.gate.e_score_correction_bias
    bias.copy_(torch.arange(len(bias)))
    save_tiny_drafter(tmp_path, place, TOKEN_IDS, made)
    for expected in (bias, torch.zeros_like(bias)):
        module: Any = load(tmp_path, place)[0]
        assert torch.equal(module.model.layers[0].mlp.gate.e_score_correction_bias, expected)
        tensors = load_file(tmp_path / WEIGHTS_FILE)
        left = {key: one for key, one in tensors.items() if not key.endswith("correction_bias")}
        save_file(left, tmp_path / WEIGHTS_FILE)


def test_it_is_served_by_its_directory(target: Path, drafter: Path) -> None:
    config = resolve_models(load_config({"model": str(target), "draft_model": str(drafter)}, {}))
    engine = build_engine(config.draft, 1)
    [logits] = engine.forward([SequenceStep("s", PROMPT, 2)])
    assert logits.shape == (2, len(TOKEN_IDS))
    assert engine.info.logit_token_ids == TOKEN_IDS
    assert engine.info.vocab_size == 32
    module, _ = load(drafter, target)
    torch.testing.assert_close(logits, module(torch.tensor([PROMPT])).logits[0, -2:])
    noise = RoundNoise(1, Rule.GREEDY, len(PROMPT))
    asked = DraftRequest("d", "", PROMPT, 1, 1, SamplingParams(temperature=0.0), Rule.GREEDY, noise)
    proposer = ModelDrafter(engine)
    draft = proposer.begin(asked)
    proposer.extend([draft])
    assert draft.token_ids == [TOKEN_IDS[int(logits[-1].argmax())]]


def test_another_target_and_ranks_are_refused(target: Path, drafter: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=5)
    for key, changes, said in (
        ("draft_model", {"model": str(other)}, r"trained for the target tiny .* outrider distill"),
        (
            "draft_tensor_parallel_size",
            {"draft_tensor_parallel_size": 2},
            "must be 1 for a drafter",
        ),
    ):
        flags = {"model": str(target), "draft_model": str(drafter)} | changes
        with pytest.raises(SettingError, match=said) as bad:
            resolve_models(load_config(flags, {}))
        assert bad.value.key == key
    with pytest.raises(ConfigError, match="trained for the target tiny"):
        load(drafter, other)


def test_a_wrong_description_is_refused(target: Path, drafter: Path) -> None:
    """The description of an older student, which has further fields, is accepted."""
    path = drafter / DESCRIPTION_FILE
    stated = json.loads(path.read_text())
    older = {"format": 3, "kind": "student", "vocab_size": 32, "draft_vocab_size": len(TOKEN_IDS)}
    path.write_text(json.dumps(stated | older))
    assert load(drafter, target)[1] == TOKEN_IDS
    path.write_text(json.dumps(stated | {"target": 3}))
    with pytest.raises(ConfigError, match="target Input should be a valid string"):
        load(drafter, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "Missing .*model.norm.weight"),
        ({"model.norm.weight": torch.zeros(1)}, "mismatch for model.norm.weight"),
        ({"model.norm.weight": torch.full((32,), torch.nan)}, "model.norm.weight is not finite"),
        *(
            ({"draft_token_ids": torch.tensor(ids, dtype=torch.int32)}, "draft_token_ids must")
            for ids in ([], [1, 1], [2, 1], [-1, 1], [1, 32])
        ),
    ],
)
def test_broken_files_are_refused(
    target: Path, drafter: Path, changes: dict[str, torch.Tensor], message: str
) -> None:
    tensors = load_file(drafter / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors | changes, drafter / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(drafter, target)


def test_the_fingerprint_is_the_tensors(target: Path, tmp_path: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    names = sorted(tensors)
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    (copy / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in names[:5]}, copy / "b.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, copy / "a.safetensors")
    (copy / "config.json").write_text("{}")
    assert tensors_fingerprint(copy) == tensors_fingerprint(target)
    tensors[names[0]].view(-1)[0] += 1
    save_file({name: tensors[name] for name in names[:5]}, copy / "b.safetensors")
    assert tensors_fingerprint(copy) != tensors_fingerprint(target)


@pytest.mark.parametrize("header", ["", "[]", '{"weight": [1]}', '{"weight": {}}', "{"])
def test_a_file_with_a_broken_header_has_no_fingerprint(header: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ConfigError, match="not a safetensors file"):
        tensors_fingerprint(tmp_path)


def test_the_fingerprint_tells_heads_in_torchs_own_file_apart(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "a-again", "b")):
        torch.manual_seed(seed // 2)
        (tmp_path / name).mkdir()
        torch.save({"fc.weight": torch.randn(8, 8)}, tmp_path / name / PICKLED_FILE)
    a, again, b = (tensors_fingerprint(tmp_path / name) for name in ("a", "a-again", "b"))
    assert a == again != b
