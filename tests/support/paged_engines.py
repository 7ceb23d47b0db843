"""Makes paged engines for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draft_service import feature_drafter
from outrider.engine import paged_engine
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.kernels.cpu import KernelsUnavailable, PaceKernels, load_pace
from outrider.kernels.openvino import OpenVino, load_openvino
from outrider.models.module_replacement import NativeRMSNorm, speed_up
from tests.support.models import MAX_MODEL_LEN
from tests.support.pages import check_pages
from tests.support.reference_kernels import ReferenceKernels

VOCAB = 32
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2")
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
"""Sizes that `PaceKernels` take."""


class EngineMaker:
    def __init__(self, fused: bool = False) -> None:
        """With `fused`, engines run on `ReferenceKernels` if they can."""
        self.made: list[PagedEngine] = []
        self.fused = fused

    def __call__(
        self,
        module: Any,
        *,
        max_num_seqs: int = 16,
        num_bytes: int = 2**22,
        max_model_len: int = MAX_MODEL_LEN,
        **options: Any,
    ) -> PagedEngine:
        dtype = str(module.dtype).removeprefix("torch.")
        kernels = fuse(module) if self.fused else None
        info = ModelInfo("tiny", VOCAB, max_model_len, dtype, (), "", "")
        engine = PagedEngine(
            module,
            info,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=num_bytes,
            kernels=kernels,
            **options,
        )
        assert engine.kv_cache_bytes <= num_bytes
        self.made.append(engine)
        return engine


def pace_kernels() -> PaceKernels:
    """The product's own kernels. Skips the test where they cannot be used."""
    try:
        return load_pace()
    except KernelsUnavailable as error:
        pytest.skip(f"no fused kernels: {error}")


def openvino_kernels() -> OpenVino:
    """Skips the test where OpenVINO cannot be used."""
    try:
        return load_openvino()
    except KernelsUnavailable as error:
        pytest.skip(f"no OpenVINO: {error}")


def fuse(module: Any) -> ReferenceKernels:
    """Replaces the module's layers so that kernels can run them. The kernels compute norms and GELU
    exactly in float64, so the library's are replaced by exact ones."""
    for parent in list(module.modules() if module.dtype == torch.float64 else ()):
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            if kind.endswith("RMSNorm"):
                eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
                setattr(parent, name, NativeRMSNorm(child.weight, eps, float("Gemma" in kind)))
            elif kind == "GELUTanh":
                setattr(parent, name, torch.nn.GELU())
    kernels = ReferenceKernels(module.dtype)
    speed_up(module, kernels=kernels)
    return kernels


@contextmanager
def checked_engines(fused: bool = False) -> Iterator[EngineMaker]:
    """Makes engines. At the end checks that the pages of every engine are consistent."""
    maker = EngineMaker(fused)
    yield maker
    for engine in maker.made:
        check_pages(engine)


def shorten_pages(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Makes pages short, so that a few new tokens need further pages."""
    for module in (feature_drafter, paged_engine):
        monkeypatch.setattr(module, "PAGE_SIZE", size)


def ids(num: int, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (num,), generator=generator).tolist())


def run(engine: PagedEngine, name: str, tokens: tuple[int, ...], rows: int) -> torch.Tensor:
    return engine.forward([SequenceStep(name, tokens, rows)])[0]


def dense(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] of a module that no engine uses."""
    with torch.no_grad():
        ids = torch.tensor([tokens], device=module.device)
        return module(input_ids=ids, use_cache=False).logits[0]


def gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return (actual - expected).abs().max().item()
