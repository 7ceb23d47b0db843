"""The Ray actor that hosts a coordinator: its links, its store, and its gRPC server."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outrider.config import CoordinatorConfig
from outrider.fleet.membership import Engagement
from outrider.hosting import Place, advertised, build_lookup, log_to, use_threads
from outrider.limits import SEED_BITS

if TYPE_CHECKING:
    from outrider.drafting.lookup import LookupDrafter
    from outrider.fleet.announcing import Announcer
    from outrider.fleet.registry import Registry
    from outrider.messages import DraftAnswer, DraftItem, VerifyAnswer, VerifyItem
    from outrider.sessions.redis_store import RedisStore
    from outrider.telemetry.exporting import Exports
    from outrider.telemetry.observer import Observation
    from outrider.wire.link import Link
    from outrider.wire.server import RpcServer

    from .asking import Patience
    from .prompts import Text
    from .service import CoordinatorService

_log = logging.getLogger(__name__)

HEALTH_PERIOD_S: Final = 1.0
"""Between two looks at whether requests can be served."""


class CoordinatorActor:
    """A coordinator in a process of its own. Everything heavy is imported by `start`, so that
    finding a place for the actor is quick."""

    def __init__(self) -> None:
        self._service: CoordinatorService | None = None
        self._server: RpcServer | None = None
        self._health: asyncio.Task[None] | None = None
        self._exports: Exports | None = None
        self._announcer: Announcer | None = None
        self._rosters: list[asyncio.Task[None]] = []
        self._engagement = Engagement(address="")
        self._stopping: asyncio.Task[None] | None = None

    async def ping(self) -> Place:
        """Where the actor runs."""
        return Place(os.getpid(), socket.gethostname())

    async def engagement(self) -> Engagement:
        """What it has come to."""
        return self._engagement

    async def start(self, config: CoordinatorConfig, log_directory: str) -> str:
        """Connects to the store, the targets and the drafts, and serves; the address that clients
        call. Raises `ConfigError`, `Unavailable`, `Incompatible`."""
        use_threads(1)
        log_to(log_directory, config.log_name("coordinator"))
        from outrider.v1 import coordinator_pb2
        from outrider.wire.server import RpcServer, ServerOptions, Service

        from .servicer import CoordinatorServicer

        registry = _registry(config)
        addresses = await _addresses(config, registry)
        self._service = await _build(config, _links(addresses), self._observe(config))
        await self._service.start()
        descriptor = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
        self._server = RpcServer(
            [Service(descriptor, CoordinatorServicer(self._service))],
            ServerOptions(config.host, config.grpc_port, reflection=config.reflection),
        )
        await self._server.start()
        await self._server.set_serving(True)
        self._health = asyncio.create_task(_report_health(self._service, self._server))
        address = advertised(config.host, self._server.address)
        if registry is not None:
            await self._follow(registry, config, address, addresses)
        self._engagement = Engagement(address=address, slot=config.slot, plan=config.plan)
        return address

    async def _follow(
        self, registry: Registry, config: CoordinatorConfig, address: str, begun_with: Addresses
    ) -> None:
        """Keeps up with who is in the registry, and is in it."""
        from outrider.fleet.announcing import Announcer
        from outrider.fleet.registry import ReplicaRecord
        from outrider.wire.grpc_link import draft_link, target_link

        from .roster import Peers, Roster

        service, member = self._service, config.membership
        if service is None or member is None:
            return
        rosters = (
            Roster("target", service.targets, registry, target_link, begun_with[0]),
            Roster("draft", service.drafts, registry, draft_link, begun_with[1]),
        )
        peers = Peers(registry, member.name, service)
        self._rosters = [asyncio.create_task(one.run()) for one in (*rosters, peers)]

        def record() -> ReplicaRecord:
            return ReplicaRecord(
                role="coordinator",
                name=member.name,
                address=address,
                host=socket.gethostname(),
                pid=os.getpid(),
                model=service.model.name,
                load=service.num_running,
                figures=service.figures,
            )

        self._announcer = Announcer(registry, record)
        await self._announcer.start()

    def _observe(self, config: CoordinatorConfig) -> Observation:
        """Starts the telemetry that a configuration asks for. Raises `ConfigError`."""
        from outrider.telemetry.observer import UNOBSERVED

        if not config.telemetry:
            return UNOBSERVED
        from outrider.telemetry.exporting import start_exports
        from outrider.telemetry.requests import Detail, ObservedRequests

        self._exports = start_exports(config.telemetry, "coordinator", config.host, config.slot)
        if self._exports is None:
            return UNOBSERVED
        detail = Detail(config.trace_first_rounds, config.trace_every_rounds, config.trace_prompts)
        return ObservedRequests(self._exports.tracer, self._exports.meter, detail)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        if self._server is not None:
            await self._server.wait()

    async def stop(self, grace_s: float) -> None:
        """Takes no more requests, lets running ones end within `grace_s` seconds, commits what was
        decided, and closes. Who asks again waits for the same end."""
        if self._stopping is None:
            self._engagement = replace(self._engagement, leaving=True)
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        if self._health is not None:
            self._health.cancel()
        for task in self._rosters:
            task.cancel()
        if self._announcer is not None:
            await self._announcer.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._service is not None:
            await self._service.close()
        if self._exports is not None:
            await self._exports.close()


async def _report_health(service: CoordinatorService, server: RpcServer) -> None:
    """Keeps the server's health true; stops it once nothing can be served any more."""
    serving = True
    while not service.failed:
        healthy = await service.healthy()
        if healthy != serving:
            _log.warning("the coordinator %s", "serves again" if healthy else "cannot serve")
            await server.set_serving(healthy)
            serving = healthy
        await asyncio.sleep(HEALTH_PERIOD_S)
    _log.critical("commits have ended; the coordinator stops")
    await server.stop()


Links = tuple[
    "Mapping[str, Link[VerifyItem, VerifyAnswer]]", "Mapping[str, Link[DraftItem, DraftAnswer]]"
]
"""To the targets and to the drafts, by name."""
Addresses = tuple[Mapping[str, str], Mapping[str, str]]
"""Theirs, likewise."""


def _registry(config: CoordinatorConfig) -> Registry | None:
    if config.membership is None:
        return None
    from outrider.fleet.redis_registry import RedisRegistry

    return RedisRegistry(config.membership.redis, config.membership.deployment)


async def _addresses(config: CoordinatorConfig, registry: Registry | None) -> Addresses:
    """Of those that the registry has, or else that the configuration names."""
    if registry is None:
        draft = config.draft_address
        return {"target-0": config.target_address}, {"draft-0": draft} if draft else {}
    targets, drafts = [await registry.records(role) for role in ("target", "draft")]
    return (
        {one.name: one.address for one in targets if not one.leaving},
        {one.name: one.address for one in drafts if not one.leaving},
    )


def _links(addresses: Addresses) -> Links:
    from outrider.wire.grpc_link import draft_link, target_link

    targets, drafts = addresses
    return (
        {name: target_link(address) for name, address in targets.items()},
        {name: draft_link(address) for name, address in drafts.items()},
    )


async def _build(
    config: CoordinatorConfig, links: Links, observation: Observation
) -> CoordinatorService:
    from .request import RequestDefaults
    from .service import CoordinatorOptions, CoordinatorService

    text = _load_text(config)
    return CoordinatorService(
        CoordinatorOptions(
            name=_owner(config),
            served_model_name=config.served_model_name,
            defaults=RequestDefaults(config.num_draft_tokens, config.deadline_ms),
            length_control=config.length_control,
            run_ahead_rounds=config.run_ahead_rounds,
            max_sessions=config.max_sessions,
            patience=_patience(config),
            resume_grace_s=config.resume_grace_ms / 1e3,
            follows=config.membership is not None,
            drafting_delays=config.drafting_delays,
            look_ahead=config.look_ahead or 0,
            look_ahead_bytes_max=config.look_ahead_bytes_max,
            draft_siblings=config.draft_siblings or 0,
            confident=None if config.lookup is None else config.lookup.hybrid_min_score,
        ),
        store=await connect_store(config),
        targets=links[0],
        drafts=links[1],
        stand_in=_stand_in(config),
        text=text,
        random_seed=_random_seeds(config.seed),
        observation=observation,
    )


def _owner(config: CoordinatorConfig) -> str:
    """What it is called in the session store."""
    member = config.membership
    if member is not None:
        return f"{member.deployment}/{member.name}"
    return f"coordinator-{uuid.uuid4().hex}"


def _stand_in(config: CoordinatorConfig) -> LookupDrafter:
    """Prompt lookup, or what goes before a target that drafts itself."""
    from outrider.drafting.ngram import NgramConfig, NgramDrafter

    found = None if config.lookup is None else build_lookup(config.lookup)
    return found or NgramDrafter(NgramConfig(config.ngram_min, config.ngram_max))


async def connect_store(config: CoordinatorConfig) -> RedisStore:
    """The session store that a configuration names. Raises `ConfigError`, in one line, where it
    cannot be reached or is not fit."""
    from outrider.sessions.redis_store import RedisStore

    return await RedisStore.connect(
        config.redis_url,
        key_prefix=config.redis_key_prefix,
        username=config.redis_username or None,
        password=config.redis_password or None,
        ca_file=config.redis_ca_file or None,
    )


def _load_text(config: CoordinatorConfig) -> Text | None:
    if not config.tokenizer_directory:
        return None
    from outrider.text import TokenizerText

    return TokenizerText.load(
        Path(config.tokenizer_directory), trust_remote_code=config.trust_remote_code
    )


def _patience(config: CoordinatorConfig) -> Patience:
    from .asking import Patience

    return Patience(
        target_answer_s=config.target_timeout_ms / 1e3,
        target_gone_s=config.target_gone_ms / 1e3,
        target_retry_s=config.target_retry_ms / 1e3,
        draft_answer_s=config.draft_timeout_ms / 1e3,
        draft_retry_s=config.draft_retry_ms / 1e3,
    )


def _random_seeds(seed: int | None) -> Callable[[], int]:
    """Seeds come from one stream where the configuration names one, so that a repeated series of
    requests repeats its answers."""
    if seed is None:
        return lambda: secrets.randbits(SEED_BITS)
    seeds = random.Random(seed)  # noqa: S311 (sampling, not secrecy)
    return lambda: seeds.getrandbits(SEED_BITS)
