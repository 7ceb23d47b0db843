"""The drafters of the package: they are whole and small, and fit the targets that they name."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from outrider.drafters.names import DEMO, SHIPPED
from outrider.models.eagle3 import load_eagle3
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.loading import load_model
from outrider.models.sources import check_name, resolve_model
from outrider.models.student import load_student

MODEL, HEAD = SHIPPED
BYTES_MAX = 24 * 2**20
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_drafter_is_whole_and_small_and_its_card_names_its_target(name: str) -> None:
    check_name(name)
    directory = resolve_model(name)
    files = [path for path in directory.iterdir() if path.is_file()]
    assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= BYTES_MAX
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["outrider"]
    packaged = {path for pattern in patterns for path in (ROOT / "outrider").glob(pattern)}
    assert set(files) <= packaged
    assert tensors_fingerprint(resolve_model(DEMO)) in (directory / "README.md").read_text()


def test_the_model_is_for_its_target() -> None:
    target, directory = resolve_model(DEMO), resolve_model(MODEL)
    module, info = load_student(directory, target, name=MODEL, target=DEMO)
    card = (directory / "README.md").read_text()
    [tokens] = re.findall(r" proposes only ([\d,]+) of ", card)
    assert f"{len(info.logit_token_ids):,}" == tokens
    [layers] = re.findall(r" in (\d+) layers\.", card)
    assert module.config.num_hidden_layers == int(layers)


def test_the_head_is_for_its_target() -> None:
    target, _ = load_model(resolve_model(DEMO), dtype="bfloat16", device="cpu")
    head = load_eagle3(resolve_model(HEAD), target, name=HEAD, target_name=DEMO)
    embeddings = target.get_input_embeddings().weight
    assert torch.equal(head.module.embed_tokens.weight, embeddings)
    assert torch.equal(head.module.lm_head.weight, embeddings[[*head.token_ids]])
