"""Exchanges tensors among a model's ranks, and sends the leader's engine calls to the other ranks.

A rank is a process that has a share of the model's weights. Rank 0 is the leader.

Tensors go through `torch.distributed`, with a timeout. If every rank has its own GPU, the backend
is NCCL, otherwise Gloo. On one machine, sums of small tensors on the CPU go through the sockets of
`Links`, which are faster than Gloo."""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.engine.tensor_parallel import rank_rpc
from outrider.errors import ConfigError, Unavailable, check
from outrider.limits import COLLECTIVE_TIMEOUT_S, FRAME_OF_CALLS_BYTES_MAX
from outrider.models.sharding import Ranks

LEADER = 0


class RankGroup(Ranks):
    """The ranks of one model. A process can be in only one group at a time."""

    def __init__(
        self,
        rendezvous: rank_rpc.Rendezvous,
        rank: int,
        device: torch.device,
        timeout_s: float,
        step_timeout_s: float = COLLECTIVE_TIMEOUT_S,
        *,
        in_order: bool = False,
        store_socket: socket.socket | None = None,
    ) -> None:
        """Returns when every rank has joined. Ranks have `timeout_s` to join, then `timeout_s` to
        load, and `step_timeout_s` for each collective. `Links` adds tensors in the order of the
        ranks. If `in_order`, all other sums also have this order. All ranks must pass the same
        `in_order`. Only the leader passes the `store_socket`, from `open_rendezvous`. Raises
        `Unavailable` if a rank does not join in time."""
        self.rank = rank
        self.size = size = rendezvous.num_ranks
        self._timeout_s, self._num_waits = timeout_s, 0
        self._in_order = in_order and size > 2  # For two ranks the order does not matter.
        self._is_local = rendezvous.host == rank_rpc.LOOPBACK
        if self._is_local:
            # Without these variables, Gloo and NCCL may listen on addresses that other machines can
            # reach.
            loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        try:
            self._store = store = _store(rendezvous, timeout_s, store_socket)
            connections = _connected(store, rendezvous, rank, timeout_s)
            self.links = Links(rank, connections, step_timeout_s)
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

    def wait_for_all(self, loaded: str = "") -> None:
        """See `Ranks`. Raises `ConfigError` if the models that the ranks have `loaded` differ."""
        self._num_waits += 1
        names = [f"loaded/{self._num_waits}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(names[self.rank], loaded)
            self._store.wait(names, timedelta(seconds=self._timeout_s))
            fingerprints: list[bytes] = self._store.multi_get(names)
        except RuntimeError as error:
            raise Unavailable(
                f"a rank of the model has not loaded within {self._timeout_s:g} s: {error}"
            ) from error
        for rank, value in enumerate(fingerprints):
            if value != fingerprints[LEADER]:
                raise ConfigError(
                    f"rank {rank} has loaded another model than rank 0: their model files differ"
                )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor
        mine = tensor.cpu() if self._through_cpu else tensor
        if self._is_local and mine.nbytes <= SUM_BYTES_MAX and not mine.is_cuda:
            return self.links.all_reduce(mine).to(tensor.device)
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
        """Leaves the group. The collectives of the other ranks then fail."""
        self._store = None
        self.links.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        if mine.numel():
            _together(dist.all_gather, parts, mine)
        return parts

    def _outgoing(self, tensor: Tensor) -> Tensor:
        return (tensor.cpu() if self._through_cpu else tensor).contiguous()


def _store(
    rendezvous: rank_rpc.Rendezvous, timeout_s: float, listening: socket.socket | None = None
) -> Any:
    """The table of the ranks' addresses, which the leader serves on the socket `listening`. Any
    process can connect to this socket, so every key begins with the secret token."""
    table = dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host,
        rendezvous.store_port,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=None if listening is None else listening.detach(),
    )
    return dist.PrefixStore(rendezvous.token.hex(), table)  # type: ignore[attr-defined]


def _connected(
    store: Any, rendezvous: rank_rpc.Rendezvous, rank: int, timeout_s: float
) -> dict[int, socket.socket]:
    """Connects all ranks to the leader, and on one machine to each other. Returns the connections
    by rank."""
    if rank != LEADER and rendezvous.host != rank_rpc.LOOPBACK:
        port = int(store.get(f"port/{LEADER}"))
        return {LEADER: rank_rpc.connect(rendezvous, port, rank, timeout_s)}
    listening, port = rank_rpc.listen(rendezvous.host)
    with listening:
        store.set(f"port/{rank}", str(port))
        connections = {
            other: rank_rpc.connect(rendezvous, int(store.get(f"port/{other}")), rank, timeout_s)
            for other in range(rank)
        }
        later = range(rank + 1, rendezvous.num_ranks)
        return connections | rank_rpc.accept(listening, rendezvous.token, later, timeout_s)


def _backend(store: Any, rank: int, size: int, device: torch.device) -> str:
    if device.type != "cuda":
        return "gloo"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", uuid)
    uuids = [store.get(f"device/{other}") for other in range(size)]
    return "nccl" if len(set(uuids)) == size else "gloo"


def _together(collective: Callable[..., Any], *arguments: Any) -> None:
    try:
        collective(*arguments)
    except RuntimeError as error:
        raise Unavailable(f"a rank of the model is gone or does not answer: {error}") from error


SUM_BYTES_MAX = 64 * 2**10
"""Larger tensors are not summed through sockets. A rank may be one sum ahead of another, so the
buffers of a connection must hold two tensors of this size."""
_BUFFER_BYTES = 4 * SUM_BYTES_MAX
_HEADER = struct.Struct("q")  # a frame begins with its number of bytes


def added_up(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of two or more tensors, added from first to last. The order of `torch.sum`
    would depend on the number of elements."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


class Links:
    """A rank's connections to other ranks. Each send or receive takes at most `timeout_s`. If
    another rank is gone or does not answer in time, methods raise `Unavailable` with its number."""

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], timeout_s: float
    ) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._connections = dict(connections)
        self._selector = selectors.PollSelector()
        for other, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, other)
            rank_rpc.tune(connection)
            connection.settimeout(timeout_s)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors, of at most `SUM_BYTES_MAX` bytes each, added in
        the order of the ranks."""
        parts = tensor.new_empty((len(self._connections) + 1, *tensor.shape))
        parts[self._rank] = tensor
        stored = parts.view(-1).view(torch.uint8).numpy().data
        views = [stored[i : i + tensor.nbytes] for i in range(0, len(stored), tensor.nbytes)]
        self._send(views[self._rank])
        for rank in self._connections:
            self._receive(rank, views[rank])
        return added_up(parts.unbind())

    def send_frame(self, frame: bytes) -> None:
        """Sends a frame of engine calls from the leader to every follower."""
        check(len(frame) <= FRAME_OF_CALLS_BYTES_MAX, f"a frame of {len(frame)} bytes is too long")
        # Followers send nothing between frames, so a readable connection has ended.
        for key, _ in self._selector.select(0):
            raise _lost(key.data, ConnectionError("the connection has ended"))
        self._send(_HEADER.pack(len(frame)) + frame)

    def receive_frame(self) -> bytes | None:
        """Waits for the leader's next frame without a time limit. Returns None if the leader has
        ended, or if another thread calls `close`."""
        connection, header = self._connections[LEADER], bytearray(_HEADER.size)
        try:
            connection.settimeout(None)
            self._receive(LEADER, memoryview(header))
            (num_bytes,) = _HEADER.unpack(header)
            check(0 <= num_bytes <= FRAME_OF_CALLS_BYTES_MAX, f"a frame of {num_bytes} bytes")
            frame = bytearray(num_bytes)
            self._receive(LEADER, memoryview(frame))
            connection.settimeout(self._timeout_s)
        except (OSError, Unavailable):
            return None
        return bytes(frame)

    def _send(self, data: bytes | memoryview) -> None:
        for rank, connection in self._connections.items():
            try:
                connection.sendall(data)
            except OSError as error:
                raise _lost(rank, error) from error

    def _receive(self, rank: int, into: memoryview) -> None:
        try:
            while into:
                num_bytes = self._connections[rank].recv_into(into)
                if num_bytes == 0:
                    raise ConnectionError("the connection has ended")
                into = into[num_bytes:]
        except OSError as error:
            raise _lost(rank, error) from error

    def close(self) -> None:
        """Closes all connections, so that the other ranks' calls fail."""
        for connection in self._connections.values():
            with suppress(OSError):  # The other rank may have ended already.
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _lost(rank: int, error: OSError) -> Unavailable:
    return Unavailable(f"rank {rank} of the model is gone or does not answer: {error}")
