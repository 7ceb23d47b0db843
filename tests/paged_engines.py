"""Makes paged engines for tests, and checks what each of them must keep to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from models import MAX_MODEL_LEN

from outrider.engine.cuda.acceleration import Acceleration
from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine

VOCAB = 32


class EngineMaker:
    """Remembers what it makes."""

    def __init__(self) -> None:
        self.made: list[tuple[PagedEngine, int]] = []

    def __call__(
        self,
        module: Any,
        *,
        max_num_seqs: int = 16,
        num_bytes: int = 2**22,
        page_size: int = 16,
        max_model_len: int = MAX_MODEL_LEN,
        narrow_threads: int | None = None,
        deterministic: bool = False,
        acceleration: Acceleration | None = None,
    ) -> PagedEngine:
        dtype = str(module.dtype).removeprefix("torch.")
        info = ModelInfo("tiny", VOCAB, max_model_len, dtype, (), "", "")
        engine = PagedEngine(
            module,
            info,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=num_bytes,
            page_size=page_size,
            narrow_threads=narrow_threads,
            deterministic=deterministic,
            acceleration=acceleration,
        )
        self.made.append((engine, num_bytes))
        return engine


@contextmanager
def checked_engines() -> Iterator[EngineMaker]:
    """In the end every engine's pages are in order, and its tensors hold the bytes of its pages,
    no more than it was given."""
    maker = EngineMaker()
    yield maker
    for engine, num_bytes in maker.made:
        engine.check_integrity()
        layers = engine._cache.layers
        held = sum(t.untyped_storage().nbytes() for layer in layers for t in vars(layer).values())
        size = engine._page_size
        slot_bytes = sum(
            t.shape[0] * t.shape[2] * t.element_size()
            for layer in layers
            for t in vars(layer).values()
        )
        num_pages = engine.page_counts().num_pages + engine._num_spare_pages
        assert held == num_pages * size * slot_bytes <= num_bytes


def ids(num: int, seed: int = 1) -> tuple[int, ...]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (num,), generator=generator).tolist())


def run(
    engine: PagedEngine,
    name: str,
    tokens: tuple[int, ...],
    rows: int,
    parents: tuple[int, ...] = (),
) -> torch.Tensor:
    """One step of one sequence."""
    return engine.forward([SequenceStep(name, tokens, rows, parents)])[0]


def dense(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] of a module that no engine has."""
    with torch.no_grad():
        ids = torch.tensor([tokens], device=module.device)
        return module(input_ids=ids, use_cache=False).logits[0]


def gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference."""
    assert actual.shape == expected.shape
    return (actual - expected).abs().max().item()
