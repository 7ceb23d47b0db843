"""Ranks that are threads of one process, as starting processes is slow."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_TIMEOUT_S = 30.0


class ThreadRank:
    """See `outrider.models.sharding.Ranks`."""

    def __init__(self, rank: int, barrier: threading.Barrier, shown: dict[int, Any]) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._shown = shown

    def wait_for_all(self) -> None:
        self._barrier.wait(_TIMEOUT_S)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=-1)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self._exchange(tensor)
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._shown[self.rank] = tensor.clone()
        self._barrier.wait(_TIMEOUT_S)
        parts = [self._shown[rank] for rank in range(self.size)]
        self._barrier.wait(_TIMEOUT_S)
        return parts


def thread_ranks(size: int) -> list[ThreadRank]:
    barrier, shown = threading.Barrier(size), dict[int, Any]()
    return [ThreadRank(rank, barrier, shown) for rank in range(size)]


def on_each(size: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work` for all ranks, which run it at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
