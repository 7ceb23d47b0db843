"""The system under test, in a process of its own: a coordinator with gRPC and HTTP servers, with
and without keys, a target and a draft. It prints addresses and keys as a JSON line. It answers each
line on standard input with a line of figures. It ends when standard input is closed, after checking
itself."""

import asyncio
import gc
import json
import logging
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from coordinator.auth.access_control import OPEN, AccessControl, RedisSlots, watch_keys
from coordinator.http_api.gateway import Coordinators, build_gateway
from coordinator.http_api.server import HttpOptions, HttpServer
from coordinator.requests.chat_template import read_chat_template
from coordinator.service import CoordinatorService
from outrider.client.failover import EndpointPool
from outrider.config.deployment import HERMES, CoordinatorConfig
from outrider.config.emulated_spec import EmulatedSpec
from outrider.foundation.api_keys import Caller, add_key
from outrider.grammar.compiler import Grammars, GrammarTokenizer
from outrider.models.tokenizer import TokenizerText
from outrider.redis.address import RedisAddress
from outrider.telemetry.request_spans import ObservedRequests
from outrider.telemetry.setup import Exports, start_exports
from outrider.transport.server import ServerOptions
from tests.support.models import byte_level_tokenizer
from tests.support.stack import Stack, coordinator_api, emulated_stack, http_front, serve

UNTRACED: Final = CoordinatorConfig(trace_every_rounds=0)
VOCAB_SIZE: Final = 320
MAX_MODEL_LEN: Final = 1024
SPEC: Final = EmulatedSpec(
    vocab_size=VOCAB_SIZE,
    support=VOCAB_SIZE,  # Every mask must leave some tokens.
    verify_ms=0.5,
    draft_ms=0.2,
    max_model_len=MAX_MODEL_LEN,
    num_pages=512,
    eos=7,
)
CALLERS: Final = (
    Caller("fuzzer", "fuzzer", concurrency=64),
    Caller("holder", "holder", concurrency=64),
    Caller("control", "control"),
)
"""The holder leaves messages incomplete, and the messages of one caller wait for each other."""


async def main() -> None:
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    tokenizer.chat_template = read_chat_template(HERMES)
    with tempfile.TemporaryDirectory(prefix="outrider-fuzz-") as name:
        directory = Path(name)
        keys = {caller.name: add_key(directory / "keys", caller) for caller in CALLERS}
        exports = start_exports("prometheus=0", "coordinator", "127.0.0.1")
        assert isinstance(exports, Exports)
        assert exports.scrape is not None
        async with (
            emulated_stack(
                directory / "redis",
                SPEC,
                text=TokenizerText(tokenizer, "toy"),
                max_sessions=256,
                grammars=lambda: Grammars(lambda: GrammarTokenizer(tokenizer, (SPEC.eos,))),
                resume_grace_ms=500,
                length_control=True,
                observation=ObservedRequests(exports.tracer, exports.meter, UNTRACED),
            ) as stack,
            AsyncExitStack() as exits,
        ):
            addresses = {
                "coordinator": stack.server.address,
                "target": stack.target_server.address,
                "draft": stack.draft_server.address,
            }
            for place, gate in (("open", OPEN), ("locked", _gate(stack, directory, exits))):
                options = HttpOptions(access=gate, metrics=exports.scrape.render)
                await _serve(stack, place, options, addresses, exits)
            await _serve_gateway(addresses, exits)
            _tell({"addresses": addresses, "keys": keys})
            while await asyncio.to_thread(sys.stdin.readline):
                _tell(_figures(stack.coordinator))
        await exports.close()


def _gate(stack: Stack, directory: Path, exits: AsyncExitStack) -> AccessControl:
    slots = RedisSlots(RedisAddress(url=stack.redis.url, key_prefix="outrider:"))
    gate = AccessControl(watch_keys(directory / "keys"), slots)
    exits.push_async_callback(gate.close)
    return gate


async def _serve(
    stack: Stack, place: str, options: HttpOptions, addresses: dict[str, str], exits: AsyncExitStack
) -> None:
    gate = options.access
    url = await exits.enter_async_context(http_front(stack, options))
    addresses[f"{place}_http"] = url.removeprefix("http://")
    if gate.asks_for_keys:
        api = coordinator_api(stack.coordinator, gate)
        server = await serve(exits, api, ServerOptions(guard=gate.check_call))
        addresses[f"{place}_coordinator"] = server.address


async def _serve_gateway(addresses: dict[str, str], exits: AsyncExitStack) -> None:
    """Serves a gateway in front of the coordinator with keys."""
    coordinators = Coordinators(EndpointPool(f"http://{addresses['locked_http']}", str))
    server = HttpServer(HttpOptions(), build_gateway(coordinators))
    await server.start()
    exits.push_async_callback(server.stop)
    addresses["gateway_http"] = server.address


def _figures(coordinator: CoordinatorService) -> dict[str, int]:
    gc.collect()  # Makes asyncio log unretrieved errors.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "tasks": len(asyncio.all_tasks()),
        "files": len(os.listdir("/proc/self/fd")),
        "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "sessions": coordinator.num_running,
        "admitted": coordinator.admission.num_admitted,
    }


def _tell(value: Any) -> None:
    print(json.dumps(value), flush=True)


def run() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main())
