"""The check of a head when it is loaded: which layers it reads, and whether it is of use."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from models import tiny_config, tiny_eagle3, tiny_module

from outrider.engine.interface import ModelInfo
from outrider.models.compatibility import trial_tokens
from outrider.models.drafter_check import TOKENS_WRITTEN, checked_head
from outrider.models.eagle3 import LoadedEagle3

VOCAB, LENGTH = 32, 128
LAYER_IDS = (2, 4, 6)
INFO = ModelInfo("tiny", VOCAB, LENGTH, "float32", (), "w", "")


@pytest.fixture(scope="module")
def target() -> Any:
    config = tiny_config("llama", VOCAB, LENGTH)
    config.num_hidden_layers = 8
    return tiny_module(config)


def fitted_head(target: Any) -> LoadedEagle3:
    """A head that reads `LAYER_IDS`, and whose last matrix has been fitted to what the target
    writes behind the trial's tokens."""
    prompt = torch.tensor([trial_tokens(INFO)])
    text = target.generate(prompt, max_new_tokens=TOKENS_WRITTEN, do_sample=False)
    output = target(text, output_hidden_states=True)
    loaded = tiny_eagle3(target, range(VOCAB), layer_ids=LAYER_IDS)
    head = loaded.module
    taps = torch.cat([output.hidden_states[index] for index in LAYER_IDS], -1)
    drafted = [*head.unroll(head.fuse(taps)[:, :-2], text[:, 1:], 2)]
    rows = head.norm(torch.cat(drafted, 1)[0])
    likeliest = output.logits[0].argmax(-1)
    wanted = torch.nn.functional.one_hot(torch.cat([likeliest[1:-1], likeliest[2:]]), VOCAB)
    head.lm_head.weight.copy_(torch.linalg.lstsq(rows, wanted.float()).solution.T)
    return loaded


@pytest.mark.parametrize("by", [0, 1, -1])
def test_the_layers_that_a_head_was_made_for_are_found(
    target: Any, by: int, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = fitted_head(target)
    stated = tuple(index + by for index in LAYER_IDS)
    loaded.module.layer_ids = stated
    with caplog.at_level(logging.INFO):
        found = checked_head(loaded, target, INFO, None, "HEAD")
    assert found.module.layer_ids == LAYER_IDS
    assert "pairs one off: " in caplog.text
    assert bool(found.note) is (by != 0)
    if found.note:
        assert "reads the layers 2, 4, 6 in place of those that its files state" in found.note
        assert f"layers {', '.join(map(str, stated))}: " in found.note


def test_a_head_that_is_of_no_use_is_named(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A random one, with the layers that were stated; and one that cannot be checked is served."""
    loaded = tiny_eagle3(target, range(VOCAB), layer_ids=LAYER_IDS)
    found = checked_head(loaded, target, INFO, None, "HEAD")
    assert found.module.layer_ids == LAYER_IDS
    for layers in ("2, 4, 6", "3, 5, 7", "1, 3, 5"):
        assert f"layers {layers}: " in found.note
    assert found.note.startswith("drafter HEAD agrees with its target at ")
    assert found.note in caplog.text
    broken = checked_head(loaded, None, INFO, None, "HEAD")
    assert broken.module is loaded.module
    assert "drafter HEAD is not checked: " in broken.note
