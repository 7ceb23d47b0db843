"""The routes of the HTTP API, with a coordinator that gives prepared answers."""

import asyncio
import json
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import jsonschema
import pytest

from coordinator.auth.access_control import AccessControl, RateExceeded, watch_keys
from coordinator.decoding.sessions import RequestKey
from coordinator.http_api.app import GeneratedResponse, _cancel, _interleaved
from coordinator.http_api.progress import Progress
from outrider.errors import BadRequest, Unavailable
from outrider.foundation import refusals
from outrider.foundation.api_keys import Caller, add_key
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import Event, GenerateRequest, PromptTokens
from outrider.limits import ENDINGS_MAX, STARTS_MAX
from outrider.models.tokenizer import TokenizerText
from tests.support.http_front import BODY, Front
from tests.support.models import byte_level_tokenizer
from tests.support.told_coordinator import FINISHED, STARTED, TOKENS, MemorySlots
from tests.support.told_coordinator import ToldCoordinator as Service

TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
WHOLE = (STARTED, TOKENS, FINISHED)
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "NOTHING")
OPEN_PATHS = {"/", "/docs", "/health", "/ping", "/page/page.js"}
NOWHERE = (
    "/v1/models?path=/health",
    "/v1/models/..%2f..%2fhealth",
    "/health%00",
    "/Health",
    "//",
    "/docs/",
    "/redoc",
    "/health/",
    "/health/x",
    "//health",
)


async def test_a_call_goes_on_with_its_callers_trace() -> None:
    """Only sessions with a key are resumable."""
    front = Front(Service(*WHOLE))
    assert (await front.post({"traceparent": TRACE})).json()["choices"][0]["text"] == "a"
    assert [call[1:] for call in front.service.calls] == [("", TRACE, False)]
    assert front.service.calls[0][0].prompt == (1, 2)


@pytest.mark.parametrize("before", [(), (STARTED, TOKENS)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_not_shown(
    before: tuple[Event, ...], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = await Front(Service(*before, ZeroDivisionError("secret"))).post(stream=stream)
    assert found.status_code == (200 if before and stream else 500)
    assert "secret" not in found.text
    assert '"code":"internal_error"' in found.text.split("\n\n")[-2 if before and stream else 0]
    assert "secret" in caplog.text


async def test_one_choice_that_fails_ends_all() -> None:
    """The client gets only the error, and no other choice. An error about a prompt says which."""

    class Mixed(Service):
        async def generate(self, request: GenerateRequest, *rest: Any, **more: Any) -> Any:
            if request.prompt == (9,):
                raise BadRequest(f"{request.names.prompt}[0]", "9 is not a token id")
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
    front = Front(Mixed())
    assert (await front.post(prompt=[[1], [2], [3]])).status_code == 503
    assert sorted(ended) == [(1,), (3,)]
    for prompt, field in (([[1], [9]], "prompt[1][0]"), ([9], "prompt[0]")):
        found = await front.post(prompt=prompt)
        assert (found.status_code, found.json()["error"]["param"]) == (400, field)


async def test_trouble_is_told_with_status_503() -> None:
    service = Service()
    front = Front(service)
    assert (await front.send("GET", "/health")).json() == {"status": "ok"}
    service.trouble = "gone"
    told = await front.send("GET", "/health")
    assert (told.status_code, told.json()["error"]["message"]) == (503, "gone")


def test_the_document_tells_what_may_come() -> None:
    document = Front(Service()).app.openapi()
    paths, schemas = document["paths"], document["components"]["schemas"]
    for path, operations in paths.items():
        for operation in operations.values():
            responses = operation["responses"]
            assert responses.keys() == {"200", "4XX", "5XX"}, path
            schema = responses["4XX"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}
    assert {*paths["/metrics"]["get"]["responses"]["200"]["content"]} == {"text/plain"}
    assert "started" in paths["/api/generate"]["post"]["responses"]["200"]["description"]
    assert not any(path == "/" or path.startswith("/page") for path in paths)
    [number, null] = schemas["ChatBody"]["properties"]["temperature"]["anyOf"]
    assert (number["minimum"], number["maximum"], null) == (0, 2, {"type": "null"})
    # Clients that are generated from the document have a class for each of these.
    assert schemas["FunctionCall"]["properties"].keys() == {"name", "arguments"}
    assert {"input_tokens", "total_tokens"} <= {*schemas["ResponseUsage"]["required"]}


@pytest.mark.parametrize(
    ("path", "body", "kinds"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            ("ChatCompletion", "ChatCompletionChunk"),
        ),
        ("/v1/completions", {"prompt": [1, 2], "echo": True}, ("Completion", "Completion")),
        ("/v1/responses", {"input": "hi"}, ("ResponseObject", "ResponseEvent")),
    ],
)
async def test_answers_are_as_the_document_says(
    path: str, body: dict[str, Any], kinds: tuple[str, str]
) -> None:
    scored = replace(TOKENS, logprobs=(PositionLogprobs(-1.0, ((7, -1.0),)),))
    prompt = PromptTokens((1,), (None,))
    front = Front(Service(STARTED, *([prompt] if "echo" in body else []), scored, FINISHED))
    document = front.app.openapi()
    logprobs: dict[str, Any] = {"logprobs": 1 if "echo" in body else True}
    if "input" in body:
        logprobs = {"include": ["message.output_text.logprobs"]}
    for stream in (False, True):
        found = await front.send("POST", path, json=body | {"stream": stream, **logprobs})
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        kind = found.headers["content-type"].partition(";")[0]
        lines = [found.text]
        if stream:
            lines = [line for line in found.text.splitlines() if line.startswith("data: {")]
        told = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert len(told) > 2 * stream
        name = kinds[stream]
        schema = {"$ref": f"#/components/schemas/{name}"}
        assert content[kind]["schema"] == schema
        whole = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
        for one in told:
            whole.validate(one)
            if path != "/v1/responses":
                assert one.keys() <= document["components"]["schemas"][name]["properties"].keys()


@pytest.mark.parametrize("prompt", [[2**40], [-1]])
async def test_what_is_echoed_is_looked_at_once_it_is_admitted(prompt: list[int]) -> None:
    """The coordinator refuses invalid tokens, which could not be decoded."""
    service = Service(BadRequest("prompt[0]", "is not a token id"))
    service.text = TokenizerText(byte_level_tokenizer(), "toy")
    body = {"prompt": prompt, "echo": True}
    found = await Front(service).send("POST", "/v1/completions", json=body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt[0]")


@pytest.mark.parametrize("num_turns", range(1, 8))
@pytest.mark.parametrize("told", [[], [{}]])
async def test_an_abandoned_answer_is_closed(num_turns: int, told: list[dict[str, Any]]) -> None:
    """At whatever moment the request is cancelled, and if its headers cannot be sent."""
    closed, has_begun = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[Any]:
        has_begun.set()
        try:
            while True:
                yield 0, None
                await asyncio.sleep(0)
        finally:
            closed.set()

    broken = AsyncMock(side_effect=OSError("broken"))
    answer: Any = SimpleNamespace(take=lambda *_: told)
    call = GeneratedResponse(events(), answer, Progress(1))({}, asyncio.Event().wait, broken)  # type: ignore[arg-type]
    running = asyncio.create_task(call)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises((asyncio.CancelledError, Unavailable, OSError)):
        await running
    assert closed.is_set() == has_begun.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_cancelled_at_its_end_is_complete(stream: bool) -> None:
    ends = list[bytes]()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            ends.append(message["body"])
            running.cancel()

    async def events() -> AsyncGenerator[Any]:
        yield 0, STARTED

    answer: Any = SimpleNamespace(
        take=lambda *_: [{}] * stream, whole=dict, last=b"{}", is_stream=stream, is_named=False
    )
    response = GeneratedResponse(events(), answer, Progress(1))
    running = asyncio.create_task(response({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
    await running
    assert ends == [b"{}"]


async def test_a_client_gone_before_its_body_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    front = Front(Service(*WHOLE))
    begun = {"type": "http.request", "body": b"{", "more_body": True}
    receive = AsyncMock(side_effect=[begun, *[{"type": "http.disconnect"}] * 9])
    send = AsyncMock()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    await front.app(scope, receive, send)
    assert receive.called
    assert (send.mock_calls, front.service.calls, caplog.text) == ([], [], "")


class SlowBody:
    """A request whose body comes in two parts."""

    def __init__(self, front: Front, key: str = "") -> None:
        self._rest: asyncio.Queue[bytes] = asyncio.Queue()
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        sending = front.send("POST", "/v1/completions", headers, content=self._parts())
        self.answer = asyncio.create_task(sending)

    async def _parts(self) -> AsyncIterator[bytes]:
        yield json.dumps(BODY).encode()[:-1]
        yield await self._rest.get()

    def end(self) -> None:
        self._rest.put_nowait(b"}")


@pytest.mark.parametrize("limit", ["HTTP_BODY_S_MAX", "HTTP_BODY_PART_S_MAX"])
async def test_a_body_that_stays_away_is_given_up(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The connection is closed, too. The limit does not hold for the time of the answer."""

    class Slow(Service):
        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Event]:
            await asyncio.sleep(0.3)
            for event in WHOLE:
                yield event

    monkeypatch.setattr(f"outrider.limits.{limit}", 0.1)
    front = Front(Slow())
    found = await SlowBody(front).answer
    assert (found.status_code, found.headers["connection"]) == (408, "close")
    assert found.json()["error"]["code"] == "request_timeout"
    assert (await front.post()).status_code == 200


def locked(
    directory: Path, concurrency: int = 1, requests_per_minute: int = 0
) -> tuple[Front, MemorySlots]:
    """An application that asks for keys, with the key of its only caller."""
    caller = Caller("alice", "team", requests_per_minute, concurrency)
    key = add_key(directory / "keys", caller)
    slots = MemorySlots(1500, 0.02)
    return Front(Service(*WHOLE), AccessControl(watch_keys(directory / "keys"), slots), key), slots


async def test_no_route_answers_without_a_key(tmp_path: Path) -> None:
    front, _ = locked(tmp_path)
    key = front.key
    refused: list[list[tuple[str, str]]] = [
        [],
        [("authorization", f"Bearer {key[:-2]}xx")],
        [("authorization", f"Basic {key}")],
        [("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")],
        [("x-api-key", key)],
        [("cookie", f"authorization=Bearer {key}")],
    ]
    routes = {str(getattr(route, "path", "")) for route in front.app.routes} - {"/page"}
    paths = {path.replace("{name:path}", "a/b").replace("{path:path}", "a") for path in routes}
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"}
    assert paths >= {"/openapi.json", "/version", "/health", "/v1/models/a/b"}
    for path in (paths | set(NOWHERE)) - OPEN_PATHS:
        for method in METHODS:
            for headers in refused:
                found = await front.send(method, path, headers, json={"no": "body"})
                assert found.status_code == 401, (method, path, headers)
                assert found.headers["www-authenticate"] == "Bearer"
                assert method == "HEAD" or found.json()["error"]["code"] == "invalid_api_key"
                assert key not in found.text
            let_in = await front.send(method, path, json={"no": "body"})
            assert let_in.status_code not in (401, 500), (method, path)
            assert let_in.status_code == 404 or path not in ("/health/", "//health"), path
    for path in OPEN_PATHS:
        for headers in refused:
            assert (await front.send("GET", path, headers)).status_code == 200, (path, headers)
    assert front.service.tenants == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_counts_once_and_each_of_its_texts_has_a_place(
    tmp_path: Path, stream: bool
) -> None:
    front, slots = locked(tmp_path, concurrency=4)
    found = await front.post(n=2, prompt=[[1], [2]], stream=stream)
    assert found.status_code == 200
    assert len(slots.depths) == 1
    assert front.service.tenants == ["team"] * 4
    assert slots.taken == set()
    for fields, param in (({"n": 5}, "n"), ({"prompt": [[1]] * 5}, "prompt")):
        found = await front.post(**fields, stream=stream)
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, param)
        assert "the key 'alice' may run 4 at a time" in error["message"]
    slots.taken.add("of another coordinator")
    found = await front.post(n=4, stream=stream)
    assert found.status_code == 429
    assert (await front.send("GET", "/v1/models")).status_code == 200
    assert len(slots.depths) == 1
    assert (await front.post(n=3, stream=stream)).status_code == 200
    assert len(front.service.tenants) == 7


async def test_no_body_is_read_for_a_key_whose_bucket_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the store asked. Routes without a body answer."""
    front, slots = locked(tmp_path, requests_per_minute=60)
    take = AsyncMock(side_effect=RateExceeded(Caller("alice", "team"), 300))
    monkeypatch.setattr(slots, "take", take)
    begun = asyncio.get_running_loop().time()
    assert (await front.post()).status_code == 429
    monkeypatch.setattr("coordinator.http_api.incoming.IncomingBodies.read", None)  # Would fail.
    found = await front.post(nothing=1)
    assert (found.status_code, found.headers["retry-after"], take.call_count) == (429, "1", 1)
    assert "requests a minute" in found.json()["error"]["message"]
    assert (await front.send("GET", "/v1/models")).status_code == 200
    monkeypatch.undo()
    await asyncio.sleep(begun + 1.0 - asyncio.get_running_loop().time())
    assert (await front.post()).status_code == 200


async def test_a_wrong_body_counts_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a caller could have any number of bodies parsed."""
    front, slots = locked(tmp_path, requests_per_minute=60)
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
    for number, path in enumerate(paths, 1):
        found = await front.send("POST", path, json={"no": "body"})
        assert (found.status_code, slots.depths) == (400, [1] * number)
    monkeypatch.setattr("coordinator.http_api.reading.parse", None)  # Calling this would fail.
    empty = RateExceeded(Caller("alice", "team", 60), 300)
    monkeypatch.setattr(slots, "take", AsyncMock(side_effect=empty))
    assert (await front.post(no=1)).status_code == 429


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_resumption_is_admitted_although_the_bucket_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A request with an `Idempotency-Key` is one if the key has a session. Its caller's bucket is
    deeper for resumptions."""
    front, slots = locked(tmp_path, requests_per_minute=60)
    depths = list[int]()

    async def take(caller: Caller, names: Sequence[str], depth: int) -> None:
        depths.append(depth)
        if caller.requests_per_minute and depth == 1:
            raise RateExceeded(caller, 300)

    async def known(key: RequestKey) -> RequestKey:
        return replace(key, session_id="5" * 32) if is_known else key

    monkeypatch.setattr(slots, "take", take)
    monkeypatch.setattr(front.service, "known", known)
    headers = {"authorization": f"Bearer {front.key}", "idempotency-key": "k"}
    assert (await front.post(headers)).status_code == (200 if is_known else 429)
    assert depths[:2] == ([1, 2] if is_known else [1])
    assert (await front.post(headers)).status_code == (200 if is_known else 429)


async def test_a_resumption_is_admitted_soon_after_another_request_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the deeper bucket is empty, too. Then the store is not asked for a while."""
    front, slots = locked(tmp_path, requests_per_minute=60)
    full = 2

    async def take(caller: Caller, names: Sequence[str], depth: int) -> None:
        if 0 < depth < full:
            raise RateExceeded(caller, 60_000)

    async def known(key: RequestKey) -> RequestKey:
        return replace(key, session_id="5" * 32)

    taking = AsyncMock(side_effect=take)
    monkeypatch.setattr(slots, "take", taking)
    monkeypatch.setattr(front.service, "known", known)
    headers = {"authorization": f"Bearer {front.key}", "idempotency-key": "k"}
    assert (await front.post()).status_code == 429
    assert (await front.post(headers)).status_code == 200
    full = 3
    assert (await front.post(headers)).status_code == 429
    taking.reset_mock()
    assert (await front.post(headers)).status_code == 429
    taking.assert_not_called()


async def test_a_running_stream_does_not_keep_its_body() -> None:
    """It keeps only what the answer needs."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    class WaitingLimits(Service):
        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Event]:
            yield STARTED
            yield TOKENS
            await go_on.wait()
            yield FINISHED

    front = Front(WaitingLimits())
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }

    async def kept(num_chars: int) -> int:
        """Bytes that a stream keeps after its body, of which most is a field that is ignored."""
        body = {**BODY, "stream": True, "user": "x" * num_chars}
        given = [json.dumps(body).encode()]
        del body

        async def receive() -> Any:
            return {"type": "http.request", "body": given.pop()} if given else await go_on.wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun.set()

        tracemalloc.start()
        running = asyncio.create_task(front.app(scope, receive, send))
        async with asyncio.timeout(20):
            await begun.wait()
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        begun.clear()
        return found

    await kept(1)
    assert await kept(2**21) < 2**19


@pytest.mark.parametrize(
    ("limit", "share", "kind", "said"),
    [
        ("HTTP_BODIES_BYTES_MAX", 1, "http_bodies_bytes", "the server holds bodies of"),
        ("HTTP_BODIES_BYTES_MAX", 4, "http_owner_bytes", "the bodies of the tenant 'team' have"),
        ("HTTP_CONNECTIONS_MAX", 4, "http_owner_bodies", "the tenant 'team' is sending 2 bodies"),
    ],
)
async def test_bodies_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, share: int, kind: str, said: str
) -> None:
    """All bodies, and those of all keys of a tenant. A body counts until it is validated or its
    client has gone."""
    num_bytes = 1 if limit == "HTTP_CONNECTIONS_MAX" else len(json.dumps(BODY))
    monkeypatch.setattr("outrider.limits.HTTP_OWNERS_MIN", share)
    monkeypatch.setattr(f"outrider.limits.{limit}", share * 2 * num_bytes)
    monkeypatch.setattr(refusals, "REFUSALS", counted := Counter[str]())
    ann, bob, eve = (
        add_key(tmp_path / "keys", Caller(name, tenant))
        for name, tenant in (("ann", "team"), ("bob", "team"), ("eve", "other"))
    )
    front = Front(Service(*WHOLE), AccessControl(watch_keys(tmp_path / "keys")), ann)
    gone, slow = [SlowBody(front, key) for key in (ann, bob)]
    await asyncio.sleep(0.05)
    refused = await front.post()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert said in error["message"]
    assert (error["code"] == "server_full") == (kind == "http_bodies_bytes")
    assert counted == {kind: 1}
    if share > 1:
        other = SlowBody(front, eve)
        other.end()
        assert (await other.answer).status_code == 200
    gone.answer.cancel()
    await asyncio.gather(gone.answer, return_exceptions=True)
    assert (await front.post()).status_code == 200
    slow.end()
    assert (await slow.answer).status_code == 200


async def test_the_streams_of_a_request_are_cancelled_a_few_at_a_time() -> None:
    """All of them, also if that is interrupted."""
    tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(100)]
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(_cancel(tasks))
    await asyncio.sleep(0)
    assert sum(task.cancelling() for task in tasks) == ENDINGS_MAX
    cancelling.cancel()
    await asyncio.gather(cancelling, *tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)


async def test_the_streams_of_a_request_begin_a_few_at_a_time() -> None:
    """After an error, no more begin. Their first events are sent in steps, too."""
    begun, gate = list[int](), asyncio.Semaphore(0)

    async def stream(number: int) -> AsyncGenerator[Event]:
        begun.append(number)
        await gate.acquire()
        if number == failing:
            raise Unavailable("no target")
        yield STARTED

    for failing, num_begun in ((3, STARTS_MAX), (-1, 5 * STARTS_MAX)):
        begun.clear()
        streams = [stream(number) for number in range(5 * STARTS_MAX)]
        events = _interleaved(streams, Progress(len(streams), None))
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(0.01)
        assert begun == [*range(STARTS_MAX)]
        for _ in streams:
            gate.release()
        if failing >= 0:
            with pytest.raises(Unavailable):
                await first
        else:
            turns: list[float] = []
            ticking = asyncio.create_task(_tick(turns))
            assert await first == (0, STARTED)
            sent = [await anext(events) for _ in streams[1:]]
            assert [index for index, _ in sent] == [*range(1, len(streams))]
            assert len(turns) >= len(streams) // STARTS_MAX
            ticking.cancel()
        assert begun == [*range(num_begun)]
        await events.aclose()
        gate = asyncio.Semaphore(0)


async def _tick(turns: list[float]) -> None:
    while True:
        turns.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0)


@pytest.mark.parametrize("num", [1, STARTS_MAX, STARTS_MAX + 1])
async def test_each_choice_of_a_request_is_admitted_once(num: int) -> None:
    """Many choices are admitted together, before the first one begins."""
    front = Front(Service(*WHOLE))
    assert (await front.post(prompt=[[1, 2]] * num)).status_code == 200
    assert (len(front.service.calls), front.service.num_admitted) == (num, num)
