"""How the ranks of one model find each other, and what they do together in a step.

Sums and gathers go through `torch.distributed`, with a timeout: NCCL where every rank has a GPU of
its own, Gloo on CPUs and where ranks share a GPU, which NCCL refuses. What is to be done goes as
frames from the leader to its followers (`frames.py`).
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from outrider.engine.parallel.frames import FrameReceiver, FrameSender, read_exactly, tune
from outrider.errors import ConfigError, Unavailable, check
from outrider.limits import COLLECTIVE_TIMEOUT_S, TENSOR_PARALLEL_SIZE_MAX

LEADER: Final = 0
LOOPBACK: Final = "127.0.0.1"
_TOKEN_BYTES: Final = 32
_HELLO: Final = struct.Struct(f"{_TOKEN_BYTES}sq")
"""Token and rank of a follower that joins."""
_LEAST_WAIT_S: Final = 0.01
_HELLO_TIMEOUT_S: Final = 5.0
"""How long one that has connected may take to say who it is."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one model meet. Whoever knows the token may join."""

    host: str
    store_port: int
    frames_port: int
    num_ranks: int
    token: bytes = field(repr=False)


class RankGroup:
    """The ranks of one model; implements `Ranks`. One in a process at a time."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Returns when every rank is there. Raises `Unavailable` where one is not in time."""
        self.rank = rank
        self.size = size
        try:
            backend = _backend(store, rank, size, device)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if backend == "nccl" else None,
            )
        except RuntimeError as error:
            raise Unavailable(f"the ranks of a model do not find each other: {error}") from error
        self._through_cpu = backend == "gloo" and device.type != "cpu"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Ranks.all_reduce`. Raises `Unavailable` where a rank is gone."""
        if tensor.numel() == 0:
            return tensor
        mine = tensor.cpu() if self._through_cpu else tensor
        try:
            dist.all_reduce(mine)
        except RuntimeError as error:
            raise _lost(error) from error
        return tensor.copy_(mine) if self._through_cpu else mine

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Ranks.all_gather`. Raises `Unavailable` where a rank is gone."""
        mine = self._outgoing(tensor)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        if mine.numel():
            try:
                dist.all_gather(parts, mine)
            except RuntimeError as error:
                raise _lost(error) from error
        return torch.cat(parts, dim=-1).to(tensor.device)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `Ranks.gather`. Raises `Unavailable` where a rank is gone."""
        mine = self._outgoing(tensor)
        leads = self.rank == LEADER
        parts = [torch.empty_like(mine) for _ in range(self.size)] if leads else None
        if mine.numel():
            try:
                dist.gather(mine, parts, dst=LEADER)
            except RuntimeError as error:
                raise _lost(error) from error
        return None if parts is None else torch.cat(parts, dim=-1).to(tensor.device)

    def close(self) -> None:
        """Leaves; the others' collectives fail from here on."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.cpu() if self._through_cpu else tensor).contiguous()


class OpenMeeting:
    """The leader's side of a meeting, from before its followers know of it."""

    def __init__(self, host: str, num_ranks: int) -> None:
        """Listens on `host` alone. Raises `ConfigError` where that is no address to listen on."""
        check(1 < num_ranks <= TENSOR_PARALLEL_SIZE_MAX, f"a meeting of {num_ranks} ranks")
        self._store_socket, store_port = _listen(host)
        self._frames_socket, frames_port = _listen(host)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.meeting = Meeting(host, store_port, frames_port, num_ranks, token)

    def join(
        self, device: torch.device, timeout_s: float, step_timeout_s: float = COLLECTIVE_TIMEOUT_S
    ) -> tuple[RankGroup, FrameSender]:
        """Waits for the followers, once. Raises `Unavailable` where one does not come within
        `timeout_s`."""
        meeting = self.meeting
        connections = self._accept(timeout_s, step_timeout_s)
        store = _store(meeting, timeout_s, self._store_socket.detach())
        group = _join_group(store, meeting, LEADER, device, step_timeout_s)
        return group, FrameSender(connections)

    def close(self) -> None:
        """Listens no more."""
        self._store_socket.close()
        self._frames_socket.close()

    def _accept(self, timeout_s: float, step_timeout_s: float) -> dict[int, socket.socket]:
        end = time.monotonic() + timeout_s
        followers = range(1, self.meeting.num_ranks)
        found: dict[int, socket.socket] = {}
        with self._frames_socket as listening:
            while missing := [rank for rank in followers if rank not in found]:
                listening.settimeout(max(_LEAST_WAIT_S, end - time.monotonic()))
                try:
                    connection, _ = listening.accept()
                except TimeoutError as error:
                    raise Unavailable(
                        f"rank {missing[0]} has not joined within {timeout_s:g} s"
                    ) from error
                rank = self._greet(connection)
                if rank in missing:
                    found[rank] = tune(connection, step_timeout_s)
                else:
                    connection.close()
        return found

    def _greet(self, connection: socket.socket) -> int | None:
        """The rank of who has connected; None for a stranger."""
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            hello = read_exactly(connection, _HELLO.size)
        except TimeoutError:
            return None
        if hello is None:
            return None
        token, rank = _HELLO.unpack(hello)
        return int(rank) if hmac.compare_digest(token, self.meeting.token) else None


def join(
    meeting: Meeting,
    rank: int,
    device: torch.device,
    timeout_s: float,
    step_timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> tuple[RankGroup, FrameReceiver]:
    """Joins a meeting as the follower `rank`. Raises `Unavailable` where the leader does not answer
    within `timeout_s`."""
    try:
        connection = socket.create_connection((meeting.host, meeting.frames_port), timeout_s)
        connection.sendall(_HELLO.pack(meeting.token, rank))
        store = _store(meeting, timeout_s)
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"the leader of the ranks does not answer: {error}") from error
    group = _join_group(store, meeting, rank, device, step_timeout_s)
    return group, FrameReceiver(tune(connection, None))


def _store(meeting: Meeting, timeout_s: float, listening_fd: int | None = None) -> Any:
    """The table through which ranks learn each other's addresses; the leader serves it."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host,
        meeting.store_port,
        is_master=listening_fd is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening_fd,
    )


def _join_group(
    store: Any, meeting: Meeting, rank: int, device: torch.device, timeout_s: float
) -> RankGroup:
    if meeting.host == LOOPBACK:
        # Gloo would else listen on whatever address the machine's name has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    return RankGroup(store, rank, meeting.num_ranks, device, timeout_s)


def _backend(store: Any, rank: int, size: int, device: torch.device) -> str:
    """NCCL or Gloo; the ranks tell each other which device they have."""
    if device.type != "cuda":
        return "gloo"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", uuid)
    uuids = [store.get(f"device/{other}") for other in range(size)]
    return "nccl" if len(set(uuids)) == size else "gloo"


def _listen(host: str) -> tuple[socket.socket, int]:
    try:
        listening = socket.create_server((host, 0), backlog=TENSOR_PARALLEL_SIZE_MAX)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    return listening, int(listening.getsockname()[1])


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _lost(error: RuntimeError) -> Unavailable:
    return Unavailable(f"a rank of the model is gone or does not answer: {error}")
