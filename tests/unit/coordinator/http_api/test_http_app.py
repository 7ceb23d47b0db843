"""The routes, with a coordinator that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from told_coordinator import FINISHED, STARTED, TOKENS
from told_coordinator import ToldCoordinator as Service
from virtual_time import virtually

from coordinator.http_api.app import HEALTH_CACHED_S, SLOW_S, WELL_S, CachedHealth, build_app
from coordinator.http_api.serving import Generated
from outrider.errors import BadRequest, Overloaded, Unavailable
from outrider.limits import TRACEPARENT_CHARS_MAX
from outrider.request import Event, GenerateRequest

BODY = {"prompt": [1, 2], "max_tokens": 3}
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


async def post(service: Any, body: Any = BODY, **headers: str) -> httpx.Response:
    app = build_app(service, asyncio.Event(), None)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        return await http.post("/v1/completions", json=body, headers=headers)


async def test_a_call_goes_on_with_its_callers_trace() -> None:
    """Its session is not kept for one who comes back; what is no trace is left out."""
    service = Service(STARTED, TOKENS, FINISHED)
    assert (await post(service, traceparent=TRACE)).json()["choices"][0]["text"] == "a"
    await post(service, traceparent="x" * (TRACEPARENT_CHARS_MAX + 1))
    assert [call[1:] for call in service.calls] == [("", TRACE, False), ("", "", False)]
    assert service.calls[0][0].prompt == (1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [(), (STARTED,)])
async def test_an_error_before_the_first_token_has_its_status(
    stream: bool, before: tuple[Event, ...]
) -> None:
    found = await post(Service(*before, Overloaded("full", 2500)), {**BODY, "stream": stream})
    assert (found.status_code, found.headers["retry-after"]) == (429, "3")
    assert found.json()["error"]["message"] == "full"


async def test_an_error_behind_it_is_the_last_event() -> None:
    found = await post(Service(STARTED, TOKENS, Unavailable("gone")), {**BODY, "stream": True})
    assert found.status_code == 200
    *_, last, end = found.text.split("\n\n")
    assert end == ""
    assert last.startswith('data: {"error":{"message":"gone"')
    whole = await post(Service(STARTED, TOKENS, FINISHED), {**BODY, "stream": True})
    assert whole.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("before", [(), (STARTED, TOKENS)])
async def test_a_bug_is_not_shown(
    before: tuple[Event, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither as a status nor as an event; the log has it."""
    for stream in (False, True):
        found = await post(
            Service(*before, ZeroDivisionError("secret")), {**BODY, "stream": stream}
        )
        assert found.status_code == (200 if before and stream else 500)
        assert "secret" not in found.text
        assert '"code":"internal_error"' in found.text
    assert "secret" in caplog.text


async def test_one_choice_that_fails_ends_all() -> None:
    """And nothing of the others is told as if it were an answer."""

    class Mixed(Service):
        async def generate(self, request: GenerateRequest, *rest: Any, **more: Any) -> Any:
            if request.prompt == (2,):
                yield STARTED
                raise Unavailable("gone")
            try:
                for event in (STARTED, *[TOKENS] * 1000):
                    yield event
                    await asyncio.sleep(0)
            finally:
                ended.append(request.prompt)

    ended: list[Any] = []
    found = await post(Mixed(), {**BODY, "prompt": [[1], [2], [3]]})
    assert found.status_code == 503
    assert sorted(ended) == [(1,), (3,)]


class Asked(Service):
    """Counts how often its health is asked for; the first time it cannot say."""

    num_asked = 0

    async def trouble(self) -> str:
        self.num_asked += 1
        await asyncio.sleep(0.01)
        if self.num_asked == 1:
            raise Unavailable("cannot say")
        return "" if self.num_asked == 2 else "gone"


async def test_health_is_asked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all callers together; an error is nobody's answer later."""
    service = Asked()
    app = build_app(service, asyncio.Event(), None)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        first = await asyncio.gather(*(http.get("/health") for _ in range(8)))
        assert {one.status_code for one in first} == {503}
        assert service.num_asked == 1
        for _ in range(2):
            found = await asyncio.gather(*(http.get("/health") for _ in range(8)))
            assert {one.status_code for one in found} == {200}
        assert service.num_asked == 2
        monkeypatch.setattr("coordinator.http_api.app.HEALTH_CACHED_S", -1.0)
        await asyncio.sleep(1.05)
        for number in (3, 4):
            found = await asyncio.gather(*(http.get("/health") for _ in range(8)))
            assert {one.status_code for one in found} == {503}
            assert service.num_asked == number


@virtually
async def test_a_slow_answer_does_not_keep_callers_who_were_told_that_all_is_well() -> None:
    """For some seconds; then they wait for it."""

    class Slow(Service):
        takes_s, found = 0.1, ""

        async def trouble(self) -> str:
            await asyncio.sleep(self.takes_s)
            return self.found

    service, loop = Slow(), asyncio.get_running_loop()
    kept = CachedHealth(service)  # type: ignore[arg-type]

    async def asked() -> tuple[str, float]:
        start = loop.time()
        return await kept.trouble(), pytest.approx(loop.time() - start)

    assert await asked() == ("", 0.1)
    service.takes_s, service.found = 6.0, "gone"
    await asyncio.sleep(HEALTH_CACHED_S)
    assert await asked() == ("", SLOW_S)
    await asyncio.sleep(WELL_S - HEALTH_CACHED_S)
    assert await asked() == ("gone", 6.0 - SLOW_S - (WELL_S - HEALTH_CACHED_S))
    assert await asked() == ("gone", 0.0)


async def test_a_path_with_one_more_slash_is_not_there() -> None:
    """And leads nowhere else."""
    app = build_app(Service(), asyncio.Event(), None)  # type: ignore[arg-type]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://here"
    ) as http:
        for path in ("/health/", "/v1/completions/"):
            found = await http.post(path, json=BODY)
            assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")


def test_the_document_tells_what_may_come() -> None:
    """Of every operation errors, too, for each may be refused for want of a key; and what type an
    answer has."""
    app = build_app(Service(), asyncio.Event(), None)  # type: ignore[arg-type]
    paths = app.openapi()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            responses = operation["responses"]
            assert responses.keys() == {"200", "4XX", "5XX"}, path
            schema = responses["4XX"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    found = {path: {*paths[path]["get"]["responses"]["200"]["content"]} for path in
             ("/metrics", "/version", "/health", "/v1/models")}  # fmt: skip
    assert found.pop("/metrics") == {"text/plain"}
    assert set.union(*found.values()) == {"application/json"}


@pytest.mark.parametrize("num_turns", range(1, 8))
@pytest.mark.parametrize("told", [[], [{}]])
async def test_an_answer_that_nobody_waits_for_is_closed(
    num_turns: int, told: list[dict[str, Any]]
) -> None:
    """At once, whenever its request is cancelled before its first chunk was there or as it came;
    and so is one whose head cannot be sent."""
    closed, has_begun = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[Any]:
        has_begun.set()
        try:
            while True:
                yield 0, None
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def nothing() -> Any:
        await asyncio.Event().wait()

    async def broken(_: Any) -> None:
        raise OSError("broken")

    answer = Generated(events(), asyncio.Event(), lambda *_: told)
    running = asyncio.create_task(answer({}, nothing, broken))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises((asyncio.CancelledError, OSError)):
        await running
    assert closed.is_set() == has_begun.is_set()


class RawClient:
    """Of completions, whose body comes piece by piece; it also hears how each call was timed."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answer: list[Any] = []

    def put(self, body: bytes, *, more: bool = True) -> None:
        self.pieces.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.pieces.put_nowait({"type": "http.disconnect"})

    async def call(self) -> int | None:
        """The status, if there is an answer."""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
            "server": ("here", 80), "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip

        async def send(message: Any) -> None:
            self.answer.append(message)

        async with asyncio.timeout(10):
            await self.app(scope, self.pieces.get, send)
        return self.answer[0]["status"] if self.answer else None


class Times:
    """Keeps the statuses that it is told of."""

    def __init__(self) -> None:
        self.statuses: list[int | None] = []

    def add(self, seconds: float, method: str, scheme: str, route: str, status: int | None) -> None:
        self.statuses.append(status)


async def test_a_client_that_goes_before_its_body_is_there_is_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is logged, nothing begun, and its time has no status."""
    service, times = Service(STARTED, TOKENS, FINISHED), Times()
    client = RawClient(build_app(service, asyncio.Event(), None, times=times))  # type: ignore[arg-type]
    client.put(b"{")
    client.leave()
    await client.call()
    assert (client.pieces.empty(), service.calls, caplog.text) == (True, [], "")
    assert times.statuses == [None]


async def test_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun to come counts until it is whole, or given up; one too many may try again."""
    body = json.dumps(BODY).encode()
    monkeypatch.setattr("coordinator.http_api.reading.HTTP_BODIES_BYTES_MAX", 2 * len(body))
    app = build_app(Service(STARTED, TOKENS, FINISHED), asyncio.Event(), None)  # type: ignore[arg-type]

    async def status() -> int | None:
        client = RawClient(app)
        client.put(body, more=False)
        return await client.call()

    slow = [RawClient(app) for _ in range(2)]
    calls = [asyncio.create_task(one.call()) for one in slow]
    for one in slow:
        one.put(body[:-1])
        await asyncio.sleep(0)
    third = RawClient(app)
    third.put(body[:3])
    assert await third.call() == 503
    assert (b"retry-after", b"1") in third.answer[0]["headers"]
    assert b"too many bodies" in third.answer[1]["body"]
    slow[0].leave()
    await calls[0]
    assert await status() == 200
    slow[1].put(body[-1:], more=False)
    assert await calls[1] == 200
    assert [await status() for _ in range(3)] == [200] * 3


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is its connection. Once it is there its answer may take its time."""

    class Slow(Service):
        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Event]:
            await asyncio.sleep(0.3)
            for event in (STARTED, TOKENS, FINISHED):
                yield event

    monkeypatch.setattr("coordinator.http_api.reading.HTTP_BODY_S_MAX", 0.1)
    app = build_app(Slow(), asyncio.Event(), None)  # type: ignore[arg-type]
    client = RawClient(app)
    client.put(b"{")
    assert await client.call() == 408
    assert (b"connection", b"close") in client.answer[0]["headers"]
    assert json.loads(client.answer[1]["body"])["error"]["code"] == "request_timeout"
    client = RawClient(app)
    client.put(json.dumps(BODY).encode(), more=False)
    assert await client.call() == 200


@pytest.mark.parametrize(("prompt", "field"), [([[1], [99]], "prompt[1][0]"), ([99], "prompt[0]")])
async def test_which_prompt_is_wrong_is_told(prompt: Any, field: str) -> None:
    class Choosy(Service):
        async def generate(
            self, request: GenerateRequest, *_: Any, **__: Any
        ) -> AsyncGenerator[Event]:
            if request.prompt[0] == 99:
                raise BadRequest("token_ids[0]", "99 is not a token id")
            yield STARTED

    answer = await post(Choosy(), {"prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
