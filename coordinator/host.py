"""Starts and stops the parts of a coordinator's process: service, servers and telemetry."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.auth.access_control import OPEN, AccessControl, RedisSlots, watch_keys
from coordinator.http_api.app import build_app
from coordinator.http_api.server import HttpOptions, HttpServer, TlsFiles
from coordinator.http_api.tools import ChatFormats
from coordinator.requests.chat_template import read_chat_template
from coordinator.routing.discovery import Registered
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.foundation.api_keys import given_keys
from outrider.foundation.settings import blaming
from outrider.limits import GRPC_AGE_MS
from outrider.registry.redis_registry import Lease, RedisRegistry
from outrider.registry.registry import Engagement, ReplicaRecord, Role
from outrider.replica.lookups import build_lookup
from outrider.sessions.redis_store import RedisStore
from outrider.telemetry.observer import UNOBSERVED, Observation
from outrider.transport.addresses import advertised
from outrider.transport.channel import PLAIN, Trust
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.grpc_link import GrpcLink
from outrider.transport.link import DraftLink, TargetLink
from outrider.transport.server import RpcServer, ServerOptions

from .grpc_api import CoordinatorServicer
from .service import CoordinatorService

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText
    from outrider.telemetry.setup import Exports

_log = logging.getLogger(__name__)

HEALTH_PERIOD_S = 1.0


class CoordinatorHost:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.engagement = Engagement()
        self.service: CoordinatorService | None = None
        self.server: RpcServer | None = None
        self.health_server: RpcServer | None = None
        """The server at `health_port`."""
        self.http: HttpServer | None = None
        self.exports: Exports | None = None
        self._open = AsyncExitStack()
        """The parts that `stop` closes, the newest first."""
        self._stopping: asyncio.Task[None] | None = None
        self._grace_s = 0.0

    async def start(self) -> str:
        """Returns the address of the gRPC server. Raises `ConfigError`, `Unavailable` and
        `Incompatible`."""
        config, member = self._config, self._config.membership
        target_trust, draft_trust = _trust(config, "target"), _trust(config, "draft")
        targets, drafts = dict[str, TargetLink](), dict[str, DraftLink]()
        registered = None
        if member is None:
            targets["target-0"] = GrpcLink(VERIFY, config.target_address, target_trust)
            if config.draft_address:
                drafts["draft-0"] = GrpcLink(DRAFT, config.draft_address, draft_trust)
        else:
            registry = RedisRegistry(member.redis, member.deployment)
            self._open.push_async_callback(registry.close)
            registered = Registered(
                registry,
                lambda address: GrpcLink(VERIFY, address, target_trust),
                lambda address: GrpcLink(DRAFT, address, draft_trust),
            )
        observation = self.observe()
        ngram = NgramDrafter(config.lookup.ngram_min, config.lookup.ngram_max)
        service = self.service = CoordinatorService(
            config,
            owner_name(config),
            store=await RedisStore.connect(
                config.redis,
                wait_replicas=config.redis_wait_replicas,
                resume_grace_ms=config.resume_grace_ms,
            ),
            fallback=build_lookup(config.lookup) or ngram,
            text=load_text(config),
            observation=observation,
            targets=targets,
            drafts=drafts,
            registered=registered,
        )
        self._open.push_async_callback(service.close)
        await service.start()
        access = _access_control(config)
        self._open.push_async_callback(access.close)
        servers = await self._serve_grpc(service, access)
        http_address = await self.serve_http(service, access) if config.http else ""
        for one in servers:
            await one.set_serving(True)
        health = asyncio.create_task(report_health(service, servers, self.http))
        self._open.callback(health.cancel)
        address = advertised(config.host, servers[0].address)
        if member is not None:
            announcer = Lease(registry, lambda: _record(service, member.name, address))
            self._open.push_async_callback(announcer.withdraw)
            await announcer.start()
        self._open.callback(service.streams.hand_over)
        self.engagement = Engagement(
            address=address, member=config.membership, http_address=http_address
        )
        return address

    async def _serve_grpc(
        self, service: CoordinatorService, access: AccessControl
    ) -> Sequence[RpcServer]:
        """Starts the server of all calls and, if configured, the one that only tells the health."""
        config = self._config
        with blaming("ssl_certfile"):
            tls = TlsFiles.of(config)
            credentials = None
            if tls is not None:
                from outrider.transport.tls import server_credentials

                credentials = server_credentials(tls.certificate, tls.key, tls.authority)
        options = ServerOptions(
            config.host,
            config.grpc_port,
            reflection=config.serves_reflection,
            shares_port=config.shares_ports,
            takes_over=config.takes_over_ports,
            connection_age_ms=GRPC_AGE_MS,
            guard=access.check_call,
            credentials=credentials,
        )
        servicer = CoordinatorServicer(service, access)
        self.server = RpcServer([servicer.grpc_service], options)
        self._open.push_async_callback(self._stop_servers)
        await self.server.start()
        if config.health_port is None:
            return [self.server]
        self.health_server = RpcServer([], health_options(options, config.health_port))
        with blaming("health_port"):
            await self.health_server.start()
        return [self.server, self.health_server]

    async def serve_http(self, service: CoordinatorService, access: AccessControl) -> str:
        config, scrape, times = self._config, None, None
        if self.exports is not None:
            from outrider.telemetry.metrics import HttpTimes

            scrape, times = self.exports.scrape, HttpTimes(self.exports.meter)
        options = HttpOptions(
            config.host,
            config.port,
            config.shares_ports,
            config.takes_over_ports,
            metrics=bytes if scrape is None else scrape.render,
            access=access,
            tls=TlsFiles.of(config),
            times=times,
        )
        formats = ChatFormats(service.text, config.tool_call_parser, config.reasoning_parser)
        self.http = HttpServer(options, build_app(service, options, formats))
        await self.http.start()
        return advertised(config.host, self.http.address)

    def observe(self) -> Observation:
        config = self._config
        if not config.telemetry and not config.http:
            return UNOBSERVED
        # These modules import OpenTelemetry and torch, so they are imported only if needed.
        from outrider.telemetry.request_spans import ObservedRequests
        from outrider.telemetry.setup import start_exports

        self.exports = start_exports(
            config.telemetry,
            "coordinator",
            config.metrics_host,
            config.replica_index,
            scraped=config.http,
            vllm_model=config.served_model_name if config.vllm_metric_names else None,
        )
        if self.exports is None:
            return UNOBSERVED
        self._open.push_async_callback(self.exports.close)
        return ObservedRequests(self.exports.tracer, self.exports.meter, config)

    async def wait(self) -> None:
        if self.server is not None:
            await self.server.wait()

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, waits up to `grace_s` for running requests, commits their last
        tokens, and closes all parts. Idempotent: concurrent callers await the same shutdown."""
        if self._stopping is None:
            self.engagement, self._grace_s = replace(self.engagement, leaving=True), grace_s
            self._stopping = asyncio.create_task(self._open.aclose())
        await asyncio.shield(self._stopping)

    async def _stop_servers(self) -> None:
        servers = (self.server, self.health_server, self.http)
        stops = [one.stop(self._grace_s) for one in servers if one is not None]
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if error is not None:
                raise error


def health_options(options: ServerOptions, port: int) -> ServerOptions:
    """Options of a server that only tells the health. All its callers are strangers, whose messages
    are not read."""
    return replace(options, port=port, guard=lambda *_: None, reflection=False, credentials=None)


async def report_health(
    service: CoordinatorService, servers: Sequence[RpcServer], http: HttpServer | None
) -> None:
    """Reports health by gRPC. If the task that commits tokens fails, stops the servers."""
    serving = True
    while not service.streams.failed:
        healthy = not (service.health.trouble or (http is not None and http.failed))
        if healthy != serving:
            _log.warning("the coordinator %s", "serves again" if healthy else "cannot serve")
            for server in servers:
                await server.set_serving(healthy)
            serving = healthy
        await asyncio.sleep(HEALTH_PERIOD_S)
    _log.critical("the task that commits tokens has failed; the coordinator stops")
    if http is not None:
        await http.stop()
    for server in servers:
        await server.stop()


def owner_name(config: CoordinatorConfig) -> str:
    """Creates this coordinator's name in the session store. No other process has this name. With
    its predecessor's name, a restarted coordinator would renew the predecessor's lease. Then no
    coordinator could take over the predecessor's sessions."""
    member = config.membership
    name = "coordinator" if member is None else f"{member.deployment}/{member.name}"
    return f"{name}-{uuid.uuid4().hex}"


def _record(service: CoordinatorService, name: str, address: str) -> ReplicaRecord:
    return ReplicaRecord(
        role="coordinator",
        name=name,
        address=address,
        host=socket.gethostname(),
        pid=os.getpid(),
        model=service.served.model,
        load=service.num_running,
        figures=service.health.figures,
    )


def _trust(config: CoordinatorConfig, role: Role) -> Trust:
    if not config.internal_tls_dir:
        return PLAIN
    from outrider.transport.tls import internal_trust

    with blaming("internal_tls_dir"):
        return internal_trust(Path(config.internal_tls_dir), "coordinator", role)


def _access_control(config: CoordinatorConfig) -> AccessControl:
    if not config.asks_for_keys:
        return OPEN
    slots = RedisSlots(config.redis)
    with blaming("api_key_file"):
        path = Path(config.api_key_file) if config.api_key_file else None
        return AccessControl(watch_keys(path, given_keys(config.api_key)), slots)


def load_text(config: CoordinatorConfig) -> TokenizerText | None:
    """Loads the tokenizer, once in a process. Returns None if the coordinator has none. Imports the
    library of models, so the first call takes seconds."""
    if not config.tokenizer_directory:
        return None
    return _text_of(
        config.tokenizer_directory,
        config.served_model_name or None,
        config.trust_remote_code,
        read_chat_template(config.chat_template),
    )


@cache
def _text_of(
    directory: str, name: str | None, trust_remote_code: bool, chat_template: str
) -> TokenizerText:
    from outrider.models.tokenizer import TokenizerText

    return TokenizerText.load(
        Path(directory), name, trust_remote_code=trust_remote_code, chat_template=chat_template
    )
