"""Starts one coordinator, one target and one draft as Ray actors, and stops them.

| step | waits for |
| --- | --- |
| Ray, Redis and the models' files, at the same time | each other |
| a place for every actor | `startup_timeout_s` |
| target and draft load their models, at the same time | `model_timeout_s` |
| the coordinator, given their addresses, says that it serves | `model_timeout_s` |

Stopping goes the other way round, whatever start-up had reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from coordinator.actor import CoordinatorActor, connect_store
from draft_service.actor import DraftActor
from outrider.client import Client
from outrider.config import DeploymentConfig
from outrider.engine.parallel.meeting import Meeting
from outrider.errors import ConfigError, OutriderError, SettingError, Unavailable
from outrider.hosting import available_cores
from outrider.rank_host import RankHost, Seat
from outrider.replica_host import Traffic
from outrider.sessions.embedded import EmbeddedRedis
from outrider.settings import blaming
from target_service.actor import TargetActor

from .cluster import Actor, Cluster
from .models import resolve_models, tokenizer_warning
from .placement import (
    Placement,
    are_apart,
    look_ahead_outcomes,
    plan_placement,
    siblings_of_a_place,
)
from .preflight import check_before_start

_log = logging.getLogger(__name__)

ECHO_S: Final = 2.0
"""How long after one rank of a model fails to start another may, before the reason is told."""
STOP_CALL_TIMEOUT_S: Final = 5.0
"""What an actor may take to stop beyond the time it was given for running requests."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the services answer, each HOST:PORT."""

    coordinator: str
    target: str
    draft: str
    """Empty where the target drafts for itself."""


class Deployment:
    """The actors of one deployment. Use it as an async context manager, or `start` and `stop`."""

    def __init__(
        self, config: DeploymentConfig, state: Path, report: Callable[[str], None] | None = None
    ) -> None:
        """`state` is a directory that is the deployment's own: its logs and the embedded Redis's
        data go there. `report` is told what start-up does, one line at a time."""
        self.config = config
        self._state = state
        self._report = report or _log.info
        self._cluster = Cluster(config.address)
        self._redis: EmbeddedRedis | None = None
        self._actors: dict[str, Actor] = {}
        self._followers: list[Actor] = []
        self._endpoints: Endpoints | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def endpoints(self) -> Endpoints:
        """Where it answers. Raises `Unavailable` before it has started."""
        if self._endpoints is None:
            raise Unavailable("the deployment has not started")
        return self._endpoints

    @property
    def redis(self) -> EmbeddedRedis | None:
        """The embedded server; None where sessions are kept elsewhere."""
        return self._redis

    def actor(self, role: str) -> Actor:
        """The actor of a role: `coordinator`, `target` or `draft`."""
        return self._actors[role]

    def followers(self, role: str) -> list[Actor]:
        """The other ranks of a role's model."""
        return [actor for actor in self._followers if actor.role == role]

    async def traffic(self, role: str) -> Traffic:
        """What crossed the streams of the target or of the draft."""
        found: Traffic = await self._actors[role].call("traffic")
        return found

    async def start(self) -> Endpoints:
        """Starts everything; ready when the coordinator serves. Raises `ConfigError` and other
        errors of `outrider.errors`, with everything stopped again."""
        try:
            return await self._start()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _start(self) -> Endpoints:
        self._report("starting Ray and Redis, finding the models")
        config = await self._prepare()
        warning = tokenizer_warning(config.coordinator.tokenizer_directory)
        if warning is not None:
            self._report(warning)
        placement = plan_placement(config, self._cluster.resources())
        await self._place(placement)
        config = placement.config
        self._report(f"loading {config.target.model}, and {config.draft.model} as its draft")
        target, draft = await asyncio.gather(
            self._begin("target", config.target),
            _nowhere() if placement.draft is None else self._begin("draft", config.draft),
        )
        self._report("starting the coordinator")
        apart = are_apart(
            config,
            same_node=len({actor.place.node for actor in self._models()}) == 1,
            num_cores=available_cores() if self._cluster.local else 0,
        )
        config = replace(
            config,
            coordinator=replace(
                config.coordinator,
                drafting_delays=not apart,
                look_ahead=look_ahead_outcomes(config, apart=apart),
                draft_siblings=siblings_of_a_place(config),
            ),
        )
        coordinator = await self._begin(
            "coordinator",
            replace(config.coordinator, target_address=target, draft_address=draft),
        )
        async with Client(coordinator) as client:
            if not await client.healthy():
                raise Unavailable(f"the coordinator at {coordinator} does not say that it serves")
        self.config = config
        self._endpoints = Endpoints(coordinator, target, draft)
        return self._endpoints

    async def _prepare(self) -> DeploymentConfig:
        """Ray, Redis and the models' files; the configuration with their places."""
        if self._cluster.local:
            check_before_start(self.config)
        if self.config.coordinator.redis_url:
            # The coordinator will connect again: a wrong URL should not cost a model's loading.
            with blaming("redis_url"):
                await (await connect_store(self.config.coordinator)).close()
        _, redis_url, config = await _all(
            self._cluster.connect(),
            asyncio.to_thread(self._start_redis),
            asyncio.to_thread(resolve_models, self.config),
        )
        found: DeploymentConfig = config
        return replace(found, coordinator=replace(found.coordinator, redis_url=redis_url))

    def _start_redis(self) -> str:
        """The URL of the session store."""
        if self.config.coordinator.redis_url:
            return self.config.coordinator.redis_url
        if not self._cluster.local:
            raise SettingError(
                "redis_url",
                "actors on another cluster do not reach an embedded Redis; give a server's URL",
            )
        self._redis = EmbeddedRedis(self._state / "redis")
        self._redis.start()
        return self._redis.url

    async def _place(self, placement: Placement) -> None:
        self._report("waiting for a place for every actor")
        demands = [
            (placement.target, TargetActor, RankHost),
            (placement.coordinator, CoordinatorActor, RankHost),
        ]
        if placement.draft is not None:
            demands.append((placement.draft, DraftActor, RankHost))
        actors = await self._cluster.place(demands, self.config.startup_timeout_s)
        self._actors = {actor.role: actor for actor in actors if actor.rank == 0}
        self._followers = [actor for actor in actors if actor.rank > 0]
        nodes = {actor.place.node for actor in actors}
        if len(nodes) > 1 and not self.config.target.insecure:
            raise SettingError(
                "host",
                f"the actors were placed on {len(nodes)} machines, but their servers bind "
                f"{self.config.target.host}; give --host 0.0.0.0 --insecure on a trusted network",
            )

    def _models(self) -> list[Actor]:
        """The actors of target and draft, the first rank of each."""
        return [actor for role, actor in self._actors.items() if role != "coordinator"]

    async def _begin(self, role: str, config: object) -> str:
        """Starts the service of an actor, and the other ranks of its model; its address."""
        actor = self._actors[role]
        logs = self._state / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = str(logs) if self._cluster.local else ""
        timeout_s = self.config.model_timeout_s
        seats = await self._seats(actor, timeout_s)
        address: str = await _of_the_first(
            actor.call("start", config, directory, timeout_s=timeout_s),
            *(
                follower.call(
                    "start", config, role, seat, timeout_s, directory, timeout_s=timeout_s
                )
                for follower, seat in seats
            ),
        )
        return address

    async def _seats(self, leader: Actor, timeout_s: float) -> list[tuple[Actor, Seat]]:
        """The followers of an actor's model, each with what it is told."""
        followers = self.followers(leader.role)
        if not followers:
            return []
        neighbours = Counter(actor.place.node for actor in (leader, *followers))
        meeting: Meeting = await leader.call(
            "open_meeting", 1 + len(followers), neighbours[leader.place.node], timeout_s
        )
        return [
            (actor, Seat(meeting, actor.rank, neighbours[actor.place.node])) for actor in followers
        ]

    async def wait(self) -> str:
        """Returns the role of the first actor without which nothing goes on (coordinator, or any
        rank of the target) once it has ended. Rounds go on without the draft: where a rank of it
        has ended, that is logged, and the others are ended too."""
        waiting = {
            asyncio.create_task(actor.call("wait")): actor
            for actor in (*self._actors.values(), *self._followers)
        }
        try:
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    actor = waiting[task]
                    _log.error("the %s actor is gone: %s", actor.name, task.exception())
                    if actor.role != "draft":
                        return actor.role
                for task in [task for task, actor in waiting.items() if actor.role == "draft"]:
                    task.cancel()
                    del waiting[task]
                await self._remove_draft()
        finally:
            for task in waiting:
                task.cancel()

    async def _remove_draft(self) -> None:
        """Ends what is left of the draft's ranks: none is of use without all others."""
        ranks = [self._actors.pop("draft"), *self.followers("draft")]
        self._followers = [actor for actor in self._followers if actor.role != "draft"]
        await self._cluster.remove(ranks)

    async def stop(self) -> None:
        """Lets running requests end within `stop_timeout_s`, and what is left of their steps within
        as long again; then stops everything that was started. Repeating it does nothing."""
        self._endpoints = None
        for roles in (("coordinator",), ("target", "draft")):
            actors = [self._actors[role] for role in roles if role in self._actors]
            await asyncio.gather(*(self._stop_actor(actor) for actor in actors))
        # They have ended with their leaders, unless those died.
        await asyncio.gather(*(self._stop_actor(actor) for actor in self._followers))
        self._actors, self._followers = {}, []
        # Ray's processes end with it, and with them whoever still talks to Redis.
        await self._cluster.disconnect()
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop)
            self._redis = None

    async def _stop_actor(self, actor: Actor) -> None:
        grace_s = self.config.stop_timeout_s
        try:
            await actor.call("stop", grace_s, timeout_s=grace_s + STOP_CALL_TIMEOUT_S)
        except OutriderError as error:
            _log.warning("the %s actor did not stop by itself: %s", actor.name, error)
        await actor.kill()


async def _of_the_first(first: Awaitable[Any], *others: Awaitable[Any]) -> Any:
    """The result of the first, once all have one. Raises as soon as one of them fails: the
    `ConfigError` of any that fails within `ECHO_S`, because ranks end when another one does."""
    tasks = [asyncio.ensure_future(work) for work in (first, *others)]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=ECHO_S)
        ended = [task for task in tasks if task.done()]
        _raise_first([task.exception() for task in ended])
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _nowhere() -> str:
    """The address of a service that a deployment does without."""
    return ""


async def _all(*work: Awaitable[Any]) -> list[Any]:
    """The results of all; waits for every one even if another fails or the caller is cancelled, so
    that nothing still starts while what was started is being stopped. Raises the first error, a
    `ConfigError` before others."""
    gathering = asyncio.gather(*work, return_exceptions=True)
    try:
        results = await asyncio.shield(gathering)
    except asyncio.CancelledError:
        await gathering
        raise
    _raise_first(results)
    return results


def _raise_first(results: Sequence[object]) -> None:
    """Raises the first error of the results, a `ConfigError` before others."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: not isinstance(error, ConfigError)):
        raise error
