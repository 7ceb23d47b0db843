"""A head that reads features: what it computes, and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_tiny_eagle, save_tiny_model, tiny_config, tiny_eagle, tiny_module
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.limits import FEATURES_MAX
from outrider.models.drafter_checkpoint import DESCRIPTION_FILE, WEIGHTS_FILE
from outrider.models.eagle import EagleHead, LoadedEagle, load_eagle
from outrider.models.loading import load_model
from outrider.models.module_replacement import speed_up

HEAD_IDS = (1, 4, 5, 9, 20)
VOCAB = 32


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def saved(target: Path, tmp_path: Path) -> Path:
    return save_tiny_eagle(tmp_path / "eagle", target, HEAD_IDS)


def load(path: Path, target: Path) -> LoadedEagle:
    return load_eagle(path, target, name="eagle", target="tiny")[0]


def norm(rows: torch.Tensor) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def rotated(vector: torch.Tensor, place: int) -> torch.Tensor:
    """As complex numbers, the i-th turned by place / 10,000^(2i / E)."""
    half = len(vector) // 2
    ones = torch.ones(half, dtype=torch.float64)
    turns = torch.polar(ones, place * 10_000 ** (-torch.arange(half) / half * ones))
    turned = torch.complex(vector[:half], vector[half:]) * turns
    return torch.cat([turned.real, turned.imag])


def guess_by_definition(
    module: EagleHead, pairs: list[tuple[torch.Tensor, int, int]]
) -> torch.Tensor:
    """g of the last of (feature, token, place), that sees all of these."""
    layer, width, size = module.layer, module.embeddings.shape[1], module.head_width
    seen = []
    for feature, token_id, place in pairs:
        x = layer.join(torch.cat([norm(feature), norm(module.embeddings[token_id])]))
        parts = layer.attend(norm(x)).view(3, -1, size)
        q, k = ([rotated(head, place) for head in part] for part in parts[:2])
        seen.append((x, q, k, parts[2]))
    x, queries = seen[-1][:2]
    mixed = []
    for head, query in enumerate(queries):
        scores = torch.stack([query @ k[head] for _, _, k, _ in seen]) / math.sqrt(size)
        values = torch.stack([v[head] for *_, v in seen])
        mixed.append(scores.softmax(0) @ values)
    y = x + layer.out(torch.cat(mixed))
    gate, up = layer.gate_up(norm(y)).chunk(2)
    assert len(y) == width
    guess: torch.Tensor = pairs[-1][0] + y + layer.down(torch.nn.functional.silu(gate) * up)
    return guess


def test_chains_see_the_newest_pairs_of_the_text_and_their_own() -> None:
    """By the definition, of chains behind early pairs, late ones and at the edges of the window."""
    target = tiny_module(tiny_config("llama", VOCAB), dtype=torch.float64)
    module = tiny_eagle(target, HEAD_IDS).module
    width, num_pairs, num_depths = target.config.hidden_size, FEATURES_MAX + 9, 3
    torch.manual_seed(0)
    features = torch.randn(2, num_pairs, width, dtype=torch.float64)
    tokens = torch.randint(0, VOCAB, (2, num_pairs + num_depths - 1))
    found = list(module.unroll(features, tokens, num_depths))
    for row in range(2):
        for start in (0, 1, 30, FEATURES_MAX - 1, FEATURES_MAX, num_pairs - 1):
            first = max(0, start + 1 - FEATURES_MAX)
            pairs = [(features[row, i], int(tokens[row, i]), i) for i in range(first, start + 1)]
            for depth in range(num_depths):
                guess = guess_by_definition(module, pairs)
                torch.testing.assert_close(found[depth][row, start], guess)
                place = start + depth + 1
                if depth + 1 < num_depths:
                    pairs.append((guess, int(tokens[row, place]), place))


def test_what_is_saved_is_loaded(target: Path, saved: Path) -> None:
    """Up to the rounding of its weights; embeddings and the head's rows are the target's own."""
    module, info = load_model(target)
    made = tiny_eagle(module, HEAD_IDS).module
    loaded, described = load_eagle(saved, target, name="eagle", target="tiny")
    assert loaded.token_ids == described.logit_token_ids == HEAD_IDS
    assert described.tokenizer_fingerprint == info.tokenizer_fingerprint
    assert described.weights_fingerprint != info.weights_fingerprint
    assert torch.equal(loaded.module.head.weight, module.lm_head.weight[list(HEAD_IDS)])
    assert torch.equal(loaded.module.embeddings, module.get_input_embeddings().weight)
    drawn = torch.Generator().manual_seed(1)
    features = torch.randn(1, 5, module.config.hidden_size, generator=drawn)
    tokens = torch.arange(5)[None]
    [ours], [theirs] = (list(m.unroll(features, tokens, 1)) for m in (loaded.module, made))
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
    speed_up(loaded.module)
    [quick] = loaded.module.unroll(features, tokens, 1)
    assert (quick - ours).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layer.join.weight"), "lack the weights layer.join.weight"),
        (lambda t: t.pop("layer.down.weight"), "lack the weights layer.down.weight"),
        (lambda t: t.update({"layer.out.weight": torch.zeros(4, 4)}), "layer.out.weight does"),
        (lambda t: t["layer.out.weight.scale"].fill_(torch.nan), "layer.out.weight does"),
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


def test_a_head_for_another_vocabulary_is_refused(target: Path, saved: Path) -> None:
    path = saved / DESCRIPTION_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 99}))
    with pytest.raises(ConfigError, match="vocab_size 99, its target 32"):
        load(saved, target)
