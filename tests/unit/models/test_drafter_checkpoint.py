"""Heads of every kind as files: what is stored and loaded, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    save_tiny_heads,
    save_tiny_model,
    tiny_config,
    tiny_heads,
    tiny_module,
    twin,
)
from safetensors.torch import load_file, save_file

from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError
from outrider.models.drafter_checkpoint import DESCRIPTION_FILE, WEIGHTS_FILE
from outrider.models.loading import load_model
from outrider.models.medusa import load_heads
from outrider.models.module_replacement import speed_up
from outrider.models.student import target_ends

HEAD_IDS = (1, 4, 5, 9, 20)


@dataclass
class Case:
    target: Path
    saved: Path

    def load(self, target: Path | None = None) -> Any:
        target = target or self.target
        whose: Any = {"name": "head", "target_directory": target, "target_name": "tiny"}
        return load_heads(self.saved, target_ends(target, drafter="head", name="tiny"), **whose)

    def answers(self, module: Any, rows: torch.Tensor) -> torch.Tensor:
        """Of features [3, D] before tokens."""
        token_ids = torch.tensor([1, 2, 3])
        return torch.stack([module.advance(depth, rows, token_ids) for depth in range(2)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def case(target: Path, tmp_path: Path) -> Case:
    return Case(target, save_tiny_heads(tmp_path / "head", target, HEAD_IDS))


def test_what_is_saved_is_loaded(case: Case) -> None:
    """Up to the rounding of its weights; the head's rows are the target's own. It may be made
    faster."""
    module: Any
    module, _ = load_model(case.target)
    made, loaded = tiny_heads(module, HEAD_IDS), case.load()
    assert loaded.token_ids == HEAD_IDS
    assert torch.equal(loaded.module.head.weight, module.lm_head.weight[list(HEAD_IDS)])
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(3, module.config.hidden_size, generator=generator)
    ours, theirs = case.answers(loaded.module, rows), case.answers(made.module, rows)
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
    speed_up(loaded.module)
    assert (case.answers(loaded.module, rows) - ours).abs().max() < 1e-3


def _fill(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors[name].fill_(value)


def _put(name: str, *values: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.tensor(values)})


def _drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("heads.1.gate_up.weight"), "lack the weights heads.1.gate_up.weight"),
        (_put("heads.0.down.weight", 0.0), r"heads.0.gate_up.weight is .*; .* is needed"),
        (_fill("heads.0.down.weight.scale", torch.nan), "down.weight is not finite"),
    ],
)
def test_broken_files_are_refused(
    case: Case, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    tensors = load_file(case.saved / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, case.saved / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=message):
        case.load()


def test_heads_for_another_vocabulary_are_refused(case: Case) -> None:
    path = case.saved / DESCRIPTION_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 99}))
    with pytest.raises(ConfigError, match="vocab_size 99, its target 32"):
        case.load()


VOCAB = 32
ROUNDING = 1e-6
"""Some families norm in float32, whatever the model's dtype."""
INFO = ModelInfo("tiny", VOCAB, 128, "float64", (), "", "")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_shows_what_its_head_read(family: str, deterministic: bool) -> None:
    """At every row of logits, in a prompt that is run in parts beside another sequence, and in a
    tree; by the library's own pass."""
    module = tiny_module(tiny_config(family, VOCAB), dtype=torch.float64)
    original, heads = twin(module), tiny_heads(module, HEAD_IDS)
    engine = PagedEngine(module, INFO, deterministic=deterministic, draft_heads=heads)
    text, other = (3, 1, 4, 1, 5, 9, 2, 6), (7, 7, 2)
    engine.forward([SequenceStep("a", text[:3], 0)])
    assert [len(rows) for rows in engine.features()] == [0]
    engine.forward([SequenceStep("b", other, 1), SequenceStep("a", text[3:], 4)])
    found = engine.features()
    for tokens, rows in ((other, found[0]), (text, found[1])):
        hidden = original.base_model(torch.tensor([tokens])).last_hidden_state[0]
        assert (rows - hidden[-len(rows) :]).abs().max() < ROUNDING
    engine.forward([SequenceStep("a", (8, 9, 10), 3, (-1, -1, 1))])
    hidden = original.base_model(torch.tensor([(*text, 9, 10)])).last_hidden_state[0]
    assert (engine.features()[0][1:] - hidden[-2:]).abs().max() < ROUNDING
