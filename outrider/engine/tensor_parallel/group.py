"""Collective operations of the ranks of one model.

The operations use `torch.distributed`, with a timeout. If every rank has a GPU of its own, the
backend is NCCL. On CPUs, and on a GPU that several ranks share, the backend is Gloo, because NCCL
supports neither. On one machine, sums of small tensors on the CPU go through sockets
(`SocketAllReduce`), because sockets are faster than Gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.engine.tensor_parallel.rank_rpc import (
    LOOPBACK,
    FrameReceiver,
    FrameSender,
    OpenRendezvous,
    Rendezvous,
    accept,
    connect,
    listen,
    tune,
)
from outrider.engine.tensor_parallel.sharding import Ranks
from outrider.errors import ConfigError, Unavailable
from outrider.limits import COLLECTIVE_TIMEOUT_S

LEADER = 0


class RankGroup(Ranks):
    """The ranks of one model. A process can be in only one group at a time."""

    def __init__(
        self,
        store: Any,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        timeout_s: float,
        step_timeout_s: float,
        in_order: bool,
    ) -> None:
        """Returns when every rank has joined. Ranks may take `timeout_s` to load, and
        `step_timeout_s` for each collective. If `in_order`, all sums are added in the order of the
        ranks. Otherwise, sums of large tensors may be added in another order. Raises `Unavailable`
        if a rank does not join in time."""
        self.rank = rank
        self.size = size = rendezvous.num_ranks
        self._store = store
        self._timeout_s, self._num_waits = timeout_s, 0
        self._sockets: SocketAllReduce | None = None
        self._in_order = in_order and size > 2  # For two ranks the order does not matter.
        if rendezvous.host == LOOPBACK:
            # Without these variables, Gloo and NCCL may listen on an address that other machines
            # can reach.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ[name] = _loopback_interface()
            others = _connected(store, rendezvous, rank, "sums", step_timeout_s)
            self._sockets = SocketAllReduce(rank, others, step_timeout_s)
        try:
            backend = _backend(store, rank, size, device)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=step_timeout_s),
                device_id=device if backend == "nccl" else None,
            )
        except RuntimeError as error:
            raise Unavailable(f"the ranks of a model do not find each other: {error}") from error
        self._through_cpu = backend == "gloo" and device.type != "cpu"

    def wait_for_all(self) -> None:
        self._exchanged("")

    def check_alike(self, loaded: str) -> None:
        """Waits for all ranks like `wait_for_all`. Raises `ConfigError` if ranks pass different
        values for `loaded`."""
        leaders, *others = self._exchanged(loaded)
        for rank, found in enumerate(others, 1):
            if found != leaders:
                raise ConfigError(
                    f"rank {rank} has loaded another model: the files on its machine differ"
                )

    def _exchanged(self, value: str) -> list[bytes]:
        self._num_waits += 1
        names = [f"loaded/{self._num_waits}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(names[self.rank], value)
            self._store.wait(names, timedelta(seconds=self._timeout_s))
            found: list[bytes] = self._store.multi_get(names)
            return found
        except RuntimeError as error:
            raise Unavailable(
                f"a rank of the model has not loaded in {self._timeout_s:g} s: {error}"
            ) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor
        mine = tensor.cpu() if self._through_cpu else tensor
        if self._sockets is not None and mine.nbytes <= SUM_BYTES_MAX and not mine.is_cuda:
            return self._sockets.all_reduce(mine).to(tensor.device)
        if self._in_order:
            return added_up(self._gathered(mine.contiguous())).to(tensor.device)
        _together(dist.all_reduce, mine)
        return tensor.copy_(mine) if self._through_cpu else mine

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._gathered(self._outgoing(tensor)), dim=-1).to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor | None:
        mine = self._outgoing(tensor)
        leads = self.rank == LEADER
        parts = [torch.empty_like(mine) for _ in range(self.size)] if leads else None
        if mine.numel():
            _together(dist.gather, mine, parts, LEADER)
        return None if parts is None else torch.cat(parts, dim=-1).to(tensor.device)

    def close(self) -> None:
        """Leaves the group. From now on the collectives of the other ranks fail."""
        self._store = None
        if self._sockets is not None:
            self._sockets.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        if mine.numel():
            _together(dist.all_gather, parts, mine)
        return parts

    def _outgoing(self, tensor: Tensor) -> Tensor:
        return (tensor.cpu() if self._through_cpu else tensor).contiguous()


def lead(
    opened: OpenRendezvous,
    device: torch.device,
    timeout_s: float,
    step_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    *,
    in_order: bool = False,
) -> tuple[RankGroup, FrameSender]:
    """Waits until the followers have joined an open rendezvous. Call this once for each rendezvous.
    Followers have `timeout_s` to join, and then `timeout_s` to load. Raises `Unavailable` if a
    follower does not join in time."""
    rendezvous = opened.rendezvous
    store = _store(rendezvous, timeout_s, opened.take_store_fd())
    connections = _connected(store, rendezvous, LEADER, "frames", timeout_s)
    for connection in connections.values():
        tune(connection, step_timeout_s)
    group = RankGroup(store, rendezvous, LEADER, device, timeout_s, step_timeout_s, in_order)
    return group, FrameSender(connections)


def join(
    rendezvous: Rendezvous,
    rank: int,
    device: torch.device,
    timeout_s: float,
    step_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    *,
    in_order: bool = False,
) -> tuple[RankGroup, FrameReceiver]:
    """Joins a rendezvous as the follower `rank`. `in_order` must be the same as on the leader.
    Raises `Unavailable` if the leader does not answer within `timeout_s`."""
    try:
        store = _store(rendezvous, timeout_s)
        port = int(store.get(f"frames/{LEADER}"))
    except RuntimeError as error:
        raise Unavailable(f"the leader of the ranks does not answer: {error}") from error
    connection = connect(rendezvous, port, rank, timeout_s)
    group = RankGroup(store, rendezvous, rank, device, timeout_s, step_timeout_s, in_order)
    return group, FrameReceiver(tune(connection, None))


def _store(rendezvous: Rendezvous, timeout_s: float, listening_fd: int | None = None) -> Any:
    """The table of the ranks' addresses. The leader serves the table on the socket `listening_fd`.
    Any process may connect to the table, so every key begins with the secret token of the
    rendezvous."""
    table = dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host,
        rendezvous.store_port,
        is_master=listening_fd is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening_fd,
    )
    return dist.PrefixStore(rendezvous.token.hex(), table)  # type: ignore[attr-defined]


def _connected(
    store: Any, rendezvous: Rendezvous, rank: int, name: str, timeout_s: float
) -> dict[int, socket.socket]:
    """Connects to all earlier ranks, and waits until all later ranks have connected. The table has
    the ports, under `name`. Returns the connections by rank."""
    listening, port = listen(rendezvous.host)
    with listening:
        store.set(f"{name}/{rank}", str(port))
        found = {
            other: connect(rendezvous, int(store.get(f"{name}/{other}")), rank, timeout_s)
            for other in range(rank)
        }
        later = range(rank + 1, rendezvous.num_ranks)
        return found | accept(listening, rendezvous.token, later, timeout_s)


def _backend(store: Any, rank: int, size: int, device: torch.device) -> str:
    if device.type != "cuda":
        return "gloo"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", uuid)
    uuids = [store.get(f"device/{other}") for other in range(size)]
    return "nccl" if len(set(uuids)) == size else "gloo"


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _together(collective: Callable[..., Any], *arguments: Any) -> None:
    try:
        collective(*arguments)
    except RuntimeError as error:
        raise Unavailable(f"a rank of the model is gone or does not answer: {error}") from error


SUM_BYTES_MAX = 64 * 2**10
"""Larger tensors are not summed through sockets. A rank may be one sum ahead of another rank, so
the buffers of a connection must hold two tensors of this size."""
_BUFFER_BYTES = 4 * SUM_BYTES_MAX


def added_up(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of two or more tensors, added from first to last. The order of `torch.sum`
    would depend on the number of elements."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


class SocketAllReduce:
    """Sums tensors through one rank's connections to all other ranks."""

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], timeout_s: float
    ) -> None:
        """`connections` maps each other rank to its connection. Each send or receive may take
        `timeout_s`."""
        self._rank = rank
        self._connections = dict(sorted(connections.items()))
        for connection in self._connections.values():
            tune(connection, timeout_s)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the tensors of all ranks. A tensor has at most `SUM_BYTES_MAX` bytes.
        Every rank adds in the order of the ranks, so the sums are bit-equal. Raises `Unavailable`
        if a rank is gone or does not answer within the timeout."""
        parts = tensor.new_empty((len(self._connections) + 1, *tensor.shape))
        parts[self._rank] = tensor
        stored = parts.view(-1).view(torch.uint8).numpy().data
        views = [stored[i : i + tensor.nbytes] for i in range(0, len(stored), tensor.nbytes)]
        rank = self._rank
        try:
            for rank, connection in self._connections.items():  # noqa: B007 (named below)
                connection.sendall(views[self._rank])
            for rank, connection in self._connections.items():
                received = 0
                while received < tensor.nbytes:
                    num_bytes = connection.recv_into(views[rank][received:])
                    if num_bytes == 0:
                        raise ConnectionError("it has ended")
                    received += num_bytes
        except OSError as error:
            reason = f"rank {rank} of the model is gone or does not answer: {error}"
            raise Unavailable(reason) from error
        return added_up(parts.unbind())

    def close(self) -> None:
        """Closes the connections. From now on the sums of the other ranks fail."""
        for connection in self._connections.values():
            connection.close()
