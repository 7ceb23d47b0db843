"""Requests at a steady rate. Their tokens are compared with those of a run without faults, and the
arrival times are recorded."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx
import openai

from coordinator.http_api.gateway import Coordinators, build_gateway
from coordinator.http_api.server import HttpOptions, HttpServer
from deploy.fleet.launcher import Deployment
from outrider.client import Client, GenerateRequest, Tokens
from outrider.client.failover import EndpointPool
from outrider.speculation.sampling_params import Rule

PEAK_S: Final = 10.0
HTTP_SHARE: Final = 0.25
"""Share of the requests by HTTP, through a gateway."""
END_S: Final = 60.0
"""Time in which the last requests must end."""
REFUSED_FOR_NOW: Final = (429, 503)
RETRY_S: Final = 1.0
"""Delay before a request is repeated that was refused with a time to retry."""
RETRIES: Final = 15
"""Number of repetitions. A deployment that refuses all requests for longer has failed."""
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Work:
    num_tokens: int
    num_seeds: int
    num_clients: int


@dataclass
class Asked:
    began: float
    arrivals: list[float] = field(default_factory=list)
    ended: float | None = None
    """None until the request ends."""
    error: str = ""
    is_wrong: bool = False
    """Whether the tokens differ from those of the run without faults."""
    is_by_http: bool = False
    """Whether the request was sent to the gateway by HTTP, not to a coordinator by gRPC."""
    pair: str = ""
    """The pair of faults during which the request was in flight; empty = none."""

    def overlaps(self, begin: float, end: float) -> bool:
        """Whether the request was in flight at any moment of this time."""
        return self.began < end and (self.ended is None or self.ended > begin)

    def is_past(self, at: float) -> bool:
        """Whether the request has ended, or has got tokens since this moment."""
        return self.ended is not None or bool(self.arrivals and self.arrivals[-1] > at)

    def gap(self, begin: float, end: float) -> float:
        """The longest wait for tokens that overlaps this time, counted from the beginning of the
        wait. The wait for the first tokens begins with the request."""
        times = [self.began, *self.arrivals]
        gaps = [
            after - max(before, begin)
            for before, after in pairwise(times)
            if after > begin and before < end
        ]
        return max(gaps, default=0.0)


class Load:
    """Clients of one deployment. Most use the Python client, the others use OpenAI's by HTTP."""

    def __init__(self, addresses: Callable[[], str], work: Work, seed: int, gateway: str) -> None:
        """`gateway` is the address of a gateway."""
        self._addresses = addresses
        self._gateway = gateway
        self._work = work
        self._random = random.Random(seed)
        self._expected: list[tuple[int, ...]] = []
        self._running: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []

    async def prepare(self) -> float:
        """Records the tokens of each request without faults. Then measures how many requests a
        second keep the deployment busy."""
        seeds = range(self._work.num_seeds)
        self._expected = [await self._stream(seed, Asked(0.0)) for seed in seeds]
        loop = asyncio.get_running_loop()
        until, number = loop.time() + PEAK_S, 0

        async def ask() -> None:
            nonlocal number
            while loop.time() < until:
                await self._stream(self._random.choice(seeds), Asked(loop.time()))
                number += 1

        began = loop.time()
        await asyncio.gather(*(ask() for _ in range(self._work.num_clients)))
        return number / (loop.time() - began)

    async def run(self, requests_per_second: float) -> None:
        """Sends requests at random times, at this rate on average, until cancelled."""
        while True:
            task = asyncio.create_task(self._ask(self._random.randrange(self._work.num_seeds)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            await asyncio.sleep(self._random.expovariate(requests_per_second))

    async def finish(self) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=END_S)

    def report(self) -> dict[str, Any]:
        """The results of the requests. A failure during a pair of faults does not count; wrong
        tokens always count."""
        paired = [one for one in self.asked if one.pair]
        errors = [one.error for one in self.asked if one.error and not one.pair]
        return {
            "num_requests": len(self.asked), "num_during_pairs": len(paired),
            "num_http_requests": sum(one.is_by_http for one in self.asked),
            "num_failed_during_pairs": sum(bool(one.error) for one in paired),
            "errors_during_pairs": sorted({one.error for one in paired if one.error})[:20],
            "num_failed": len(errors), "num_wrong": sum(one.is_wrong for one in self.asked),
            "num_stuck": sum(one.ended is None for one in self.asked),
            "errors": sorted(set(errors))[:20],
        }  # fmt: skip

    async def _ask(self, seed: int) -> None:
        loop = asyncio.get_running_loop()
        one = Asked(loop.time(), is_by_http=self._random.random() < HTTP_SHARE)
        self.asked.append(one)
        ask = self._by_http if one.is_by_http else self._stream
        try:
            one.is_wrong = await ask(seed, one) != self._expected[seed]
        except Exception as error:  # noqa: BLE001 (any error: the request has failed)
            one.error = f"{type(error).__name__}: {error}"
        one.ended = loop.time()

    async def _by_http(self, seed: int, one: Asked) -> tuple[int, ...]:
        return await _collected(
            streamed(self._gateway, _prompt(seed), self._work.num_tokens, seed), one
        )

    async def _stream(self, seed: int, one: Asked) -> tuple[int, ...]:
        request = GenerateRequest(
            _prompt(seed), max_tokens=self._work.num_tokens, seed=seed,
            rule=Rule.COUPLED, ignore_eos=True,
        )  # fmt: skip
        async with Client(self._addresses) as client:
            events = client.generate(request)
            return await _collected(
                (event.token_ids async for event in events if isinstance(event, Tokens)), one
            )


async def _collected(parts: AsyncIterator[Sequence[int]], one: Asked) -> tuple[int, ...]:
    found: list[int] = []
    async for tokens in parts:
        found += tokens
        one.arrivals.append(asyncio.get_running_loop().time())
    return tuple(found)


def _prompt(seed: int) -> tuple[int, ...]:
    return tuple(range(10 + seed, 60))


async def streamed(
    address: str, prompt: tuple[int, ...], num_tokens: int, seed: int
) -> AsyncIterator[list[int]]:
    """The tokens of a completion, as they arrive. Raises the client's errors, and
    `APIConnectionError` if a stream ends early."""
    base_url = f"http://{address}/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        finished = False
        async for chunk in await _begun(client, prompt, num_tokens, seed):
            for choice in chunk.choices:
                finished = finished or choice.finish_reason is not None
                if found := (choice.model_extra or {}).get("token_ids"):
                    yield found
        if not finished:
            raise openai.APIConnectionError(
                message="the stream ended before its time", request=httpx.Request("POST", base_url)
            )


async def _begun(
    client: openai.AsyncOpenAI, prompt: tuple[int, ...], num_tokens: int, seed: int
) -> Any:
    """Opens a stream. Retries if the server refuses the request with a time to retry, but not if
    the connection fails."""
    for left in reversed(range(RETRIES)):
        try:
            return await client.completions.create(
                model="", prompt=list(prompt), max_tokens=num_tokens, seed=seed, stream=True,
                extra_body={
                    "ignore_eos": True, "return_token_ids": True,
                    "speculation": {"rule": "coupled"},
                },
            )  # fmt: skip
        except openai.APIStatusError as error:
            if error.status_code not in REFUSED_FOR_NOW or not left:
                raise
            await asyncio.sleep(RETRY_S)
    return None


@asynccontextmanager
async def gateway_of(deployment: Deployment) -> AsyncIterator[str]:
    """Runs a gateway that follows coordinators as they come and go; yields its address."""

    def find() -> str:
        addresses = deployment.overview.addresses("coordinator", http=True)
        return ",".join(f"http://{one}" for one in addresses)

    coordinators = Coordinators(EndpointPool(find, str))
    options = HttpOptions()
    server = HttpServer(options, build_gateway(coordinators, options.hosts))
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
