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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outrider.closing import run_all
from outrider.config import CoordinatorConfig
from outrider.limits import NUM_DRAFT_TOKENS_MAX, SEED_BITS
from outrider.registry.registry import Engagement
from outrider.replica.process_setup import (
    Place,
    advertised,
    build_lookup,
    log_at,
    log_to,
    use_threads,
)
from outrider.sessions.redis_address import with_password
from outrider.settings import blaming
from outrider.speculation.sampling_params import Rule

if TYPE_CHECKING:
    from grpc import ServerCredentials

    from coordinator.auth.access_control import AccessControl
    from coordinator.http_api.server import HttpServer
    from coordinator.requests.validation import Text
    from outrider.drafters.lookup import LookupDrafter
    from outrider.messages import DraftAnswer, DraftItem, VerifyAnswer, VerifyItem
    from outrider.registry.registry import Lease, Registry
    from outrider.sessions.redis_store import RedisStore
    from outrider.telemetry.observer import Observation
    from outrider.telemetry.setup import Exports
    from outrider.transport.link import Link
    from outrider.transport.server import RpcServer

    from .service import CoordinatorService

_log = logging.getLogger(__name__)

HEALTH_PERIOD_S: Final = 1.0
"""Between two looks at whether requests can be served."""


class CoordinatorActor:
    """A coordinator in a process of its own. Everything heavy is imported by `start`, so that
    finding a place for the actor is quick."""

    def __init__(self) -> None:
        self._service: CoordinatorService | None = None
        self._access: AccessControl | None = None
        self._server: RpcServer | None = None
        self._http: HttpServer | None = None
        self._health: asyncio.Task[None] | None = None
        self._exports: Exports | None = None
        self._announcer: Lease | None = None
        self._followers: list[asyncio.Task[None]] = []
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
        config = config.reaching(with_password(config.redis))
        log_at(config.log_level)
        from outrider.transport.server import RpcServer, ServerOptions, Service
        from outrider.v1 import coordinator_pb2

        from .grpc_api import CoordinatorServicer

        registry = _registry(config)
        addresses = await _addresses(config, registry)
        links = _links_by(config)
        observation = self._observe(config)
        self._service = await _build(config, _links(addresses, links), observation, registry)
        await self._service.start()
        descriptor = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
        access = self._access = build_gate(config)
        self._server = RpcServer(
            [Service(descriptor, CoordinatorServicer(self._service, access))],
            ServerOptions(
                config.host,
                config.grpc_port,
                reflection=config.serves_reflection,
                shares_port=config.shares_ports,
                takes_over=config.takes_over_ports,
                guard=access.check_call,
                credentials=_front_credentials(config),
            ),
        )
        await self._server.start()
        http_address = await self._serve_http(self._service, config, access)
        await self._server.set_serving(True)
        self._health = asyncio.create_task(_report_health(self._service, self._server, self._http))
        address = advertised(config.host, self._server.address)
        if registry is not None:
            await self._follow(registry, config, address, addresses, links)
        self._engagement = Engagement(
            address=address, slot=config.slot, plan=config.plan, http_address=http_address
        )
        return address

    async def _serve_http(
        self, service: CoordinatorService, config: CoordinatorConfig, access: AccessControl
    ) -> str:
        """Where it answers by HTTP; empty where it does not. Raises `ConfigError`."""
        if not config.http:
            return ""
        from coordinator.http_api.server import HttpOptions, HttpServer, TlsFiles

        tls = None
        if config.ssl_certfile:
            authority = Path(config.ssl_ca_certs) if config.ssl_ca_certs else None
            tls = TlsFiles(Path(config.ssl_certfile), Path(config.ssl_keyfile), authority)
        metrics = times = None
        if self._exports is not None:
            from outrider.telemetry.http_times import HttpTimes

            times = HttpTimes(self._exports.meter)
            metrics = None if self._exports.scrape is None else self._exports.scrape.render
        options = HttpOptions(
            config.host, config.port, config.shares_ports, config.takes_over_ports,
            metrics, access, tls, times,
        )  # fmt: skip
        self._http = HttpServer(service, options)
        await self._http.start()
        return advertised(config.host, self._http.address)

    async def _follow(
        self,
        registry: Registry,
        config: CoordinatorConfig,
        address: str,
        begun_with: Addresses,
        links: LinksBy,
    ) -> None:
        """Keeps up with who is in the registry, and is in it."""
        from coordinator.routing.discovery import Discovery, Peers
        from outrider.registry.registry import Lease, ReplicaRecord

        service, member = self._service, config.membership
        if service is None or member is None:
            return
        hear = service.fleet.hear
        followers = (
            Discovery("target", service.targets, registry, links[0], begun_with[0], hear),
            Discovery("draft", service.drafts, registry, links[1], begun_with[1], hear),
        )
        peers = Peers(registry, member.name, service, hear)
        self._followers = [asyncio.create_task(one.run()) for one in (*followers, peers)]

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

        self._announcer = Lease(registry, record)
        await self._announcer.start()

    def _observe(self, config: CoordinatorConfig) -> Observation:
        """Starts the telemetry that a configuration asks for. Raises `ConfigError`."""
        from outrider.telemetry.observer import UNOBSERVED

        if not config.telemetry and not config.http:
            return UNOBSERVED
        from outrider.telemetry.request_spans import Detail, ObservedRequests
        from outrider.telemetry.setup import start_exports

        self._exports = start_exports(
            config.telemetry, "coordinator", config.metrics_host, config.slot, scraped=config.http
        )
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
        if self._service is not None:
            self._service.hand_over()
        if self._health is not None:
            self._health.cancel()
        announcer = self._announcer
        servers = [one for one in (self._server, self._http) if one is not None]
        closed = (self._service, announcer, self._access, self._exports)
        await run_all(
            *([] if announcer is None else [announcer.withdraw]),
            lambda: asyncio.gather(
                *(run_all(partial(one.stop, grace_s)) for one in servers), return_exceptions=True
            ),
            self._end_followers,  # What still ran had to follow replicas that came and went.
            *(one.close for one in closed if one is not None),
        )

    async def _end_followers(self) -> None:
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)


async def _report_health(
    service: CoordinatorService, server: RpcServer, http: HttpServer | None
) -> None:
    """Keeps the server's health true; stops both once nothing can be served any more."""
    serving = True
    while not service.failed:
        healthy = await service.healthy() and not (http is not None and http.failed)
        if healthy != serving:
            _log.warning("the coordinator %s", "serves again" if healthy else "cannot serve")
            await server.set_serving(healthy)
            serving = healthy
        await asyncio.sleep(HEALTH_PERIOD_S)
    _log.critical("commits have ended; the coordinator stops")
    if http is not None:
        await http.stop()
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
    from outrider.registry.redis_registry import RedisRegistry

    return RedisRegistry(config.membership.redis, config.membership.deployment)


async def _addresses(config: CoordinatorConfig, registry: Registry | None) -> Addresses:
    """Of those that the registry has, or else that the configuration names."""
    if registry is None:
        draft = config.draft_address
        return {"target-0": config.target_address}, {"draft-0": draft} if draft else {}
    from coordinator.routing.discovery import replicas_at_first

    return await replicas_at_first(registry)


def _front_credentials(config: CoordinatorConfig) -> ServerCredentials | None:
    """TLS for users; None = plain text. Raises `ConfigError`."""
    if not config.ssl_certfile:
        return None
    from outrider.transport.tls import server_credentials

    authority = Path(config.ssl_ca_certs) if config.ssl_ca_certs else None
    with blaming("ssl_certfile"):
        return server_credentials(Path(config.ssl_certfile), Path(config.ssl_keyfile), authority)


LinksBy = tuple[
    "Callable[[str], Link[VerifyItem, VerifyAnswer]]",
    "Callable[[str], Link[DraftItem, DraftAnswer]]",
]
"""What leads to the target, and to the draft, at an address."""


def _links_by(config: CoordinatorConfig) -> LinksBy:
    """Raises `ConfigError` for certificates that are wrong."""
    from outrider.transport.grpc_link import draft_link, target_link

    if not config.internal_tls_dir:
        return target_link, draft_link
    from outrider.transport.tls import internal_trust

    directory = Path(config.internal_tls_dir)
    with blaming("internal_tls_dir"):
        return (
            partial(target_link, trust=internal_trust(directory, "coordinator", "target")),
            partial(draft_link, trust=internal_trust(directory, "coordinator", "draft")),
        )


def _links(addresses: Addresses, links: LinksBy) -> Links:
    targets, drafts = addresses
    return (
        {name: links[0](address) for name, address in targets.items()},
        {name: links[1](address) for name, address in drafts.items()},
    )


async def _build(
    config: CoordinatorConfig, links: Links, observation: Observation, registry: Registry | None
) -> CoordinatorService:
    from coordinator.requests.validation import RequestDefaults
    from coordinator.routing.target_client import Timeouts

    from .options import CoordinatorOptions
    from .service import CoordinatorService

    text, lookup = _load_text(config), config.lookup
    looks_up = lookup is not None and lookup.drafter.is_lookup
    has_trees = config.draft_siblings > 0 and not config.look_ahead and not looks_up
    return CoordinatorService(
        CoordinatorOptions(
            name=_owner(config),
            announced_as="" if config.membership is None else config.membership.name,
            served_model_name=config.served_model_name,
            defaults=RequestDefaults(
                config.num_draft_tokens,
                config.deadline_ms,
                # Of a chain block verification accepts no fewer tokens; it has no trees.
                Rule.TOKEN if has_trees else Rule.BLOCK,
            ),
            length_control=config.length_control,
            run_ahead_rounds=config.run_ahead_rounds,
            max_sessions=config.max_sessions,
            timeouts=Timeouts.of(config),
            resume_grace_s=config.resume_grace_ms / 1e3,
            follows=config.membership is not None,
            drafting_delays=config.drafting_delays,
            look_ahead=config.look_ahead or 0,
            look_ahead_bytes_max=config.look_ahead_bytes_max,
            draft_siblings=config.draft_siblings,
            audit_share=config.audit_share if config.telemetry else 0.0,
            looks_up=looks_up,
            confident=None if lookup is None else lookup.hybrid_min_score,
            model_tokens=NUM_DRAFT_TOKENS_MAX if lookup is None else lookup.hybrid_model_tokens,
        ),
        store=await connect_store(config),
        targets=links[0],
        drafts=links[1],
        fallback=_fallback(config),
        text=text,
        random_seed=_random_seeds(config.seed),
        observation=observation,
        registry=registry,
    )


def _owner(config: CoordinatorConfig) -> str:
    """What it is called in the session store. No process before or after it has the name: the lease
    of the one that took its place would keep the sessions of a dead one from others."""
    member = config.membership
    name = "coordinator" if member is None else f"{member.deployment}/{member.name}"
    return f"{name}-{uuid.uuid4().hex}"


def _fallback(config: CoordinatorConfig) -> LookupDrafter:
    """The configured look-up, which drafts alone or before what else does; else prompt lookup."""
    from outrider.drafters.lookup import NgramConfig, NgramDrafter

    found = None if config.lookup is None else build_lookup(config.lookup)
    return found or NgramDrafter(NgramConfig(config.ngram_min, config.ngram_max))


async def connect_store(config: CoordinatorConfig) -> RedisStore:
    """The session store that a configuration names. Raises `ConfigError`, in one line, where it
    cannot be reached or is not fit."""
    from outrider.sessions.redis_store import RedisStore

    return await RedisStore.connect(config.redis, wait_replicas=config.redis_wait_replicas)


def build_gate(config: CoordinatorConfig) -> AccessControl:
    """What stands before everything that the coordinator serves. Raises `ConfigError`."""
    from coordinator.auth.access_control import access_control_of

    if not config.asks_for_keys:
        return access_control_of("", "")
    from coordinator.auth.rate_limits import Limiter, RedisSlots

    limiter = Limiter(RedisSlots(config.redis))
    with blaming("api_key_file"):
        return access_control_of(config.api_key, config.api_key_file, limiter)


def _load_text(config: CoordinatorConfig) -> Text | None:
    if not config.tokenizer_directory:
        return None
    from outrider.tokenizer import TokenizerText

    return TokenizerText.load(
        Path(config.tokenizer_directory), trust_remote_code=config.trust_remote_code
    )


def _random_seeds(seed: int | None) -> Callable[[], int]:
    """Seeds come from one stream where the configuration names one, so that a repeated series of
    requests repeats its answers."""
    if seed is None:
        return lambda: secrets.randbits(SEED_BITS)
    seeds = random.Random(seed)  # noqa: S311 (sampling, not secrecy)
    return lambda: seeds.getrandbits(SEED_BITS)
