"""Sums of a few kilobytes, which the ranks of one machine make without Gloo."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from thread_ranks import on_each

from outrider.engine.tensor_parallel.group import (
    SUM_BYTES_MAX,
    SocketAllReduce,
    added_up,
)
from outrider.errors import Unavailable

SIZE = 3
TIMEOUT_S = 10.0


@contextmanager
def _meshes(timeout_s: float = TIMEOUT_S) -> Iterator[list[SocketAllReduce]]:
    """Three ranks in one process."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(SIZE)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for rank in range(SIZE):
            for other in range(rank):
                connections[rank][other] = socket.create_connection(listening.getsockname())
                connections[other][rank] = listening.accept()[0]
    meshes = [SocketAllReduce(rank, connections[rank], timeout_s) for rank in range(SIZE)]
    try:
        yield meshes
    finally:
        for mesh in meshes:
            mesh.close()


def _parts(rank: int, dtype: torch.dtype, num_sums: int) -> torch.Tensor:
    """What a rank adds to each of the sums, every one as large as may be."""
    random = torch.Generator().manual_seed(rank)
    width = SUM_BYTES_MAX // dtype.itemsize // 4
    return torch.randn(num_sums, 4, width, generator=random, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_added_up_alike_alone_and_beside_others(
    dtype: torch.dtype, num_ranks: int
) -> None:
    """Of odd widths too, whose last elements go through other code in a sum over a dimension."""
    parts = torch.randn(
        num_ranks, 7, 45, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(dtype)
    whole = added_up(parts.unbind())
    for row in range(7):
        alone = added_up(parts[:, row : row + 1].unbind())
        assert torch.equal(alone, whole[row : row + 1])
    torch.testing.assert_close(whole, parts.sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_rank_gets_the_same_bits(dtype: torch.dtype) -> None:
    """Of many sums of the largest size, which a rank may begin while another still reads the last;
    nobody waits for a reader."""
    num_sums = 40

    def run(rank: int) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [meshes[rank].all_reduce(part) for part in _parts(rank, dtype, num_sums)]

    with _meshes() as meshes:
        sums = on_each(SIZE, run)
    expected = torch.stack([_parts(rank, dtype, num_sums) for rank in range(SIZE)]).sum(0)
    for found in sums:
        assert torch.equal(torch.stack(found), expected)


def test_a_rank_that_is_gone_or_silent_is_noticed() -> None:
    """By its number; the silent one after the timeout, although others have answered."""
    with _meshes() as meshes:
        meshes[2].close()
        with pytest.raises(Unavailable, match="rank 2"):
            on_each(2, lambda rank: meshes[rank].all_reduce(torch.zeros(4)))
    with _meshes(timeout_s=0.5) as meshes:
        start = time.monotonic()
        with pytest.raises(Unavailable, match="rank 2"):
            on_each(2, lambda rank: meshes[rank].all_reduce(torch.zeros(4)))
        assert 0.4 < time.monotonic() - start < TIMEOUT_S
