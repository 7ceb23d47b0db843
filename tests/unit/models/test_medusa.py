"""Draft heads as files, and an engine that shows what they read."""

from __future__ import annotations

import pytest
import torch
from models import tiny_config, tiny_heads, tiny_module, twin

from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine

HEAD_IDS = (1, 4, 5, 9, 20)
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
