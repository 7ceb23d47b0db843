"""Ranks that share a model run its steps in the same way: all of them use the kernel, or none
does."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thread_ranks
import torch
from cuda_substitutes import attend_by_tables
from models import save_tiny_model

from outrider.config import TargetConfig
from outrider.engine.cuda import table_steps
from outrider.engine.cuda.table_steps import DeviceBackend
from outrider.engine.interface import SequenceStep
from outrider.engine.tensor_parallel import sharding
from outrider.models.loading import load_model
from outrider.replica.process_setup import build_engine

TOKENS = tuple(range(9))


class _Here(threading.local):
    """The rank of each thread."""

    rank = 0


_HERE = _Here()


def _built(
    directory: Path, kernel_of: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The engines of two ranks on a device with these kernels. The leader has answered as the whole
    model does."""

    def found(*_: Any, **__: Any) -> DeviceBackend:
        return DeviceBackend(kernel_of(_HERE.rank), 8)

    monkeypatch.setattr(thread_ranks, "_TIMEOUT_S", 5.0)
    monkeypatch.setattr(table_steps, "find_backend", found)
    path = save_tiny_model(directory, dtype=torch.float64)
    config = TargetConfig(directory=str(path), device="cpu", num_threads=1)
    ranks = thread_ranks.thread_ranks(2)
    # The library loads one model at a time in a process.
    shares = [sharding.load_shard(path, rank, key="size", name="tiny") for rank in ranks]
    monkeypatch.setattr(sharding, "load_shard", lambda _, rank, **__: shares[rank.rank])

    def build(rank: int) -> tuple[Any, torch.Tensor]:
        _HERE.rank = rank
        engine = build_engine(config, 1, ranks[rank])
        return engine, engine.forward([SequenceStep("a", TOKENS, len(TOKENS))])[0]

    engines, answers = zip(*thread_ranks.on_each(2, build), strict=True)
    whole: Any
    whole, _ = load_model(path)
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([TOKENS])).logits[0]
    assert (answers[0] - expected).abs().max() <= 1e-10
    return list(engines)


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_kernel_is_used_by_all_or_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """If it fails on one rank, the other ranks do not wait for its sum."""

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    def kernel_of(rank: int) -> Any:
        return broken if is_broken and rank else attend_by_tables

    engines = _built(tmp_path, kernel_of, monkeypatch)
    assert [engine._backend is None for engine in engines] == [is_broken] * 2
