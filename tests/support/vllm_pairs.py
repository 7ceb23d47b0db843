"""Targets with draft layers, by vLLM and by our own engine."""

from pathlib import Path
from typing import Any

import torch

from outrider.config.deployment import TargetConfig
from outrider.interfaces.engine import SequenceStep
from tests.support.models import save_tiny_eagle3, tiny_module
from tests.support.mtp_models import MtpReference, mtp_target
from tests.support.vllm_models import HEAD_WIDTH, MAX_MODEL_LEN, VOCAB, config_of

NUM_LAYERS = 4


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
        "glm4_moe",
        VOCAB,
        MAX_MODEL_LEN,
        hidden_size=64,
        head_dim=HEAD_WIDTH,
        moe_intermediate_size=64,
    )
    return _config_of(MtpReference(target).save(directory), "mtp", directory)


def _config_of(directory: Path, kind: str, head: Path) -> TargetConfig:
    return TargetConfig(
        model="tiny",
        directory=str(directory),
        engine="vllm",
        device="cpu",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=2**24,
        max_num_seqs=64,
        num_threads=1,
        head="head",
        head_kind=kind,
        head_directory=str(head),
    )


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
