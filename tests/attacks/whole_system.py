"""A whole system in one process: an emulated target and draft, Redis, and a coordinator with API
keys. Takes JSON options and a folder. Prints its addresses and keys as a line of JSON, and answers
each line on standard input with figures."""

import asyncio
import json
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from coordinator.actor import collect_less
from coordinator.auth.access_control import AccessControl, RedisSlots, watch_keys
from coordinator.http_api.app import build_app
from coordinator.http_api.server import HttpOptions, HttpServer
from coordinator.requests.chat_template import read_chat_template
from outrider.config.deployment import HERMES
from outrider.config.emulated_spec import EmulatedSpec
from outrider.foundation.api_keys import Caller, add_key
from outrider.grammar.compiler import Grammars, GrammarTokenizer
from outrider.limits import GRPC_AGE_MS
from outrider.models.tokenizer import TokenizerText
from outrider.redis.address import RedisAddress
from outrider.transport.server import ServerOptions
from tests.support.models import byte_level_tokenizer
from tests.support.stack import coordinator_api, emulated_stack, serve

VOCAB_SIZE: Final = 320
CALLERS: Final = ({"name": "alice", "tenant": "alice"}, {"name": "mallory", "tenant": "mallory"})


async def main(options: dict[str, Any], directory: Path) -> None:
    spec = EmulatedSpec(
        vocab_size=VOCAB_SIZE,
        support=VOCAB_SIZE,
        verify_ms=options.get("verify_ms", 5.0),
        draft_ms=0.2,
        max_model_len=8192,
        num_pages=4096,
        eos=7,
    )
    tokenizer = byte_level_tokenizer(VOCAB_SIZE)
    tokenizer.chat_template = read_chat_template(HERMES)
    text = TokenizerText(tokenizer, "toy")
    if "tokenizer" in options:
        text = TokenizerText.load(Path(options["tokenizer"]))
    callers = [Caller(**one) for one in options.get("callers", CALLERS)]
    keys = {one.name: add_key(directory / "keys", one) for one in callers}
    settings = {"max_sessions": options["max_sessions"]} if "max_sessions" in options else {}
    if options.get("grammar"):
        settings["grammars"] = lambda: Grammars(lambda: GrammarTokenizer(tokenizer, (spec.eos,)))
    running = emulated_stack(directory / "redis", spec, text=text, length_control=True, **settings)
    async with running as stack, AsyncExitStack() as exits:
        slots = RedisSlots(RedisAddress(url=stack.redis.url, key_prefix="outrider:"))
        access = AccessControl(watch_keys(directory / "keys"), slots)
        exits.push_async_callback(access.close)
        http_options = HttpOptions(access=access)
        http = HttpServer(http_options, build_app(stack.coordinator, http_options))
        await http.start()
        exits.push_async_callback(http.stop)
        rpc = await serve(
            exits,
            coordinator_api(stack.coordinator, access),
            ServerOptions(guard=access.check_call, reflection=False, connection_age_ms=GRPC_AGE_MS),
        )
        addresses = {"http": http.address, "grpc": rpc.address, "redis": stack.redis.url}
        collect_less()
        print(json.dumps({"addresses": addresses, "keys": keys}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"sessions": stack.coordinator.num_running}), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main(json.loads(sys.argv[1]), Path(sys.argv[2])))
