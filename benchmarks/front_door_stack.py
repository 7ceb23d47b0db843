"""The coordinator that `bench front-door` asks: in this process, with a target in another one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Final

from coordinator.grpc_api import CoordinatorServicer
from coordinator.http_api.server import HttpOptions, HttpServer
from coordinator.options import CoordinatorOptions
from coordinator.requests.validation import RequestDefaults
from coordinator.routing.target_client import Timeouts
from coordinator.service import CoordinatorService
from outrider.config import EMULATED, CoordinatorConfig, TargetConfig
from outrider.drafters.lookup import NgramDrafter
from outrider.request import Event, GenerateRequest, Tokens
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_store import RedisStore
from outrider.transport.grpc_link import target_link
from outrider.transport.server import RpcServer, ServerOptions, Service
from outrider.v1 import coordinator_pb2

from .role_process import RoleProcess

if TYPE_CHECKING:
    from outrider.tokenizer import TokenizerText

MODEL: Final = EMULATED.removesuffix(":")
_WORDS: Final = tuple("".join(letters) for letters in product(ascii_lowercase[:16], repeat=3))
"""Three letters each: the vocabulary, so that every token is text of its own."""


class StampedCoordinator(CoordinatorService):
    """A coordinator that says when it had the tokens of its newest request."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.stamps: list[float] = []
        """One for each of its events with tokens, by the event loop's clock; whoever asks the next
        request clears them."""

    async def generate(
        self, request: GenerateRequest, *arguments: Any, **named: Any
    ) -> AsyncGenerator[Event]:
        """See `CoordinatorService.generate`."""
        clock = asyncio.get_running_loop().time
        async with aclosing(super().generate(request, *arguments, **named)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    self.stamps.append(clock())
                yield event


@asynccontextmanager
async def running_coordinator(step_ms: float) -> AsyncIterator[tuple[StampedCoordinator, str]]:
    """One that serves gRPC too, at the address beside it, before an emulated target with steps of
    `step_ms`, and an embedded Redis. Raises `Unavailable` where a process breaks off."""
    engine = f"{EMULATED}vocab_size={len(_WORDS)},verify_ms={step_ms}"
    config = TargetConfig(engine=engine, model=MODEL, num_threads=1)
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-"))
        redis = EmbeddedRedis(Path(directory))
        redis.start()
        stack.callback(redis.stop)
        process = RoleProcess("service_roles", "target", {"config": asdict(config)})
        target = await stack.enter_async_context(process)
        coordinator = _coordinator(await RedisStore.connect(redis.url), target.address)
        stack.push_async_callback(coordinator.close)
        await coordinator.start()
        descriptor = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
        service = Service(descriptor, CoordinatorServicer(coordinator))
        server = RpcServer([service], ServerOptions())
        await server.start()
        stack.push_async_callback(server.stop)
        await server.set_serving(True)
        yield coordinator, server.address


@asynccontextmanager
async def open_http(coordinator: StampedCoordinator) -> AsyncIterator[str]:
    """Serves a coordinator by HTTP on this event loop as long as the context lasts; its base
    URL."""
    server = HttpServer(coordinator, HttpOptions())
    await server.start()
    try:
        yield f"http://{server.address}"
    finally:
        await server.stop()


def _coordinator(store: RedisStore, target: str) -> StampedCoordinator:
    """With a coordinator's defaults, and nobody who drafts."""
    config = CoordinatorConfig()
    return StampedCoordinator(
        CoordinatorOptions(
            name="coordinator-front-door",
            served_model_name=MODEL,
            defaults=RequestDefaults(config.num_draft_tokens, config.deadline_ms),
            length_control=False,
            run_ahead_rounds=config.run_ahead_rounds,
            max_sessions=config.max_sessions,
            timeouts=Timeouts.of(config),
        ),
        store=store,
        targets={"target": target_link(target)},
        drafts={},
        fallback=NgramDrafter(),
        text=_text(),
    )


def words(number: int, length: int) -> str:
    """A prompt of so many tokens that no other number shares a page with."""
    size = len(_WORDS)
    digits = (number % size, number // size % size)
    return "".join(f" {_WORDS[digits[place % 2]]}" for place in range(length))


def _text() -> TokenizerText:
    """A tokenizer whose every token is a word, and whose text is cut as those of models are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from outrider.tokenizer import TokenizerText

    space = "Ġ"  # How the byte-level alphabet writes a blank.
    vocabulary = {f"{space}{word}": place for place, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{space}{_WORDS[0]}"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerText(PreTrainedTokenizerFast(tokenizer_object=tokenizer), MODEL)
