"""Draft heads as files, and an engine that shows what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_tiny_heads, save_tiny_model, tiny_config, tiny_heads, tiny_module, twin
from safetensors.torch import load_file, save_file

from outrider.engine.cuda.backend import DeviceBackend
from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError, InvariantError
from outrider.models.drafter_checkpoint import WEIGHTS_FILE
from outrider.models.loading import load_model
from outrider.models.medusa import LoadedHeads, load_heads
from outrider.models.module_replacement import speed_up

HEAD_IDS = (1, 4, 5, 9, 20)
VOCAB = 32
ROUNDING = 1e-6
"""Some families norm in float32, whatever the model's dtype."""
INFO = ModelInfo("tiny", VOCAB, 128, "float64", (), "", "")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def saved(target: Path, tmp_path: Path) -> Path:
    return save_tiny_heads(tmp_path / "heads", target, HEAD_IDS)


def load(path: Path, target: Path) -> LoadedHeads:
    module, _ = load_model(target)
    return load_heads(path, module, name="heads", target_directory=target, target_name="tiny")


def test_what_is_saved_is_loaded(target: Path, saved: Path) -> None:
    """Up to the rounding of its weights; embeddings and the head's rows are the target's own."""
    module, _ = load_model(target)
    made, loaded = tiny_heads(module, HEAD_IDS), load(saved, target)
    assert loaded.token_ids == HEAD_IDS
    assert torch.equal(loaded.module.head.weight, module.lm_head.weight[list(HEAD_IDS)])
    features, token_ids = torch.randn(3, module.config.hidden_size), torch.tensor([1, 2, 3])
    for depth in range(2):
        ours = loaded.module.advance(depth, features, token_ids)
        theirs = made.module.advance(depth, features, token_ids)
        assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
    speed_up(loaded.module)
    assert (loaded.module.advance(1, features, token_ids) - ours).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("heads.1.gate_up.weight"), "lack the weights heads.1.gate_up.weight"),
        (lambda t: t.update({"heads.0.down.weight": torch.zeros(4)}), "hold no heads"),
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


def test_steps_that_are_replayed_show_nothing() -> None:
    module = tiny_module(tiny_config("llama", VOCAB), dtype=torch.float64)
    heads = tiny_heads(module, HEAD_IDS)
    recording = DeviceBackend(attend=None, num_programs=1, new_recorder=lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvariantError, match="show no features"):
        PagedEngine(module, INFO, draft_heads=heads, backend=recording)
    with pytest.raises(InvariantError, match="keeps none"):
        PagedEngine(twin(module), replace(INFO, name="other")).features()
