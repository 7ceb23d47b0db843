"""Ranks in processes of their own, and their small sums."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outrider.engine.tensor_parallel import rank_rpc
from outrider.engine.tensor_parallel.group import LEADER, RankGroup, _store, added_up
from outrider.engine.tensor_parallel.rank_rpc import LOOPBACK, accept, connect, open_rendezvous
from outrider.errors import ConfigError, Unavailable
from tests.support.rank_processes import JOIN_S, LARGE, add_up, processes

CPU = torch.device("cpu")
STEP_TIMEOUT_S = 2.0
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ONE_STEP = b"1"


def _lead(rendezvous: Any, store_socket: Any, timeout_s: float = JOIN_S) -> RankGroup:
    limits = (timeout_s, STEP_TIMEOUT_S)
    return RankGroup(rendezvous, LEADER, CPU, *limits, store_socket=store_socket)


@contextmanager
def _pair() -> Iterator[Any]:
    """The leader's group, and the follower's process."""
    opened = open_rendezvous(LOOPBACK, 2)
    with processes(add_up, [(opened[0], 1, STEP_TIMEOUT_S)]) as [follower]:
        group = _lead(*opened)
        try:
            group.wait_for_all()
            yield group, follower
        finally:
            group.close()


def _step(group: Any) -> None:
    group.links.send_frame(ONE_STEP)
    size = group.size
    for num_numbers in (3, LARGE):
        total = group.all_reduce(torch.zeros(num_numbers, dtype=torch.float32))
        assert total.shape == (num_numbers,)
        assert set(total.tolist()) == {size * (size - 1) / 2}
    for gathered in (group.all_gather(torch.zeros(2, 1)), group.gather(torch.zeros(2, 1))):
        assert gathered.tolist() == [list(map(float, range(size)))] * 2


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ranks_sum_and_gather_and_wait_without_work_beyond_every_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On loopback, whatever is set for ranks on several machines. The others wait for a rank that
    loads for longer than the timeout of a step. Followers that are idle for longer than that use no
    CPU, and then take part at once. Followers end with their leader."""
    for name in INTERFACES:
        monkeypatch.setenv(name, "nowhere0")
    opened = open_rendezvous(LOOPBACK, 3)
    arguments = [
        (opened[0], rank, STEP_TIMEOUT_S, load_s)
        for rank, load_s in ((1, 0.0), (2, 1.1 * STEP_TIMEOUT_S))
    ]
    with processes(add_up, arguments) as followers:
        group = _lead(*opened)
        assert {os.environ[name][:2] for name in INTERFACES} == {"lo"}
        with pytest.raises(ConfigError, match="rank 1 has loaded another model"):
            group.wait_for_all("what no follower names")
        _step(group)
        before = [_cpu_seconds(follower.pid) for follower in followers]
        time.sleep(1.2 * STEP_TIMEOUT_S)
        after = [_cpu_seconds(follower.pid) for follower in followers]
        assert all(b - a < 0.1 * STEP_TIMEOUT_S for a, b in zip(before, after, strict=True))
        _step(group)
        group.close()
        for follower in followers:
            follower.join(JOIN_S)
        assert [follower.exitcode for follower in followers] == [0, 0]


def test_the_table_shows_nothing_without_the_token() -> None:
    rendezvous, store_socket = open_rendezvous(LOOPBACK, 2)
    ours = _store(rendezvous, JOIN_S, store_socket)
    ours.set("loaded/0", "")
    assert _store(rendezvous, JOIN_S).check(["loaded/0"])
    other = replace(rendezvous, token=bytes(32))
    assert not _store(other, JOIN_S).check(["loaded/0"])
    stranger = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, rendezvous.store_port, wait_for_workers=False
    )
    assert not stranger.check(["loaded/0"])


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still_fails_the_step_within_its_timeout(end: int) -> None:
    with _pair() as (group, follower):
        _step(group)
        os.kill(follower.pid, end)
        if end == signal.SIGKILL:
            follower.join(JOIN_S)
            with pytest.raises(Unavailable, match="the connection has ended"):
                group.links.send_frame(ONE_STEP)
        for num_numbers in (3, LARGE):
            start = time.monotonic()
            with pytest.raises(Unavailable):
                group.all_reduce(torch.zeros(num_numbers))
            took_s = time.monotonic() - start
            assert took_s < (STEP_TIMEOUT_S / 2 if end == signal.SIGKILL else 3 * STEP_TIMEOUT_S)


def test_a_rank_that_never_comes_and_a_leader_that_is_not_there() -> None:
    rendezvous, store_socket = open_rendezvous(LOOPBACK, 2)
    with pytest.raises(Unavailable, match=r"rank 1 has not joined within 0\.2 s"):
        _lead(rendezvous, store_socket, 0.2)
    with pytest.raises(Unavailable, match="do not find each other"):
        RankGroup(rendezvous, 1, CPU, 1.0)


def test_strangers_do_not_join_or_prolong_the_wait_for_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sends another token. The others are silent, and more than are kept."""
    monkeypatch.setattr(rank_rpc, "_STRANGERS_MAX", 2)
    rendezvous, listening = open_rendezvous(LOOPBACK, 2)
    port = rendezvous.store_port
    strangers = [socket.create_connection((LOOPBACK, port)) for _ in range(3)]
    strangers[0].sendall(bytes(32) + (1).to_bytes(8, "little"))
    start = time.monotonic()
    with listening:
        with pytest.raises(Unavailable, match=r"rank 1 has not joined within 0\.2 s"):
            accept(listening, rendezvous.token, [1], 0.2)
        strangers += [socket.create_connection((LOOPBACK, port)) for _ in range(5)]
        with connect(rendezvous, port, 1, 4.0) as ours:
            found = accept(listening, rendezvous.token, [1], 4.0)
            assert found[1].getpeername() == ours.getsockname()
    assert time.monotonic() - start < 4.0
    for connection in (*strangers, found[1]):
        connection.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_added_up_alike_alone_and_beside_others(
    dtype: torch.dtype, num_ranks: int
) -> None:
    """Also with odd widths, whose last elements are summed by other code over a dimension."""
    parts = torch.randn(
        num_ranks, 7, 45, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(dtype)
    whole = added_up(parts.unbind())
    for row in range(7):
        alone = added_up(parts[:, row : row + 1].unbind())
        assert torch.equal(alone, whole[row : row + 1])
    torch.testing.assert_close(whole, parts.sum(0))
