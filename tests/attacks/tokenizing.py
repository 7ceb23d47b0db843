"""Mallory, who may make 60 requests a minute, sends 20 texts of 2 MiB of spaces to /tokenize, and
alice sends `hello`.

Held if alice's slowest answer takes at most `GAP_S`."""

import asyncio
import math
import time
from collections import Counter
from typing import Final

import httpx

from outrider.models.sources import resolve_model
from tests.attacks.victims import GAP_S, System, judge

NUM_REQUESTS: Final = 20
SPACES: Final = {"prompt": " " * (2 * 2**20 - 10)}
CALLERS: Final = [
    {"name": "alice", "tenant": "alice"},
    {"name": "mallory", "tenant": "mallory", "requests_per_minute": 60, "concurrency": 1},
]


async def waits(system: System) -> tuple[float, float, Counter[int]]:
    """Alice's slowest answer before and during the attack, s, and the statuses that mallory
    gets."""
    url = f"http://{system.addresses['http']}/tokenize"
    limits = httpx.Limits(max_connections=2 * NUM_REQUESTS)
    async with httpx.AsyncClient(timeout=200, limits=limits) as client:

        async def post(who: str, body: dict[str, str]) -> int:
            return (await client.post(url, headers=system.headers(who), json=body)).status_code

        async def hello() -> float:
            start = time.monotonic()
            status = await post("alice", {"prompt": "hello"})
            return time.monotonic() - start if status == 200 else math.inf

        before = max([await hello() for _ in range(5)])
        calls = [asyncio.create_task(post("mallory", SPACES)) for _ in range(NUM_REQUESTS)]
        await asyncio.sleep(1.5)
        during = await hello()
        while not all(one.done() for one in calls):
            during = max(during, await hello())
            await asyncio.sleep(0.2)
        return before, during, Counter(one.result() for one in calls)


def attack() -> tuple[bool, str]:
    with System(tokenizer=str(resolve_model("demo")), callers=CALLERS) as system:
        before, during, statuses = asyncio.run(waits(system))
    if before > GAP_S:
        raise RuntimeError(f"alice waits {before:.1f} s without an attack")
    return during <= GAP_S, (
        f"alice waits {before:.2f} s before and {during:.2f} s during the attack; mallory gets "
        f"{dict(statuses)}"
    )


if __name__ == "__main__":
    judge(attack)
