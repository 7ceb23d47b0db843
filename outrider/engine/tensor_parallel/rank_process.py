"""Processes of a model on several ranks: how the leader starts, and all that a follower does.

The leader is the replica's own process, which serves (`host.py`). A follower takes no requests: it
repeats the leader's steps, and ends with the leader. A rank that cannot go on leaves the group, so
that no other rank waits for it.
"""

from __future__ import annotations

import asyncio
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
    """The rank of a follower, and where it joins the others."""

    rendezvous: Rendezvous
    rank: int
    num_neighbours: int
    """Ranks of the model on this machine, this one included."""


class RankLeader(OpenRendezvous):
    """The leader of several ranks, from before it loads its share."""

    def __init__(self, num_ranks: int, num_neighbours: int, timeout_s: float) -> None:
        """Listens for the followers, on loopback if all ranks are on this machine. They have
        `timeout_s` to join, and as long again to load."""
        alone = num_neighbours == num_ranks
        host = LOOPBACK if alone else socket.gethostbyname(socket.gethostname())
        super().__init__(host, num_ranks)
        self.num_neighbours = num_neighbours
        self._timeout_s = timeout_s

    def engine(self, config: ReplicaConfig, num_threads: int) -> Engine:
        """The engine of the shared model, once all ranks have loaded. Blocks; raises `ConfigError`,
        and `Unavailable` if a rank ends or does not join in time."""
        from outrider.engine.tensor_parallel.group import lead
        from outrider.engine.tensor_parallel.parallel_engine import ParallelEngine
        from outrider.models.loading import use_device

        device = use_device(device=config.device)
        group, followers = lead(self, device, self._timeout_s, in_order=config.deterministic)
        try:
            engine = build_engine(config, num_threads, group)
            group.check_alike(_loaded_by(engine))
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
    """The engine that a configuration names, in this process or on all ranks. Blocks; raises what
    `build_engine` and `RankLeader.engine` raise. Call it on a short-lived thread: without ranks it
    lowers the calling thread's priority, for replicas that serve on the same cores. With ranks it
    does not, as threads for their sums would inherit it."""
    if leadership is None:
        give_way(LOADING_NICENESS)
        return build_engine(config, num_threads)
    return leadership.engine(config, num_threads)


def threads_of_a_rank(
    config: ReplicaConfig, num_cores: int, ranks: RankLeader | RankAssignment | None
) -> int:
    """`num_threads` of the configuration, or else an equal share of the cores for each rank on the
    machine."""
    return config.num_threads or max(1, num_cores // (1 if ranks is None else ranks.num_neighbours))


class RankHost(PlacedActor):
    """A follower; an actor, like the replica that leads it. `start` imports everything heavy, so
    that placing the actor is fast."""

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
        `ConfigError`, and `Unavailable` if the leader does not answer within `timeout_s`."""
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
        """Returns when the leader has ended. Raises the error if this rank had to stop."""
        await self._ended.wait()
        if self._following is not None:
            await self._following

    async def stop(self, grace_s: float) -> None:
        """Stops following; a running step has `grace_s` to end."""
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
        self._group.check_alike(_loaded_by(engine))
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


def _loaded_by(engine: Engine) -> str:
    """What an engine runs, and its number of pages."""
    return f"{engine.info!r} {engine.page_counts().num_pages}"
