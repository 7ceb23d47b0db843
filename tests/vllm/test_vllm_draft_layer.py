"""Heads on the pages of vLLM's models, compared with heads on the native engine's pages."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import HEAD_WIDTH, MAX_MODEL_LEN, VOCAB, MakeEngine, config_of, save
from exactness.services.test_deterministic_tokens import check_tokens

from outrider.config.deployment import TargetConfig
from outrider.engine.paged_engine import PagedEngine
from outrider.errors import ConfigError
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.models.drafter_check import Reading, read_library
from outrider.replica.process_setup import build_engine
from target_service.actor import self_drafter_of
from tests.support.models import save_tiny_eagle3, tiny_eagle3, tiny_module, twin
from tests.support.mtp_models import MtpReference, mtp_target
from tests.support.stack import running_stack

NUM_LAYERS = 4
TAPS = (2, 0, 3)
PAGE_SIZE = 32
"""Page size of vLLM's engine on a CPU, a multiple of the native engine's."""


def saved(family: str, directory: Path) -> Any:
    config = config_of(family, num_hidden_layers=NUM_LAYERS)
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * NUM_LAYERS
    module = tiny_module(config)
    module.save_pretrained(directory)
    return module


def saved_eagle3(directory: Path) -> TargetConfig:
    """Saves a target with a head; returns the configuration."""
    saved("llama", directory / "model")
    head = save_tiny_eagle3(directory / "head", directory / "model", range(0, VOCAB, 2))
    return _config_of(directory / "model", "eagle3", head)


def saved_mtp(directory: Path) -> TargetConfig:
    """Saves a target whose files have an MTP layer; returns the configuration."""
    target = mtp_target(
        "glm4_moe", VOCAB, MAX_MODEL_LEN, hidden_size=64, head_dim=HEAD_WIDTH,
        moe_intermediate_size=64,
    )  # fmt: skip
    return _config_of(MtpReference(target).save(directory), "mtp", directory)


def _config_of(directory: Path, kind: str, head: Path) -> TargetConfig:
    return TargetConfig(
        model="tiny", directory=str(directory), engine="vllm", device="cpu", dtype="float32",
        max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=2**24, max_num_seqs=64, num_threads=1,
        head="head", head_kind=kind, head_directory=str(head),
    )  # fmt: skip


def ids(num: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB, (num,), generator=torch.manual_seed(seed)).tolist())


class Pair:
    """vLLM's engine and the native engine, which must give the same results."""

    def __init__(self, ours: Any, native: Any) -> None:
        self.engines = (ours, native)

    def call(self, name: str, *arguments: Any) -> None:
        found, expected = (getattr(engine, name)(*arguments) for engine in self.engines)
        assert found == expected

    def forward(self, *steps: SequenceStep) -> None:
        logits = [engine.forward(steps) for engine in self.engines]
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)
        features = [engine.features() for engine in self.engines]
        torch.testing.assert_close(*features, atol=1e-3, rtol=1e-3)

    def draft(self, *names: str) -> None:
        """Drafts chains behind these sequences on both engines, and removes them again."""
        width = self.engines[0].draft_layer.module.width
        features = list(torch.randn(len(names), width, generator=torch.manual_seed(3)))
        lengths = [self.engines[0].length(name) for name in names]
        for depth in range(3):
            steps = [SequenceStep(name, ids(1, depth), 1) for name in names]
            found = [engine.forward_draft(steps, features) for engine in self.engines]
            torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)
            features = list(found[1])
        for name, length in zip(names, lengths, strict=True):
            self.call("keep", name, length)

    def run(self) -> None:
        """Prompts, verifications, cuts, cached prefixes, and forks in and at the end of pages."""
        first = ids(2 * PAGE_SIZE + 7)
        self.forward(SequenceStep("a", first, 2))
        self.draft("a")
        self.forward(SequenceStep("b", ids(11, 1), 11), SequenceStep("a", ids(5, 2), 5))
        self.call("keep", "a", 2 * PAGE_SIZE + 9)
        self.draft("b", "a")
        self.call("fork", "a", "branch")
        self.draft("branch")
        self.forward(SequenceStep("branch", ids(3, 4), 1), SequenceStep("a", ids(1, 5), 1))
        self.call("attach", "hit", (*first[: 2 * PAGE_SIZE], *ids(4, 6)))
        assert self.engines[0].length("hit") == 2 * PAGE_SIZE
        self.forward(SequenceStep("hit", ids(4, 6), 1), SequenceStep("one", (5,), 1))
        self.draft("hit", "one", "a", "branch", "b")


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
        tmp_path, draft_layer=head, draft_check=lambda loaded, *_: loaded,
        kv_cache_memory_bytes=8 * page_bytes,
    )  # fmt: skip
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
