"""A coordinator with API keys, Redis, and an emulated target and draft, which are processes of
their own. Takes JSON options and a folder. Prints the addresses, the keys and the replicas' process
ids as a line of JSON, and answers each line on standard input with figures."""

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from coordinator.actor import CoordinatorActor
from outrider.config.deployment import EMULATED, HERMES, CoordinatorConfig
from outrider.foundation.api_keys import Caller, add_key
from outrider.redis.address import RedisAddress
from outrider.redis.embedded import EmbeddedRedis
from outrider.replica.logs import STANDARD_ERROR
from tests.attacks.victims import Child
from tests.support.models import byte_level_tokenizer

VOCAB_SIZE: Final = 320
SPEC: Final = (
    f"vocab_size={VOCAB_SIZE},support={VOCAB_SIZE},draft_ms=0.2,max_model_len=8192,num_pages=4096,"
    "eos=7"
)
CALLERS: Final = ({"name": "alice", "tenant": "alice"}, {"name": "mallory", "tenant": "mallory"})


async def main(options: dict[str, Any], directory: Path) -> None:
    tokenizer = options.get("tokenizer", "")
    if not tokenizer:
        tokenizer = str(directory / "tokenizer")
        byte_level_tokenizer(VOCAB_SIZE).save_pretrained(tokenizer)
    replica = {
        "engine": f"{EMULATED}{SPEC},verify_ms={options.get('verify_ms', 5.0)}",
        "tokenizer_directory": tokenizer,
    }
    callers = [Caller(**one) for one in options.get("callers", CALLERS)]
    keys = {one.name: add_key(directory / "keys", one) for one in callers}
    with ExitStack() as exits:
        replicas = {
            role: exits.enter_context(
                Child("replica", json.dumps({"role": role, "settings": replica}))
            )
            for role in ("target", "draft")
        }
        redis = exits.enter_context(EmbeddedRedis(directory / "redis"))
        config = CoordinatorConfig(
            grpc_port=0,
            port=0,
            api_key_file=str(directory / "keys"),
            served_model_name="toy",
            chat_template=HERMES,
            num_draft_tokens=4,
            resume_grace_ms=0,
            max_sessions=options.get("max_sessions", 4096),
            redis=RedisAddress(url=redis.url),
            tokenizer_directory=tokenizer,
            target_address=replicas["target"].told["address"],
            draft_address=replicas["draft"].told["address"],
            log_level="warning",
        )
        actor = CoordinatorActor()
        address = await actor.start(config, STANDARD_ERROR)
        host = actor.host
        assert host is not None
        assert host.service is not None
        addresses = {"http": host.engagement.http_address, "grpc": address, "redis": redis.url}
        pids = [one.process.pid for one in replicas.values()]
        print(json.dumps({"addresses": addresses, "keys": keys, "replicas": pids}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"sessions": host.service.num_running}), flush=True)
        await actor.stop(0.0)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), Path(sys.argv[2])))
