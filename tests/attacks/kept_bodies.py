"""32 streams at the coordinator, then 32 at the gateway, whose bodies have 4 MiB, mostly of a field
that nobody reads. On a busy machine, so many bodies at a time exceed the limit of a tenant. Alice
then tries again after the time that the answer states.

Held if the process grows by at most `EACH_MIB` a stream."""

import asyncio
import json
from typing import Final

import httpx

from tests.attacks.victims import Doors, judge

NUM_STREAMS: Final = 32
EACH_MIB: Final = 1.0
BULK: Final = "x" * (4 * 2**20 - 200)
BODY: Final = json.dumps({"prompt": [1], "max_tokens": 500, "stream": True, "user": BULK}).encode()


async def growth_mib(doors: Doors, door: str) -> float:
    """Growth of the process while all streams run, MiB a stream."""
    url, before = f"http://{doors.addresses[door]}/v1/completions", doors.memory_mib()
    limits, is_over = httpx.Limits(max_connections=2 * NUM_STREAMS), asyncio.Event()
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def stream(begun: asyncio.Event) -> None:
            while not begun.is_set():
                headers = doors.headers("alice")
                async with client.stream("POST", url, headers=headers, content=BODY) as answer:
                    if answer.status_code == 429:
                        await asyncio.sleep(float(answer.headers["retry-after"]))
                        continue
                    answer.raise_for_status()
                    async for _ in answer.aiter_lines():
                        begun.set()
                        if is_over.is_set():
                            return

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
            for one in begun:
                group.create_task(stream(one))
                await asyncio.sleep(0.05)
            for one in begun:
                await one.wait()
            grown = (doors.memory_mib() - before) / NUM_STREAMS
            is_over.set()
    return grown


def attack() -> tuple[bool, str]:
    found = {}
    for door in ("http", "gateway"):
        with Doors() as doors:
            found[door] = asyncio.run(growth_mib(doors, door))
    return max(found.values()) <= EACH_MIB, (
        f"{found['http']:.1f} MiB a stream at the coordinator, {found['gateway']:.1f} through the "
        "gateway (with the coordinator behind it, in the same process)"
    )


if __name__ == "__main__":
    judge(attack)
