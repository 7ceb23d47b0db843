"""Alice streams short completions one after the other, each over a new connection. She answers each
line on standard input with her number of events, her longest time without an event (she may wait,
or be refused), and the refusals, all since the last line."""

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any, Final

import grpc
import httpx

from outrider.v1 import coordinator_pb2 as pb

PROMPT: Final = [20, 30, 40]
NUM_TOKENS: Final = 100
TIMEOUT_S: Final = 15
PAUSE_S: Final = 0.02


class Seen:
    def __init__(self) -> None:
        self.since = time.monotonic()
        self.clear()

    def clear(self) -> None:
        self.number, self.longest_s, self.refused = 0, 0.0, Counter[str]()

    def event(self) -> None:
        self.look()
        self.number, self.since = self.number + 1, time.monotonic()

    def look(self) -> None:
        """Counts the time since the last event, which may go on."""
        self.longest_s = max(self.longest_s, time.monotonic() - self.since)


async def by_http(address: str, key: str, seen: Seen) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    url, headers = f"http://{address}/v1/completions", {"authorization": f"Bearer {key}"}
    while True:
        try:
            async with (
                httpx.AsyncClient(timeout=TIMEOUT_S) as client,
                client.stream("POST", url, headers=headers, json=body) as answer,
            ):
                if answer.status_code != 200:
                    seen.refused[str(answer.status_code)] += 1
                    continue
                async for line in answer.aiter_lines():
                    if '"error"' in line:
                        seen.refused[line[:80]] += 1
                    elif line.startswith("data:"):
                        seen.event()
        except httpx.HTTPError as error:
            seen.refused[type(error).__name__] += 1
        finally:
            await asyncio.sleep(PAUSE_S)


async def by_grpc(address: str, key: str, seen: Seen) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True
    ).SerializeToString()
    metadata = [("authorization", f"Bearer {key}")]
    options = [("grpc.use_local_subchannel_pool", 1)]
    while True:
        channel: Any
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            generate = channel.unary_stream("/outrider.v1.Coordinator/Generate")
            try:
                async for _ in generate(request, metadata=metadata, timeout=TIMEOUT_S):
                    seen.event()
            except grpc.RpcError as error:
                seen.refused[f"{error.code().name} {(error.details() or '')[:60]}"] += 1
        await asyncio.sleep(PAUSE_S)


async def main(door: str, address: str, key: str) -> None:
    seen = Seen()
    call = by_grpc if door == "grpc" else by_http
    calling = asyncio.create_task(call(address, key, seen))
    print("{}", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        seen.look()
        told = {"events": seen.number, "longest_gap_s": round(seen.longest_s, 2)}
        print(json.dumps(told | {"refused": dict(seen.refused)}), flush=True)
        seen.clear()
    calling.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
