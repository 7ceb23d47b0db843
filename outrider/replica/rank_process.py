"""The processes of a model on several ranks.

The leader is the replica's own process, which serves requests (`outrider/replica/host.py`). A
follower repeats the leader's steps, and ends when the leader ends. A rank that fails leaves the
group, so that no other rank waits for it."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.config.deployment import ReplicaConfig
from outrider.engine.tensor_parallel.rank_rpc import LOOPBACK, Rendezvous, open_rendezvous
from outrider.replica.engines import build_engine
from outrider.replica.logs import log_to
from outrider.replica.ray_actor import RayActor
from outrider.replica.threads import (
    LOADING_NICENESS,
    cores_for,
    lower_priority,
    on_passing_thread,
    use_threads,
)
from outrider.transport.addresses import machine_address

if TYPE_CHECKING:
    from outrider.engine.tensor_parallel.group import RankGroup
    from outrider.interfaces.engine import Engine

_log = logging.getLogger(__name__)


class RankLeader:
    """The leader's socket, which followers use to join, and the followers' time limit."""

    def __init__(self, num_ranks: int, is_alone: bool, timeout_s: float) -> None:
        """Listens for followers: on loopback if all ranks are on this machine (`is_alone`), else on
        the machine's address. Followers have `timeout_s` to join, then `timeout_s` to load."""
        host = LOOPBACK if is_alone else machine_address()
        self.rendezvous, self.store_socket = open_rendezvous(host, num_ranks)
        self.timeout_s = timeout_s

    def close(self) -> None:
        """Closes the socket, unless a `RankGroup` has taken it over."""
        self.store_socket.close()


def _load_share(
    config: ReplicaConfig,
    num_threads: int,
    rendezvous: Rendezvous,
    rank: int,
    timeout_s: float,
    store_socket: socket.socket | None = None,
) -> tuple[Engine, RankGroup]:
    """Joins the other ranks, and loads this rank's share on the rank's device. Returns once all
    ranks have loaded the same model with the same number of pages."""
    from outrider.engine.tensor_parallel.group import RankGroup
    from outrider.models.loading import resolve_device, use_device

    config = replace(config, device=str(resolve_device(config.device, rank)))
    group = RankGroup(
        rendezvous,
        rank,
        use_device(device=config.device),
        timeout_s,
        in_order=config.deterministic,
        store_socket=store_socket,
    )
    try:
        engine = build_engine(config, num_threads, group)
        group.wait_for_all(f"{engine.info!r} {engine.page_counts().num_pages}")
    except BaseException:
        group.close()
        raise
    return engine, group


def engine_of_a_replica(
    config: ReplicaConfig, num_threads: int, leadership: RankLeader | None
) -> Engine:
    """Builds a replica's engine in this process. With `leadership`, this process is rank 0 of
    several ranks. Raises `ConfigError` if the model cannot be loaded, and `Unavailable` if a rank
    ends or does not join in time.

    Call this on a short-lived thread. If `leadership` is None, the thread gets a lower priority,
    so that loading does not slow down other replicas on the same cores. The threads of OpenVINO,
    which run steps, too, are started before. With several ranks, the thread keeps its priority,
    because the threads that it starts for steps inherit it."""
    from outrider.kernels.openvino import load_openvino
    from outrider.replica.engines import may_run_on_openvino

    if leadership is None:
        if may_run_on_openvino(config):
            load_openvino().start_threads(num_threads)
        lower_priority(LOADING_NICENESS)
        return build_engine(config, num_threads)
    from outrider.engine.tensor_parallel.parallel_engine import ParallelEngine

    engine, group = _load_share(
        config,
        num_threads,
        leadership.rendezvous,
        rank=0,
        timeout_s=leadership.timeout_s,
        store_socket=leadership.store_socket,
    )
    return ParallelEngine(engine, group.links.send_frame, group.close, config.max_num_seqs)


def threads_of_a_rank(config: ReplicaConfig, num_cores: int, num_neighbours: int) -> int:
    """Returns the number of threads of a rank. If `config` does not set it, the `num_neighbours`
    ranks on this machine share the cores equally."""
    return config.num_threads or max(1, num_cores // num_neighbours)


class RankHost(RayActor):
    """The Ray actor of a follower. Large libraries are imported only in `start`."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._group: RankGroup | None = None

    async def start(
        self,
        config: ReplicaConfig,
        rendezvous: Rendezvous,
        rank: int,
        num_neighbours: int,
        timeout_s: float,
        log_directory: str,
    ) -> None:
        """Joins the other ranks, loads this rank's share, and begins to follow the leader. This
        machine has `num_neighbours` ranks of the model. Raises `ConfigError` if the model cannot be
        loaded, and `Unavailable` if the leader does not answer within `timeout_s`."""
        num_threads = threads_of_a_rank(config, cores_for(config.role), num_neighbours)
        use_threads(num_threads, config.model_engine)
        log_to(log_directory, f"{config.log_name}-rank-{rank}", config.log_level)
        try:
            engine, group = await on_passing_thread(
                _load_share, config, num_threads, rendezvous, rank, timeout_s
            )
        except BaseException:
            self._ended.set()
            raise
        self._group = group
        self._following = asyncio.create_task(self._follow(engine, group, config.device, rank))

    async def wait(self) -> None:
        """Returns when this rank has ended. Raises the error that ended it."""
        await self._ended.wait()
        if self._following is not None:
            await self._following

    async def stop(self, grace_s: float) -> None:
        """Closes the connections to other ranks. Waits up to `grace_s` for a running step."""
        if self._group is not None:
            self._group.links.close()
        if self._following is not None:
            await asyncio.wait([self._following], timeout=grace_s)

    async def _follow(self, engine: Engine, group: RankGroup, device: str, rank: int) -> None:
        from outrider.engine.tensor_parallel.parallel_engine import follow
        from outrider.kernels.threads import start_workers
        from outrider.models.loading import resolve_device, use_device
        from outrider.replica.drivers import with_frame_room

        def run() -> None:
            use_device(device=str(resolve_device(device, rank)))
            start_workers()
            follow(group.links.receive_frame, engine)

        try:
            await asyncio.to_thread(with_frame_room, run)
            _log.info("the leader has ended, so this rank ends too")
        except Exception:
            _log.exception("this rank ends after an error")
            raise
        finally:
            group.close()
            self._ended.set()
