"""Mallory, who may make one request a minute, repeats a 2.4 MiB body that cannot be valid, two at a
time.

Held if alice is without an event for at most `GAP_S`, and at most `READ_MAX` bodies are read before
their request is refused."""

import asyncio
import time
from collections import Counter
from typing import Final

import httpx

from tests.attacks.victims import GAP_S, Alice, System, judge

SECONDS: Final = 15
AT_A_TIME: Final = 2
READ_MAX: Final = 2
ENTRIES: Final = b",".join(b'"%x":1' % number for number in range(262_000))
BODY: Final = b'{"prompt":"x","structured_outputs":{' + ENTRIES + b"}}"
CALLERS: Final = [
    {"name": "alice", "tenant": "alice"},
    {"name": "mallory", "tenant": "mallory", "requests_per_minute": 1, "concurrency": 1},
]


async def mallory(system: System, answers: Counter[str]) -> None:
    url, ends_at = f"http://{system.addresses['http']}/v1/completions", time.monotonic() + SECONDS

    async def repeat() -> None:
        while time.monotonic() < ends_at:
            try:
                answer = await client.post(url, headers=system.headers("mallory"), content=BODY)
                answers[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                answers[type(error).__name__] += 1

    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(repeat() for _ in range(AT_A_TIME)))


def attack() -> tuple[bool, str]:
    answers = Counter[str]()
    with System(callers=CALLERS) as system, Alice(system) as alice:
        alice.wait_for_calm()
        asyncio.run(mallory(system, answers))
        seen = alice.during()
    num_read = answers.total() - answers["429"]
    return seen["longest_gap_s"] <= GAP_S and num_read <= READ_MAX, (
        f"mallory's answers {dict(answers)}; alice's longest gap {seen['longest_gap_s']} s"
    )


if __name__ == "__main__":
    judge(attack)
