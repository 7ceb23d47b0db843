"""The check of a head when it is loaded: which layers it reads, and whether it works."""

import re
from functools import partial
from typing import Any

import pytest
import torch

from outrider.interfaces.engine import ModelInfo
from outrider.models.compatibility import self_check_tokens
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.drafter_check import TOKENS_WRITTEN, checked_head, read_library
from outrider.models.target_layers import tapped_layers
from tests.support.models import tiny_config, tiny_eagle3, tiny_module
from tests.support.mtp_models import mtp_target, tiny_mtp

VOCAB, LENGTH = 32, 128
LAYER_IDS = (2, 4, 6)
INFO = ModelInfo("tiny", VOCAB, LENGTH, "float32", (), "w", "")


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_module(tiny_config("llama", VOCAB, LENGTH, num_hidden_layers=8))


def fitted_head(target: Any, loaded: LoadedDraftHead, offset: int = 0) -> LoadedDraftHead:
    """A head whose last matrix is fitted to the target's tokens in the trial, from what the head
    reads now, `offset` tokens later."""
    prompt = torch.tensor([self_check_tokens(INFO)])
    text = target.generate(prompt, max_new_tokens=TOKENS_WRITTEN, do_sample=False)
    head: Any = loaded.module
    with tapped_layers(target, head.layer_ids) as taps:
        likeliest = target(text).logits[0].argmax(-1)
        features = head.fuse(torch.cat([tap.rows_read() for tap in taps], -1))
    chains = features[None, offset : len(features) - 2 + offset]
    drafted = torch.cat([*head.unroll(chains, text[:, 1:], 2)], 1)[0]
    rows = (head.norm if hasattr(head, "norm") else head.layer.post_norm)(drafted)
    wanted = torch.nn.functional.one_hot(torch.cat([likeliest[1:-1], likeliest[2:]]), VOCAB)
    fitted = torch.linalg.lstsq(rows, wanted.float()).solution.T
    head.lm_head = torch.nn.Linear(*fitted.shape[::-1], bias=False).requires_grad_(False)
    head.lm_head.weight.copy_(fitted)
    return loaded


@pytest.mark.parametrize("by", [0, 1, -1])
def test_the_layers_that_a_head_was_made_for_are_found(target: Any, by: int) -> None:
    loaded: Any = fitted_head(target, tiny_eagle3(target, range(VOCAB), layer_ids=LAYER_IDS))
    stated = tuple(index + by for index in LAYER_IDS)
    loaded.module.layer_ids = stated
    found: Any = checked_head(loaded, partial(read_library, target, None), INFO, None, "HEAD")
    assert found.module.layer_ids == LAYER_IDS
    assert bool(found.note) is (by != 0)
    if found.note:
        layers = f"layers {', '.join(map(str, stated))}"
        assert f"reads the layers 2, 4, 6 in place of the {layers}, " in found.note


@pytest.mark.parametrize("carries_normed", [True, False])
@pytest.mark.parametrize("is_normed", [True, False])
def test_the_sides_of_an_mtp_layers_norms_are_found(is_normed: bool, carries_normed: bool) -> None:
    target = mtp_target("glm4_moe", VOCAB, LENGTH)
    loaded = tiny_mtp(target)
    head: Any = loaded.module
    width = target.config.hidden_size
    for norm in (target.model.norm, head.layer.post_norm):
        norm.weight.copy_(torch.tensor([1.0, -1.0]).repeat(width // 2))
    head.layer.eh_proj.weight[:, width:] *= 4  # What it reads of the hidden state.
    head.read_as((is_normed, carries_normed))
    fitted_head(target, loaded)
    head.read_as((True, True))
    found: Any = checked_head(loaded, partial(read_library, target, None), INFO, None, "mtp")
    rows = torch.randn(1, width)
    assert torch.equal(found.module.fuse(rows), target.model.norm(rows) if is_normed else rows)
    carried = head.layer.post_norm(rows) if carries_normed else rows
    assert torch.equal(found.module.carry(rows), carried)
    side = "after" if is_normed else "before"
    own = "" if carries_normed else " (and the MTP layer's output before its norm)"
    stated = "hidden states after the target's last norm"
    fitting = f"hidden states {side} the target's last norm{own}"
    note = f"drafter mtp reads the {fitting} in place of the {stated}, "
    assert found.note.startswith("" if fitting == stated else note)
    assert bool(found.note) is (fitting != stated)


def test_a_head_that_is_of_no_use_is_named(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    loaded = tiny_eagle3(target, range(VOCAB), layer_ids=LAYER_IDS)
    found: Any = checked_head(loaded, partial(read_library, target, None), INFO, None, "HEAD")
    assert found.module.layer_ids == LAYER_IDS
    for layers in ("2, 4, 6", "3, 5, 7", "1, 3, 5"):
        assert f"layers {layers}: " in found.note
    assert found.note.startswith("drafter HEAD agrees with its target in ")
    assert found.note in caplog.text


def test_a_head_whose_pairs_are_one_off_is_named(target: Any) -> None:
    loaded = tiny_eagle3(target, range(VOCAB), layer_ids=LAYER_IDS)
    fitted_head(target, loaded, offset=1)
    found: Any = checked_head(loaded, partial(read_library, target, None), INFO, None, "HEAD")
    assert found.module.layer_ids == LAYER_IDS
    assert "; pairs one off: " in found.note
    *others, one_off = map(int, re.findall(r": (\d+)%", found.note))
    assert one_off > max(others) + 10


def test_a_failed_check_leaves_stated_layers(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_eagle3(target, range(VOCAB), layer_ids=LAYER_IDS)
    head, fuse = loaded.module, loaded.module.fuse

    def fuse_stated(hidden: torch.Tensor) -> torch.Tensor:
        if head.layer_ids != LAYER_IDS:
            raise RuntimeError("no")
        return fuse(hidden)

    monkeypatch.setattr(head, "fuse", fuse_stated)
    found: Any = checked_head(loaded, partial(read_library, target, None), INFO, None, "HEAD")
    assert "drafter HEAD is not checked: RuntimeError('no')" in found.note
    assert found.module.layer_ids == LAYER_IDS
