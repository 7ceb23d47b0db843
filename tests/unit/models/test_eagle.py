"""A head that reads features: what it computes, and its files."""

from __future__ import annotations

import math

import torch
from models import tiny_config, tiny_eagle, tiny_module

from outrider.limits import FEATURES_MAX
from outrider.models.eagle import EagleHead

HEAD_IDS = (1, 4, 5, 9, 20)
VOCAB = 32


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
