"""Requests of several shapes at a steady rate. Their tokens are compared with those of a run
without faults, and the arrival times are recorded."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx

from outrider.client import Client, GenerateRequest, SamplingParams, Tokens
from outrider.speculation.sampling_params import Rule
from tests.chaos.gateways import Gateways

PEAK_S: Final = 10.0
HTTP_SHARE: Final = 0.25
"""Share of the requests by HTTP, through gateways."""
END_S: Final = 60.0
"""Time in which the last requests must end."""
REFUSED_FOR_NOW: Final = (429, 503)
RETRY_S: Final = 1.0
"""Delay before a request is repeated that was refused for now, or whose gateway was killed."""
RETRIES: Final = 15
"""Number of repetitions. A deployment that refuses all requests for longer has failed."""
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Shape:
    """A kind of request. `size` is its number of tokens, relative to `Work.num_tokens`."""

    size: float = 1.0
    prompt_length: int = 50
    sampling: Mapping[str, float] = field(default_factory=dict)
    logprobs: int | None = None
    num_draft_tokens: int | None = None


SHAPES: Final = (
    Shape(),
    Shape(0.25, prompt_length=300),
    Shape(sampling={"temperature": 0.0}, logprobs=2),
    Shape(sampling={"top_p": 0.9, "presence_penalty": 0.5}),
    Shape(0.5, num_draft_tokens=0),
)


@dataclass(frozen=True)
class Work:
    num_tokens: int
    num_seeds: int
    num_clients: int

    def question(self, seed: int) -> "Question":
        return Question(SHAPES[seed % len(SHAPES)], self.num_tokens, seed)


@dataclass(frozen=True)
class Question:
    """A request by gRPC, and the same by HTTP."""

    shape: Shape
    num_tokens: int
    """For `Shape.size` 1."""
    seed: int

    @property
    def prompt(self) -> list[int]:
        return [10 + (self.seed + place) % 50 for place in range(self.shape.prompt_length)]

    @property
    def max_tokens(self) -> int:
        return round(self.shape.size * self.num_tokens)

    def request(self) -> GenerateRequest:
        sampling = SamplingParams(**self.shape.sampling)
        return GenerateRequest(
            tuple(self.prompt),
            max_tokens=self.max_tokens,
            seed=self.seed,
            sampling=sampling,
            rule=None if sampling.temperature == 0 else Rule.COUPLED,
            ignore_eos=True,
            logprobs=self.shape.logprobs,
            num_draft_tokens=self.shape.num_draft_tokens,
        )

    def body(self) -> dict[str, Any]:
        speculation: dict[str, Any] = {"num_draft_tokens": self.shape.num_draft_tokens}
        if self.shape.sampling.get("temperature") != 0:
            speculation["rule"] = "coupled"
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": self.shape.logprobs,
            "speculation": speculation,
            **self.shape.sampling,
        }


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
    """Whether the request was sent to a gateway by HTTP, not to a coordinator by gRPC."""
    excuse: str = ""
    """Why the request may fail: the pair of faults during which it was in flight, or `TILT`."""

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
    """Clients of one deployment. Most use the Python client, the others use HTTP."""

    def __init__(
        self, addresses: Callable[[], str], work: Work, seed: int, gateways: Gateways
    ) -> None:
        self._addresses = addresses
        self._gateways = gateways
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
        """The results of the requests. The failure of a request with an `excuse` does not count;
        wrong tokens always count."""
        excused = [one for one in self.asked if one.excuse]
        errors = [one.error for one in self.asked if one.error and not one.excuse]
        return {
            "num_requests": len(self.asked),
            "num_http_requests": sum(one.is_by_http for one in self.asked),
            "num_excused": dict(Counter(one.excuse for one in excused)),
            "num_failed_excused": sum(bool(one.error) for one in excused),
            "errors_excused": sorted({one.error for one in excused if one.error})[:20],
            "num_failed": len(errors),
            "num_wrong": sum(one.is_wrong for one in self.asked),
            "num_stuck": sum(one.ended is None for one in self.asked),
            "errors": sorted(set(errors))[:20],
        }

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
        question = self._work.question(seed)
        return await _collected(streamed(self._gateways, question, self._random), one)

    async def _stream(self, seed: int, one: Asked) -> tuple[int, ...]:
        async with Client(self._addresses) as client:
            events = client.generate(self._work.question(seed).request())
            return await _collected(
                (event.token_ids async for event in events if isinstance(event, Tokens)), one
            )


async def _collected(parts: AsyncIterator[Sequence[int]], one: Asked) -> tuple[int, ...]:
    found: list[int] = []
    async for tokens in parts:
        found += tokens
        one.arrivals.append(asyncio.get_running_loop().time())
    return tuple(found)


class RequestFailed(Exception):
    """A request by HTTP was refused, or its stream ended early."""


async def streamed(
    gateways: Gateways, question: Question, rng: random.Random
) -> AsyncIterator[Sequence[int]]:
    """The tokens of a completion, as they arrive through any of the gateways. If a gateway is
    killed, continues the stream through any of them. Raises `RequestFailed` for any other failure,
    because a gateway hides those of coordinators."""
    key, last_id, num_retries = f"{rng.getrandbits(128):032x}", "", 0
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        while True:
            address = rng.choice(gateways.addresses)
            url, num_kills = f"http://{address}/v1/completions", gateways.num_kills[address]
            headers = {"idempotency-key": key} | ({"last-event-id": last_id} if last_id else {})
            try:
                stream = client.stream("POST", url, headers=headers, json=question.body())
                async with stream as answer:
                    if answer.status_code == 200:
                        async for event_id, data in _events(answer.aiter_lines()):
                            if data == "[DONE]":
                                return
                            chunk = json.loads(data)
                            if "error" in chunk:
                                raise RequestFailed(data)
                            last_id = event_id or last_id
                            for choice in chunk["choices"]:
                                yield choice.get("token_ids") or ()
                        raise RequestFailed("the stream ended before its time")
                    failure = f"{answer.status_code} {(await answer.aread()).decode()[:500]}"
                    may_retry = answer.status_code in REFUSED_FOR_NOW
            except httpx.ConnectError as error:
                failure, may_retry = repr(error), True
            except httpx.TransportError as error:
                failure, may_retry = repr(error), num_kills != gateways.num_kills[address]
            num_retries += 1
            if not may_retry or num_retries > RETRIES:
                raise RequestFailed(failure)
            await asyncio.sleep(RETRY_S)


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    """Ids and data of server-sent events. An incomplete last event is dropped."""
    event_id = data = ""
    async for line in lines:
        name, _, value = line.partition(":")
        if name == "id":
            event_id = value.strip()
        elif name == "data":
            data = value.strip()
        elif not line and data:
            yield event_id, data
            event_id = data = ""
