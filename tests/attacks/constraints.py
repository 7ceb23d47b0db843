"""Mallory sends 70 large constraints that the coordinator has checked before, and alice small ones
of her own.

Held if alice's slowest answer takes at most `GAP_S`, and coordinator, target and draft together
grow by at most `GROWTH_MIB`."""

import asyncio
import json
import math
import time
from collections import Counter
from typing import Final

import httpx

from tests.attacks.victims import GAP_S, System, judge

NUM_CONSTRAINTS: Final = 70
NUM_FIELDS: Final = 2300
AT_A_TIME: Final = 24
PATIENCE: Final = 40
GROWTH_MIB: Final = 512


def constrained(number: int) -> bytes:
    fields = {f"{number:x}_{index:x}": {} for index in range(NUM_FIELDS)}
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
    return json.dumps(body).encode()


async def waits(system: System) -> tuple[float, float]:
    """Alice's slowest answer before and during the attack, s."""
    url = f"http://{system.addresses['http']}/v1/completions"
    limits = httpx.Limits(max_connections=2 * NUM_CONSTRAINTS)
    bodies, num_asked = [constrained(number) for number in range(NUM_CONSTRAINTS)], 0
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def alice() -> float:
            nonlocal num_asked
            num_asked += 1
            start, regex = time.monotonic(), f"[a-z]{{4}}{num_asked}"
            body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": regex}}
            answer = await client.post(url, headers=system.headers("alice"), json=body)
            return time.monotonic() - start if answer.status_code == 200 else math.inf

        places = asyncio.Semaphore(AT_A_TIME)

        async def mallory(body: bytes, tries: int = 1) -> int:
            for left in reversed(range(tries)):
                answer = await client.post(url, headers=system.headers("mallory"), content=body)
                if answer.status_code != 429 or not left:
                    break
                await asyncio.sleep(1)
            return answer.status_code

        async def first(body: bytes) -> int:
            async with places:
                return await mallory(body, PATIENCE)

        before = max([await alice() for _ in range(3)])
        statuses = Counter(await asyncio.gather(*map(first, bodies)))
        print(f"mallory gets {dict(statuses)} at first", flush=True)
        again = [asyncio.create_task(mallory(body)) for body in bodies]
        await asyncio.sleep(3)
        during = max(await asyncio.gather(*(alice() for _ in range(3))))
        for one in again:
            one.cancel()
        await asyncio.gather(*again, return_exceptions=True)
        return before, during


def attack() -> tuple[bool, str]:
    with System() as system:
        memory = system.forget_peak()
        before, during = asyncio.run(waits(system))
        growth = system.memory_mib("VmHWM") - memory
    if before > GAP_S:
        raise RuntimeError(f"alice waits {before:.1f} s without an attack")
    return during <= GAP_S and growth <= GROWTH_MIB, (
        f"alice waits {before:.2f} s before and {during:.2f} s during the attack; growth {growth} "
        "MiB"
    )


if __name__ == "__main__":
    judge(attack)
