"""The drafters that come with the package: whole, small, and for the target that they are named
for."""

import re
import tomllib
from pathlib import Path

import pytest

from outrider.drafters.names import SHIPPED
from outrider.models.drafter_checkpoint import is_trained_drafter, read_description
from outrider.models.fingerprint import tensors_fingerprint
from outrider.models.sources import check_name, resolve_model
from outrider.models.student import load_drafter

BYTES_MAX = 24 * 2**20
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", SHIPPED.values())
def test_a_shipped_drafter_is_whole_and_small(name: str) -> None:
    check_name(name)
    directory = resolve_model(name)
    assert is_trained_drafter(directory)
    files = [path for path in directory.iterdir() if path.is_file()]
    assert {"README.md", "loss.svg", "config.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= BYTES_MAX
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["outrider"]
    packaged = {path for pattern in patterns for path in (ROOT / "outrider").glob(pattern)}
    assert set(files) <= packaged


@pytest.mark.parametrize(("target", "name"), SHIPPED.items())
def test_it_is_for_its_target(target: str, name: str) -> None:
    """Of which its card says the same."""
    directory, targets = resolve_model(name), resolve_model(target)
    description = read_description(directory, name)
    assert description.target_fingerprint == tensors_fingerprint(targets)
    assert description.target_fingerprint in (directory / "README.md").read_text()
    module, info = load_drafter(directory, targets, name=name, target=target)
    assert len(info.logit_token_ids) == description.draft_vocab_size
    [layers] = re.findall(r" in (\d+) layers, begun", (directory / "README.md").read_text())
    assert module.config.num_hidden_layers == int(layers)
