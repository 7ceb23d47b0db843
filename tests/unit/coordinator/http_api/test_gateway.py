"""The gateway, with coordinators that break connections, refuse requests and come back."""

import asyncio
import errno
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from io import BytesIO
from typing import Any
from unittest.mock import AsyncMock

import httpx
import httpx2
import pytest

from coordinator.auth.access_control import OPEN, AccessControl, watch_keys
from coordinator.http_api.gateway import Coordinators, build_gateway
from coordinator.http_api.reading import error_body, to_json
from coordinator.http_api.server import Metrics
from outrider import limits
from outrider.client.failover import RESUME_TIMEOUT_S, EndpointPool
from outrider.errors import Overloaded, Unavailable
from outrider.foundation.api_keys import given_keys

pytestmark = pytest.mark.virtual

API_KEY, OTHER_KEY = "0123456789abcdef0123", "another-key-0123456"
URLS = "http://a:1,http://b:2"
SSE = {"content-type": "text/event-stream; charset=utf-8"}
EVENTS = [
    *(b'id: %d\ndata: {"text":"t%d"}\n\n' % (n, n) for n in range(4)),
    b"id: 4\ndata: [DONE]\n\n",
]
WHOLE = b"".join(EVENTS)
BODY = {"prompt": "a", "stream": True}
INTERRUPTED = (
    b"data: " + to_json(error_body(Unavailable("x"))) + b"\n\n",
    b"event: response.failed\ndata: "
    + to_json({"response": {"error": {**error_body(Unavailable("x"))["error"], "code": "y"}}})
    + b"\n\n",
)
ERRORS = {
    "reset": httpx2.ReadError(""),  # httpx gives most errors of connections no text.
    "cut short": httpx2.RemoteProtocolError("peer closed connection"),
    "refused": httpx2.ConnectError("refused"),
}


class Body(httpx2.AsyncByteStream):
    """Sends its parts. After some seconds it raises an error, or sends nothing more."""

    def __init__(
        self, *parts: bytes, then: Exception | asyncio.Event | None = None, seconds: float = 0.0
    ) -> None:
        self._parts, self._then, self._seconds = parts, then, seconds
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        await asyncio.sleep(self._seconds)
        if isinstance(self._then, asyncio.Event):
            await self._then.wait()
        elif self._then is not None:
            raise self._then

    async def aclose(self) -> None:
        self.closed = True


def refusal(status: int, **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, headers=named, stream=Body(b'{"error":"e%d"}' % status))


def stream(*parts: bytes, then: Any = None) -> httpx2.Response:
    return httpx2.Response(200, headers=SSE, stream=Body(*parts, then=then))


def rest(request: httpx2.Request) -> httpx2.Response:
    """The remaining events, as a coordinator sends them."""
    last = request.headers.get("last-event-id")
    return stream(*EVENTS[0 if last is None else int(last) + 1 :])


Step = httpx2.Response | Exception | Callable[[httpx2.Request], httpx2.Response]


class Deployment(httpx2.AsyncBaseTransport):
    """Coordinators that answer each request with the next step. The last step is repeated."""

    def __init__(
        self, *steps: Step, access: AccessControl = OPEN, metrics: Metrics = bytes
    ) -> None:
        self._steps = list(steps)
        self.asked: list[httpx2.Request] = []
        coordinators = Coordinators(EndpointPool(URLS, str, first=0), self)
        self.app = build_gateway(coordinators, access=access, metrics=metrics)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        self.asked.append(request)
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, httpx2.Response) else step(request)

    async def call(
        self,
        body: Any = None,
        method: str = "POST",
        path: str = "/v1/completions",
        client: str = "127.0.0.1",
        **headers: str,
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        transport = httpx.ASGITransport(self.app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.request(method, path, json=body, headers=named)

    async def run(self, method: str, path: str, receive: Any, told: list[Any]) -> None:
        """Calls the application without a client. `told` gets its messages."""
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [],
            "raw_path": path.encode(),
            "query_string": b"",
        }

        async def send(message: Any) -> None:
            told.append(message)

        await self.app(scope, receive, send)

    def headers(self, name: str) -> list[str | None]:
        return [request.headers.get(name) for request in self.asked]


@pytest.mark.parametrize(
    ("end", "between"),
    [("reset", []), ("cut short", ["refused", 503, 409, "reset"]), ("interrupted", [429, 502])],
)
async def test_a_stream_that_breaks_is_told_whole(end: str, between: Sequence[str | int]) -> None:
    for place in range(len(WHOLE) + 1):
        first = WHOLE[:place]
        broken = stream(first, INTERRUPTED[place % 2]) if end == "interrupted" else None
        if broken is None:
            broken = stream(first, then=ERRORS[end])
        elif not first.endswith(b"\n\n") and first:
            continue  # Coordinators only send whole events.
        steps = [ERRORS[one] if isinstance(one, str) else refusal(one) for one in between]
        made = Deployment(broken, *steps, rest)
        found = await made.call(BODY)
        assert (found.status_code, found.content) == (200, WHOLE), place
        assert found.headers["content-type"] == SSE["content-type"]
        [key] = set(made.headers("idempotency-key"))
        assert key
        assert {json.loads(one.content)["prompt"] for one in made.asked} == {"a"}
        num_told = first.count(b"\n\n")
        last = str(num_told - 1) if num_told else None
        assert made.headers("last-event-id") == [None] + [last] * (len(steps) + 1)
        assert {one.url.host for one in made.asked} == {"a", "b"}


async def test_a_whole_answer_is_asked_for_again_with_its_key() -> None:
    """Time that a coordinator worked on the answer does not count towards the limit."""
    for given in ({}, {"idempotency_key": "mine"}):
        whole = httpx2.Response(200, headers={"x-a": "1"}, stream=Body(b'{"n"', b":1}"))
        cuts = [
            httpx2.Response(200, stream=Body(b'{"n"', then=ERRORS["cut short"], seconds=60.0))
            for _ in range(2)
        ]
        made = Deployment(ERRORS["refused"], refusal(503), cuts[0], refusal(409), cuts[1], whole)
        found = await made.call({"prompt": "a"}, **given)
        assert (found.json(), found.headers["x-a"]) == ({"n": 1}, "1")
        [key] = set(made.headers("idempotency-key"))
        assert key == "mine" if given else key


@pytest.mark.parametrize(
    "step",
    [
        refusal(400),
        refusal(401, www_authenticate="Bearer"),
        refusal(404),
        refusal(409, x_should_retry="false"),
        refusal(429, retry_after="3"),
        refusal(500),
        refusal(504, x_should_retry="false"),
    ],
    ids=lambda step: str(step.status_code),
)
async def test_what_no_other_coordinator_could_serve_is_told_at_once(step: httpx2.Response) -> None:
    made = Deployment(step)
    found = await made.call(BODY)
    assert (found.status_code, len(made.asked)) == (step.status_code, 1)
    assert found.json() == {"error": f"e{step.status_code}"}
    for name, value in step.headers.items():
        assert found.headers[name] == value
    begun = Deployment(stream(EVENTS[0], then=ERRORS["reset"]), refusal(404))
    assert (await begun.call(BODY)).content == EVENTS[0] + b'data: {"error":"e404"}\n\n'


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (refusal(503), "e503"),
        (ERRORS["refused"], "no coordinator answers: refused"),
        (ERRORS["reset"], "no coordinator answers: read error"),
    ],
    ids=["refused", "dead", "dead without a reason"],
)
async def test_coordinators_are_asked_for_a_limited_time(
    step: Step, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some seconds before the response begins, then until the deadline; once for other requests."""

    def made(*steps: Step) -> Deployment:
        again = [step if isinstance(step, Exception) else refusal(503) for _ in range(2000)]
        return Deployment(*steps, *again)

    caplog.set_level("INFO")
    now, began = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
    found = await made().call(BODY)
    assert (found.status_code, text in found.text) == (503, True)
    assert RESUME_TIMEOUT_S - 1.0 <= now() - began <= RESUME_TIMEOUT_S
    began = now()
    found = await made(stream(EVENTS[0], then=ERRORS["reset"])).call(BODY | {"deadline_ms": 90_000})
    assert found.content.startswith(EVENTS[0] + b'data: {"error":')
    assert (text in found.text, b"[DONE]" in found.content) == (True, False)
    assert 89.0 <= now() - began <= 90.0
    assert "http://a:1 failed to answer /v1/completions: ReadError(" in caplog.text
    began, probed = now(), made()
    assert (await probed.call(method="GET", path="/health?a=b")).status_code == 503
    urls = [str(one.url) for one in probed.asked]
    assert urls == ["http://a:1/health?a=b", "http://b:2/health?a=b"]
    assert now() - began < 0.1


@pytest.mark.parametrize(
    "body", [{}, {"deadline_ms": "7"}, {"deadline_ms": 6e22}, {"prompt": '"deadline_ms": 7'}]
)
async def test_a_body_without_a_deadline_has_the_default(body: Any) -> None:
    made = Deployment(refusal(503), refusal(409), httpx2.Response(200, stream=Body(b"{}")))
    assert (await made.call(body)).status_code == 200


async def test_a_stream_whose_events_have_no_ids_is_not_begun_anew() -> None:
    event = b"data: {}\n\n"
    made = Deployment(stream(event, then=ERRORS["reset"]), rest)
    assert (await made.call(BODY)).content.startswith(event + b'data: {"error":')
    assert len(made.asked) == 1


async def test_headers_of_the_ends_are_passed_on_and_those_of_a_connection_are_not() -> None:
    answer = httpx2.Response(
        200,
        headers={"connection": "x-own", "x-own": "1", "x-b": "2", "date": "then"},
        stream=Body(b"{}"),
    )
    made = Deployment(answer)
    found = await made.call(
        {},
        authorization="Bearer k",
        traceparent="t",
        connection="x-mine",
        x_mine="1",
        te="trailers",
        accept_encoding="gzip",
        last_event_id="7",
    )
    [asked] = made.asked
    passed = {"authorization": "Bearer k", "traceparent": "t", "last-event-id": "7", "host": "a:1"}
    assert passed.items() <= dict(asked.headers).items()
    assert not {"connection", "x-mine", "te", "accept-encoding"} & asked.headers.keys()
    assert found.headers["x-b"] == "2"
    assert not {"connection", "x-own", "date"} & found.headers.keys()


@pytest.mark.parametrize("closes", [False, True])
async def test_a_client_that_goes_or_a_gateway_that_closes_ends_the_stream(closes: bool) -> None:
    silent = Body(EVENTS[0], then=asyncio.Event())
    made = Deployment(httpx2.Response(200, headers=SSE, stream=silent))
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    told: list[Any] = []
    incoming.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})
    calling = asyncio.create_task(made.run("POST", "/v1/completions", incoming.get, told))
    await asyncio.sleep(1.0)
    assert told[-1]["body"] == EVENTS[0]
    assert not silent.closed
    if closes:
        calling.cancel()
    else:
        incoming.put_nowait({"type": "http.disconnect"})
    await calling
    assert silent.closed
    assert (b"shutting down" in told[-1]["body"]) == closes


@pytest.mark.parametrize("size", [0, limits.HTTP_BODY_IN_MEMORY_BYTES, 2**20])
async def test_a_body_is_sent_whole_to_each_coordinator(size: int) -> None:
    made = Deployment(refusal(503), stream(EVENTS[0], then=ERRORS["reset"]), rest)
    body = BODY | {"user": "x" * size}
    assert (await made.call(body)).content == WHOLE
    assert len(made.asked) == 3
    for one in made.asked:
        assert json.loads(one.content) == body
        assert int(one.headers["content-length"]) == len(one.content)
        assert "transfer-encoding" not in one.headers


async def test_a_running_stream_has_its_body_in_a_file() -> None:
    """It must keep the body, but not in memory."""
    go_on = asyncio.Event()

    async def kept(size: int) -> int:
        made = Deployment(httpx2.Response(200, headers=SSE, stream=Body(EVENTS[0], then=go_on)))
        parts = [b'{"user":"', *[b"x" * 2**16] * (size // 2**16), b'"}', None]
        begun = asyncio.Event()

        async def receive() -> Any:
            part = parts.pop(0) if parts else await go_on.wait()
            return {"type": "http.request", "body": part or b"", "more_body": part is not None}

        async def handle(request: httpx2.Request) -> httpx2.Response:
            async for _ in request.stream:  # type: ignore[union-attr]
                pass
            begun.set()
            return httpx2.Response(200, headers=SSE, stream=Body(EVENTS[0], then=go_on))

        made.handle_async_request = handle  # type: ignore[method-assign]
        tracemalloc.start()
        calling = asyncio.create_task(made.run("POST", "/v1/completions", receive, []))
        await begun.wait()
        await asyncio.sleep(1.0)
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        return found

    await kept(2**16)
    assert await kept(2**21) < 2**18


async def test_a_stranger_is_refused_before_its_body_is_read() -> None:
    """The gateway asks for a key if it knows those of the coordinators."""
    made = Deployment(rest, access=AccessControl(watch_keys(None, given_keys(API_KEY))))
    told, receive = list[Any](), AsyncMock(side_effect=AssertionError("reads the body"))
    await made.run("POST", "/v1/completions", receive, told)
    assert (told[0]["status"], receive.call_count, made.asked) == (401, 0, [])
    assert (await made.call(BODY, authorization="Bearer wrong")).status_code == 401
    assert (await made.call(BODY, authorization=f"Bearer {API_KEY}")).content == WHOLE
    assert made.headers("authorization") == [f"Bearer {API_KEY}"]


async def test_a_path_that_needs_no_key_is_forwarded_without_a_body() -> None:
    """Else strangers could fill the gateway with bodies."""
    access = AccessControl(watch_keys(None, given_keys(API_KEY)))
    made = Deployment(lambda _: refusal(404), access=access)
    assert (await made.call(BODY, path="/ping")).status_code == 404
    assert [one.content for one in made.asked] == [b""]
    assert (await made.call(BODY, authorization=f"Bearer {API_KEY}")).status_code == 404
    assert json.loads(made.asked[-1].content) == BODY


async def test_the_metrics_are_its_own() -> None:
    access = AccessControl(watch_keys(None, given_keys(API_KEY)))
    made = Deployment(rest, access=access, metrics=lambda: b"outrider_refusals_total 1\n")
    assert (await made.call(method="GET", path="/metrics")).status_code == 401
    authorization = f"Bearer {API_KEY}"
    told = await made.call(method="GET", path="/metrics", authorization=authorization)
    assert told.text == "outrider_refusals_total 1\n"
    assert told.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert made.asked == []


async def test_a_full_coordinator_is_passed_over() -> None:
    full = to_json(error_body(Overloaded("full", limit="max_sessions", of_server=True)))
    of_caller = to_json(error_body(Overloaded("too often", limit="requests_per_minute")))

    def refused(body: bytes) -> httpx2.Response:
        return httpx2.Response(429, stream=Body(body))

    assert (await Deployment(refused(full), rest).call(BODY)).content == WHOLE
    made = Deployment(refused(full), refused(full), rest)
    assert ((await made.call(BODY)).status_code, len(made.asked)) == (429, 2)
    made = Deployment(refused(of_caller), rest)
    assert ((await made.call(BODY)).status_code, len(made.asked)) == (429, 1)


async def test_bodies_that_cannot_be_stored_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a full disk. Closing the file fails, too."""

    class Full(BytesIO):
        is_full = True

        def write(self, data: Any) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

        def close(self) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

    class File:
        def __class_getitem__(cls, _: Any) -> Any:
            return lambda memory_max: Full()

    monkeypatch.setattr(limits, "HTTP_SPOOLED_BYTES_MAX", 4 * 64)
    monkeypatch.setattr("coordinator.http_api.incoming.SpooledTemporaryFile", File)
    made = Deployment(rest)
    for _ in range(5):
        refused = await made.call(BODY)
        assert (refused.status_code, made.asked) == (503, [])
        assert "No space left" in refused.json()["error"]["message"]
    monkeypatch.setattr(Full, "is_full", False)
    assert (await made.call(BODY)).content == WHOLE


@pytest.mark.parametrize("has_keys", [False, True])
async def test_one_caller_leaves_room_for_others(
    has_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bodies of running requests count, by tenant or, without keys, by address."""
    monkeypatch.setattr(limits, "HTTP_SPOOLED_BYTES_MAX", 4 * 64)
    keys = watch_keys(None, given_keys(f"{API_KEY},{OTHER_KEY}")) if has_keys else None
    silent = [Body(EVENTS[0], then=asyncio.Event()) for _ in range(2)]
    answers = [httpx2.Response(200, headers=SSE, stream=one) for one in silent]
    made = Deployment(*answers, rest, access=AccessControl(keys))
    mallory = {"authorization": f"Bearer {API_KEY}"} if has_keys else {"client": "1.2.3.4"}
    alice = {"authorization": f"Bearer {OTHER_KEY}"} if has_keys else {"client": "1.2.3.5"}
    running = [asyncio.create_task(made.call(BODY, **mallory)) for _ in range(2)]
    await asyncio.sleep(1.0)
    refused = await made.call(BODY, **mallory)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    owner = "the tenant 'key-" if has_keys else "the address 1.2.3.4 have more than 64 bytes"
    assert owner in refused.json()["error"]["message"]
    assert (await made.call(BODY, **alice)).content == WHOLE
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert (await made.call(BODY, **mallory)).content == WHOLE


async def test_a_path_that_is_none_is_refused() -> None:
    made, told = Deployment(rest), list[Any]()
    receive = AsyncMock(return_value={"type": "http.request", "body": b"", "more_body": False})
    await made.run("GET", "http://x/", receive, told)
    assert told[0]["status"] in (400, 404)
    assert not made.asked
