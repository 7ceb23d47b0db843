"""Mallory, who may make 60 requests a minute, makes 8 requests for 2,048 completions each, with a
constraint, biases and stop strings. She leaves after the first events.

Held if Redis grows by at most `GROWTH_MIB`, alice is without an event for at most `GAP_S`, and none
of her requests is refused."""

import asyncio
from typing import Final

import httpx
import redis

from tests.attacks.victims import GAP_S, Alice, System, judge

NUM_REQUESTS: Final = 8
NUM_LINES: Final = 5
GROWTH_MIB: Final = 256
BODY: Final = {
    "prompt": [f"prompt number {number}" for number in range(128)],
    "n": 16,
    "max_tokens": 2000,
    "stream": True,
    "stop": ["s" * 250 + str(number) for number in range(16)],
    "structured_outputs": {"choice": [f"c{number:04}" + "x" * 53 for number in range(1024)]},
    "logit_bias": {str(100 + number): -0.123456789012 for number in range(200)},
}
CALLERS: Final = [
    {"name": "alice", "tenant": "alice"},
    {"name": "mallory", "tenant": "mallory", "requests_per_minute": 60},
]


async def mallory(system: System, store: redis.Redis) -> float:
    """Returns the largest growth of Redis, MiB."""

    def used_mib() -> float:
        return float(store.info("memory")["used_memory"]) / 2**20

    url = f"http://{system.addresses['http']}/v1/completions"
    before, most = used_mib(), 0.0
    async with httpx.AsyncClient(timeout=60) as client:
        for number in range(NUM_REQUESTS):
            headers = system.headers("mallory")
            told: object
            try:
                async with client.stream("POST", url, headers=headers, json=BODY) as answer:
                    told, num_left = answer.status_code, NUM_LINES
                    async for _ in answer.aiter_lines():
                        num_left -= 1
                        if not num_left:
                            break
            except httpx.HTTPError as error:
                told = type(error).__name__
            most = max(most, used_mib() - before)
            print(f"request {number}: {told}; Redis {used_mib():.0f} MiB, {store.dbsize()} keys")
    return most


def attack() -> tuple[bool, str]:
    with System(callers=CALLERS) as system, Alice(system) as alice:
        path = system.addresses["redis"].removeprefix("unix://")
        with redis.Redis(unix_socket_path=path) as store:
            alice.wait_for_calm()
            growth = asyncio.run(mallory(system, store))
            seen = alice.during()
    is_held = growth <= GROWTH_MIB and seen["longest_gap_s"] <= GAP_S and not seen["refused"]
    return is_held, (
        f"Redis grew by {growth:.0f} MiB; alice's longest gap {seen['longest_gap_s']} s, refused "
        f"{seen['refused']}"
    )


if __name__ == "__main__":
    judge(attack)
