"""An exit head as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_tiny_exit, save_tiny_model, tiny_exit
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.models.drafter_checkpoint import WEIGHTS_FILE
from outrider.models.early_exit import LoadedExit, load_exit
from outrider.models.loading import load_model
from outrider.models.module_replacement import speed_up

HEAD_IDS = (1, 4, 5, 9, 20)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def saved(target: Path, tmp_path: Path) -> Path:
    return save_tiny_exit(tmp_path / "exit", target, HEAD_IDS)


def load(path: Path, target: Path) -> LoadedExit:
    module, _ = load_model(target)
    return load_exit(path, module, name="exit", target_directory=target, target_name="tiny")


def test_what_is_saved_is_loaded(target: Path, saved: Path) -> None:
    """Up to the rounding of its weights; the head's rows are the target's own."""
    module, _ = load_model(target)
    made, loaded = tiny_exit(module, HEAD_IDS), load(saved, target)
    assert (loaded.token_ids, loaded.num_layers) == (HEAD_IDS, 1)
    assert torch.equal(loaded.module.head.weight, module.lm_head.weight[list(HEAD_IDS)])
    hidden = 7 * torch.randn(3, module.config.hidden_size)
    ours, theirs = loaded.module(hidden), made.module(hidden)
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
    speed_up(loaded.module)
    assert (loaded.module(hidden) - ours).abs().max() < 1e-3


def test_what_it_makes_of_a_row_is_as_it_says(target: Path) -> None:
    """The formula of its own page, weight by weight."""
    module, _ = load_model(target)
    made = tiny_exit(module, HEAD_IDS).module
    made.scale.uniform_(0.5, 2.0)
    hidden = torch.randn(3, module.config.hidden_size)
    x = hidden / hidden.pow(2).mean(1, keepdim=True).add(1e-6).sqrt() * made.scale
    gate, up = made.gate_up.weight.chunk(2)
    gated = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    f = x + x @ made.mix.weight.T + gated @ made.down.weight.T
    expected = f @ module.lm_head.weight[list(HEAD_IDS)].T
    torch.testing.assert_close(made.logits(hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("mix.weight"), "lack the weights mix.weight"),
        (lambda t: t.pop("scale"), "lack the weights scale"),
        (lambda t: t.pop("down.weight"), "hold no exit head"),
        (lambda t: t.update({"down.weight": torch.zeros(4)}), "hold no exit head"),
        (lambda t: t.update({"scale": torch.zeros(4)}), "scale does not fit"),
        (lambda t: t["gate_up.weight.scale"].fill_(torch.nan), "gate_up.weight does"),
        (lambda t: t.pop("num_layers"), "num_layers is missing"),
        (lambda t: t.update({"num_layers": torch.tensor([1.0])}), "num_layers is missing"),
        (
            lambda t: t["num_layers"].fill_(2),
            "of the target tiny: it cannot be left behind 2 of its 2 layers; 1 to 1 are",
        ),
        (lambda t: t["num_layers"].fill_(0), "left behind 0 of"),
        (lambda t: t.update({"draft_token_ids": torch.tensor([1, 4, 5, 9, 40])}), "do not ascend"),
    ],
)
def test_broken_files_are_refused(
    target: Path, saved: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    tensors = load_file(saved / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, saved / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=message):
        load(saved, target)


def test_one_for_another_architecture_is_refused(tmp_path: Path) -> None:
    """Before anything is run."""
    other = save_tiny_model(tmp_path / "gpt2", family="gpt2")
    saved = save_tiny_exit(tmp_path / "exit", other, HEAD_IDS)
    with pytest.raises(ConfigError, match="exit: of the target tiny: a GPT2LMHeadModel has no"):
        load(saved, other)
