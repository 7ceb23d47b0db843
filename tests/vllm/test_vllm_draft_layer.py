"""Heads on the pages of vLLM's models, compared with heads on the native engine's pages."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError
from outrider.interfaces.engine import ModelInfo
from outrider.models.drafter_check import Reading, read_library
from outrider.replica.engines import build_engine
from target_service.actor import self_drafter_of
from tests.support.models import tiny_eagle3, twin
from tests.support.same_tokens import check_tokens
from tests.support.stack import running_stack
from tests.support.vllm_models import MAX_MODEL_LEN, VOCAB, MakeEngine, save
from tests.support.vllm_pairs import PAGE_SIZE, Pair, ids, saved, saved_eagle3, saved_mtp

TAPS = (2, 0, 3)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("llama", {"enforce_eager": False}),
        ("llama", {"deterministic": True}),
    ],
    ids=str,
)
def test_a_head_reads_and_drafts_as_on_the_native_engine(
    family: str, options: dict[str, bool], tmp_path: Path, make_engine: MakeEngine
) -> None:
    """The head reads the layers that its check chooses."""
    module = saved(family, tmp_path)
    readings: list[Reading] = []

    def check(loaded: Any, read: Any, info: ModelInfo) -> Any:
        readings.extend(
            reader(ids(9)) for reader in (read, partial(read_library, twin(module), None))
        )
        loaded.module.layer_ids = TAPS
        return loaded

    head = tiny_eagle3(module, range(0, VOCAB, 2), layer_ids=(1, 2, 3))
    ours = make_engine(tmp_path, draft_layer=head, draft_check=check, **options)
    with torch.no_grad():
        found, expected = readings
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.likeliest, expected.likeliest)
        for rows in zip(found.hidden, expected.hidden, strict=True):
            torch.testing.assert_close(*rows, atol=1e-3, rtol=1e-3)
    assert ours.attach("", found.token_ids.tolist()) == 0  # The head has nothing of this sequence.
    ours.release("")
    info = ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, "float32", (), "", "")
    other = tiny_eagle3(module, range(0, VOCAB, 2), layer_ids=TAPS)
    Pair(ours, PagedEngine(module, info, draft_layer=other)).run()


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_an_mtp_layer_reads_and_drafts_as_on_the_native_engine(
    enforce_eager: bool, tmp_path: Path
) -> None:
    """The class of the model in vLLM does not show what its layers read."""
    config = replace(saved_mtp(tmp_path), enforce_eager=enforce_eager)
    Pair(build_engine(config, 1), build_engine(replace(config, engine="transformers"), 1)).run()


def test_pages_are_counted_with_what_the_head_keeps(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    """If the model has the same weights, the layer has none of its own."""
    module = save("llama", tmp_path, vocab_size=VOCAB - 3)  # vLLM pads this size.
    head = tiny_eagle3(module, range(9), width=64)
    head.module.embed_tokens.weight.data = module.get_input_embeddings().weight.detach().clone()
    numbers = 2 * 2 * 2 * 32 + 2 * 2 * 8 + 64  # Keys and values of two layers and of pairs, and g.
    page_bytes = PAGE_SIZE * numbers * 4
    engine = make_engine(
        tmp_path,
        draft_layer=head,
        draft_check=lambda loaded, *_: loaded,
        kv_cache_memory_bytes=8 * page_bytes,
    )
    assert engine.page_counts().num_pages == 8
    theirs = [parameter.data_ptr() for parameter in engine._model.parameters()]
    assert head.module.embed_tokens.weight.data_ptr() in theirs
    assert head.module.lm_head.weight.data_ptr() not in theirs


def test_a_model_that_does_not_show_its_layers_is_refused(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    head = tiny_eagle3(save("gemma3", tmp_path), range(VOCAB))
    with pytest.raises(ConfigError, match=r"vLLM's Gemma3\w+ does not return them"):
        make_engine(tmp_path, draft_layer=head, draft_check=lambda loaded, *_: loaded)


async def test_text_is_the_same_with_and_without_a_head(tmp_path: Path) -> None:
    engine: Any = build_engine(replace(saved_eagle3(tmp_path), deterministic=True), 1)
    assert engine.draft_layer.note  # The head agrees with its target only by chance.
    drafter: Any = self_drafter_of(engine)
    drafter.propose = Mock(wraps=drafter.propose)
    async with running_stack(engine, None, tmp_path, self_drafter=drafter) as stack:
        for temperature in (0.0, 1.0):
            prompts = [ids(num, num) for num in (5, 40, 70)]
            await check_tokens(stack, prompts, 16, 1, temperature)
    assert drafter.propose.call_count > 20
