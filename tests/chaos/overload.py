"""More requests than a deployment can carry: how much is answered, and how the rest is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from benchmarks.report import percentile
from outrider.client import Client
from outrider.errors import Overloaded
from tests.chaos.load import END_S, Load

TIMES: Final = 3.0
"""As many requests a second as the peak has."""
SAMPLE_S: Final = 1.0
WARM_S: Final = 10.0
"""Until memory is measured first."""
MIB: Final = 2**20
GOODPUT_MIN: Final = 0.9
"""Of the peak ..."""
REFUSED_MS_MAX: Final = 100.0
"""... the 99th percentile ..."""
MEMORY_GROWN_MAX: Final = 64 * MIB
"""... and of any replica: what is promised."""


@dataclass
class Overload:
    """Asks at a steady rate, whatever comes of it; nothing is asked again."""

    load: Load
    addresses: str
    pids: Sequence[int]
    """Of all replicas."""
    num_answered: int = 0
    num_wrong: int = 0
    num_running_max: int = 0
    """Sessions of all coordinators together."""
    refused_after_s: list[float] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Errors that are no refusal with a time to retry after."""

    async def run(self, peak: float, seconds: float) -> dict[str, Any]:
        """`peak` is in requests a second."""
        loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        began = loop.time()
        sampling = asyncio.create_task(self._sample())
        memory, is_warm = [_resident_bytes(pid) for pid in self.pids], False
        async with Client(self.addresses, resume_timeout_s=0) as client:
            number = 0
            while (now := loop.time()) < began + seconds:
                if not is_warm and now > began + WARM_S:
                    memory, is_warm = [_resident_bytes(pid) for pid in self.pids], True
                task = asyncio.create_task(self._ask(client, number))
                running.add(task)
                task.add_done_callback(running.discard)
                number += 1
                await asyncio.sleep(max(0.0, began + number / (TIMES * peak) - loop.time()))
            goodput = self.num_answered / seconds
            grown = [_resident_bytes(pid) - before for pid, before in
                     zip(self.pids, memory, strict=True)]  # fmt: skip
            if running:
                await asyncio.wait(running, timeout=END_S)
        if sampling.done():
            await sampling  # Raises what it met.
        sampling.cancel()
        num_ended = self.num_answered + self.num_wrong + len(self.refused_after_s)
        refused_ms = 1e3 * percentile(self.refused_after_s or [0.0], 99)
        missed = {
            "goodput": goodput < GOODPUT_MIN * peak,
            "refused_after": refused_ms > REFUSED_MS_MAX,
            "memory": max(grown) > MEMORY_GROWN_MAX,
        }
        return {
            "missed": sorted(key for key, is_missed in missed.items() if is_missed),
            "num_stuck": number - num_ended - len(self.others),
            "num_wrong": self.num_wrong,
            "peak_requests_per_second": round(peak, 2),
            "asked_per_second": round(number / seconds, 2),
            "goodput_of_peak": round(goodput / peak, 3),
            "num_asked": number,
            "num_refused": len(self.refused_after_s),
            "refused_after_p99_ms": round(refused_ms, 1),
            "num_running_max": self.num_running_max,
            "memory_grown_mib_max": round(max(grown) / MIB, 1),
            "errors": sorted(set(self.others))[:20],
        }

    async def _ask(self, client: Client, number: int) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            is_right = await self.load.is_right(client, number)
            self.num_answered += is_right
            self.num_wrong += not is_right
        except Overloaded:
            self.refused_after_s.append(loop.time() - began)
        except Exception as error:  # noqa: BLE001 (whatever it is, the request has failed)
            self.others.append(f"{type(error).__name__}: {error}")

    async def _sample(self) -> None:
        async with AsyncExitStack() as stack:
            each = [
                await stack.enter_async_context(Client(one)) for one in self.addresses.split(",")
            ]
            while True:
                said = await asyncio.gather(*(client.describe() for client in each))
                running = sum(one.num_running for one in said)
                self.num_running_max = max(self.num_running_max, running)
                await asyncio.sleep(SAMPLE_S)


def _resident_bytes(pid: int) -> int:
    found: int = psutil.Process(pid).memory_info().rss
    return found
