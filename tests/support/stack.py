"""The three services in one process, with real gRPC between them and the embedded Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.grpc_api import CoordinatorServicer
from coordinator.http_api.app import build_app
from coordinator.http_api.server import HttpOptions, HttpServer
from coordinator.routing.discovery import Registered
from coordinator.service import CoordinatorService
from draft_service.feature_drafter import FeatureDrafter
from draft_service.service import DraftService
from outrider.client import Client
from outrider.config.deployment import CoordinatorConfig, DraftConfig
from outrider.config.emulated_spec import EmulatedSpec
from outrider.drafters.lookup import LookupDrafter, NgramDrafter
from outrider.engine.emulated import EmulatedEngine
from outrider.grammar.compiler import Grammars
from outrider.interfaces.engine import Engine, take_stated_seconds
from outrider.models.tokenizer import TokenizerText
from outrider.redis.address import RedisAddress
from outrider.redis.embedded import EmbeddedRedis
from outrider.replica.drivers import ThreadDriver
from outrider.replica.step_spans import ObservedSteps
from outrider.sessions.redis_store import RedisStore
from outrider.telemetry.observer import UNOBSERVED, Observation
from outrider.transport.codec import DRAFT, VERIFY
from outrider.transport.grpc_link import GrpcLink
from outrider.transport.server import RpcServer, ServerOptions, Service
from outrider.transport.stream_server import ReplicaServicer
from target_service.service import TargetService
from target_service.verifier import SelfDrafter
from tests.support.models import byte_level_tokenizer
from tests.support.pages import check_service
from tests.support.rounds import drafter_over
from tests.support.toy_engine import ToyEngine

CONFIG = CoordinatorConfig(
    served_model_name="model",
    num_draft_tokens=4,
    length_control=False,
    resume_grace_ms=0,
    audit_share=0,
    telemetry="prometheus=0",
    target_gone_ms=5_000,
    draft_timeout_ms=10_000,
)
HYBRID = DraftConfig(model="hybrid:ngram,some/model")
NUM_SEQUENCES = 64
RARE = NgramDrafter(16, 16)
"""A fallback whose tokens are almost never accepted."""


@dataclass
class Stack:
    client: Client
    coordinator: CoordinatorService
    target: TargetService
    draft: DraftService
    target_server: RpcServer
    draft_server: RpcServer
    redis: EmbeddedRedis
    server: RpcServer
    """The coordinator's server."""


def _draft_service(
    engine: Any, grammars: Grammars | None, parallel_token: int | None
) -> DraftService:
    options: dict[str, Any] = {"max_num_seqs": NUM_SEQUENCES, "grammars": grammars}
    timed = getattr(engine, "engine", engine)
    if engine is None:  # This draft is never asked, and fits any target.
        engine = timed = ToyEngine()
        engine.info = replace(engine.info, tokenizer_fingerprint="")
    driver = ThreadDriver("draft", partial(take_stated_seconds, timed))
    return DraftService(drafter_over(engine, parallel_token), driver, **options)


def coordinator_api(coordinator: CoordinatorService, access: AccessControl = OPEN) -> Service:
    return CoordinatorServicer(coordinator, access).grpc_service


async def serve(
    exits: AsyncExitStack, service: Service, options: ServerOptions | None = None
) -> RpcServer:
    """Starts a server that runs until `exits` are closed."""
    server = RpcServer([service], options)
    await server.start()
    exits.push_async_callback(server.stop)
    await server.set_serving(True)
    return server


@asynccontextmanager
async def running_stack(
    target_engine: Engine,
    draft_engine: Engine | None,
    directory: Path,
    *,
    lookup: LookupDrafter | None = None,
    target_lookup: LookupDrafter | None = None,
    hybrid: DraftConfig = HYBRID,
    text: TokenizerText | None = None,
    look_ahead: int = 8,
    observation: Observation = UNOBSERVED,
    target_observer: ObservedSteps | None = None,
    draft_observer: ObservedSteps | None = None,
    self_drafter: SelfDrafter | None = None,
    head: FeatureDrafter | None = None,
    parallel_token: int | None = None,
    lifetimes: Mapping[str, int] | None = None,
    registered: Registered | None = None,
    grammars: Callable[[], Grammars] | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Runs the services on these engines, and checks and closes everything at the end. `directory`
    is for Redis, `settings` are the coordinator's. A `lookup` is asked before the draft, or drafts
    alone if there is no draft engine (by default with n-grams). The target has a `target_lookup`. A
    `head` replaces the draft's engine, a `self_drafter` the draft. Then the fallback is `RARE`."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(directory))
        target = TargetService(
            target_engine,
            ThreadDriver("target", partial(take_stated_seconds, target_engine)),
            max_num_seqs=NUM_SEQUENCES,
            self_drafter=self_drafter,
            grammars=grammars and grammars(),
            lookup=target_lookup,
        )
        looks_up = not (draft_engine or head or self_drafter)
        if looks_up or (lookup and draft_engine):
            settings["lookup"] = DraftConfig() if looks_up else hybrid
        draft = _draft_service(draft_engine or head, grammars and grammars(), parallel_token)
        for service, observer in ((target, target_observer), (draft, draft_observer)):
            if observer is not None:
                service.observe(observer)
        target_server = await serve(stack, ReplicaServicer(target, VERIFY).grpc_service)
        draft_server = await serve(stack, ReplicaServicer(draft, DRAFT).grpc_service)
        store = await RedisStore.connect(RedisAddress(url=redis.url))
        vars(store).update(lifetimes or {})
        coordinator = CoordinatorService(
            replace(CONFIG, look_ahead=look_ahead, **settings),
            "coordinator-under-test",
            store=store,
            targets={"t": GrpcLink(VERIFY, target_server.address)},
            drafts={} if looks_up else {"d": GrpcLink(DRAFT, draft_server.address)},
            fallback=RARE if self_drafter or head else lookup or NgramDrafter(),
            text=text,
            observation=observation,
            registered=registered,
        )
        await coordinator.start()
        server = await serve(stack, coordinator_api(coordinator))
        client = Client(server.address)
        try:
            running = client, coordinator, target, draft, target_server, draft_server
            yield Stack(*running, redis, server)
        finally:
            await client.close()
            for service in (coordinator, target, draft):
                await service.close()
                check_service(service)


VOCAB = 320
"""Vocabulary of toy models with text."""


def toy_text() -> TokenizerText:
    """A tokenizer with one or a few bytes per token."""
    return TokenizerText(byte_level_tokenizer(VOCAB), "toy")


def toy_stack(directory: Path, **options: Any) -> AbstractAsyncContextManager[Stack]:
    """A stack with text, whose draft equals its target."""
    target, draft = (ToyEngine(VOCAB, salt=1, max_model_len=256) for _ in range(2))
    return running_stack(target, draft, directory, text=toy_text(), **options)


ERRING = EmulatedSpec(vocab_size=VOCAB, support=32, verify_ms=2.0, draft_ms=0.2)
"""Emulated engines whose draft is often wrong."""


def emulated_stack(
    directory: Path, spec: EmulatedSpec = ERRING, **options: Any
) -> AbstractAsyncContextManager[Stack]:
    target, draft = EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")
    return running_stack(target, draft, directory, **options)


def slow_stack(directory: Path, **options: Any) -> AbstractAsyncContextManager[Stack]:
    """A stack with text whose target takes 20 ms for each step, so that requests last."""
    spec = EmulatedSpec(
        vocab_size=VOCAB, support=8, max_model_len=8192, verify_ms=20.0, draft_ms=1.0
    )
    return emulated_stack(directory, spec, text=toy_text(), **options)


async def until(holds: Callable[[], object], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def http_front(stack: Stack, options: HttpOptions | None = None) -> AsyncIterator[str]:
    """Serves the stack by HTTP; yields the URL."""
    options = options or HttpOptions()
    server = HttpServer(options, build_app(stack.coordinator, options))
    await server.start()
    try:
        yield f"http://{server.address}"
    finally:
        await server.stop()
