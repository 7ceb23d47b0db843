"""One rank of a model in a process of its own: the leader's join, and the whole of a follower.

A leader is the replica's own process, which serves (`host.py`). A follower takes no requests:
it does what the leader's steps do, and ends with the leader. Where a rank cannot go on, its part in
the others' steps ends too, so that none of them waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.config import ReplicaConfig
from outrider.engine.tensor_parallel.rank_rpc import LOOPBACK, OpenRendezvous, Rendezvous
from outrider.replica.process_setup import (
    LOADING_NICENESS,
    PlacedActor,
    build_engine,
    cores_for,
    give_way,
    log_to,
    on_passing_thread,
    use_threads,
)

if TYPE_CHECKING:
    from outrider.engine.interface import Engine
    from outrider.engine.tensor_parallel.group import RankGroup
    from outrider.engine.tensor_parallel.rank_rpc import FrameReceiver

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Which rank a follower is, and where it joins."""

    rendezvous: Rendezvous
    rank: int
    num_neighbours: int
    """Ranks of the same model on the follower's machine, itself included."""


class RankLeader(OpenRendezvous):
    """What the leader of several ranks needs before it loads its share."""

    def __init__(self, num_ranks: int, num_neighbours: int, timeout_s: float) -> None:
        """Listens for the followers: on loopback where all ranks are neighbours on this machine.
        They may take `timeout_s` to join, and as long again to load."""
        alone = num_neighbours == num_ranks
        host = LOOPBACK if alone else socket.gethostbyname(socket.gethostname())
        super().__init__(host, num_ranks)
        self.num_neighbours = num_neighbours
        self._timeout_s = timeout_s

    def engine(self, config: ReplicaConfig, num_threads: int) -> Engine:
        """The engine of the shared model, once all ranks have loaded. Blocks; raises `ConfigError`,
        and `Unavailable` where a rank is gone or not there in time."""
        from outrider.engine.tensor_parallel.group import lead
        from outrider.engine.tensor_parallel.parallel_engine import ParallelEngine
        from outrider.models.loading import use_device

        device = use_device(device=config.device)
        group, followers = lead(self, device, self._timeout_s, in_order=config.deterministic)
        try:
            engine = build_engine(config, num_threads, group)
            followers.confirm(_digest(engine), self._timeout_s)
        except BaseException:
            followers.close()
            group.close()
            raise
        return ParallelEngine(engine, followers, config.max_num_seqs, group.close)


def engine_of_a_replica(
    config: ReplicaConfig,
    num_threads: int,
    leadership: RankLeader | None,
) -> Engine:
    """The engine that a configuration names, on this process alone or on all ranks. Blocks; raises
    as `build_engine` and `RankLeader.engine`. Call it on a passing thread: without ranks the
    calling thread gives way to replicas that serve on the same cores. Threads that ranks start for
    their sums keep their priority."""
    if leadership is None:
        give_way(LOADING_NICENESS)
        return build_engine(config, num_threads)
    return leadership.engine(config, num_threads)


def threads_of_a_rank(
    config: ReplicaConfig, num_cores: int, ranks: RankLeader | RankAssignment | None
) -> int:
    """What the configuration says, else an equal part of the cores for each rank on the machine."""
    return config.num_threads or max(1, num_cores // (1 if ranks is None else ranks.num_neighbours))


class RankHost(PlacedActor):
    """A follower; an actor, as the replica that leads it is. Everything heavy is imported by
    `start`, so that finding a place is quick."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._group: RankGroup | None = None
        self._frames: FrameReceiver | None = None
        self._device = ""

    async def start(
        self,
        config: ReplicaConfig,
        assignment: RankAssignment,
        timeout_s: float,
        log_directory: str,
    ) -> None:
        """Joins, loads this rank's share and follows; returns once it is ready for steps. Raises
        `ConfigError`, and `Unavailable` where the leader does not answer within `timeout_s`."""
        num_threads = threads_of_a_rank(config, cores_for(config.role), assignment)
        use_threads(num_threads, config.model_engine)
        log_to(log_directory, f"{config.log_name}-rank-{assignment.rank}", config.log_level)
        try:
            engine = await on_passing_thread(self._join, config, num_threads, assignment, timeout_s)
        except BaseException:
            self._leave()
            raise
        self._following = asyncio.create_task(self._follow(engine))

    async def wait(self) -> None:
        """Returns when the leader has ended. Raises what this rank could not go on for."""
        await self._ended.wait()
        if self._following is not None:
            await self._following

    async def stop(self, grace_s: float) -> None:
        """Follows no more; a step that runs has `grace_s` to end."""
        if self._frames is not None:
            self._frames.close()
        if self._following is not None:
            await asyncio.wait([self._following], timeout=grace_s)

    def _join(
        self,
        config: ReplicaConfig,
        num_threads: int,
        assignment: RankAssignment,
        timeout_s: float,
    ) -> Engine:
        from outrider.engine.tensor_parallel.group import join
        from outrider.models.loading import resolve_device, use_device

        self._device = str(resolve_device(config.device, assignment.rank))
        config = replace(config, device=self._device)
        device = use_device(device=self._device)
        self._group, self._frames = join(
            assignment.rendezvous, assignment.rank, device, timeout_s, in_order=config.deterministic
        )
        engine = build_engine(config, num_threads, self._group)
        self._frames.confirm(_digest(engine))
        return engine

    async def _follow(self, engine: Engine) -> None:
        from outrider.engine.tensor_parallel.parallel_engine import follow
        from outrider.engine.threads import start_workers
        from outrider.models.loading import use_device

        def run() -> None:
            if self._frames is not None:
                use_device(device=self._device)
                start_workers()
                follow(self._frames, engine)

        try:
            await asyncio.to_thread(run)
            _log.info("the leader has ended, and this rank with it")
        except Exception:
            _log.exception("this rank cannot go on")
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._frames is not None:
            self._frames.close()
        if self._group is not None:
            self._group.close()
        self._ended.set()


def _digest(engine: Engine) -> bytes:
    """Names what an engine runs, and in how many pages."""
    described = f"{engine.info!r} {engine.page_counts().num_pages}"
    return hashlib.blake2b(described.encode(), digest_size=32).digest()
