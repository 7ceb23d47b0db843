"""The routes, the middleware that times them, and the answers to requests for a generation, whole
or as server-sent events, for as long as the client is there."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.auth.access_control import AccessControl
from coordinator.http_api.answers import Answer, ChatAnswer, CompletionAnswer, Json, NativeEvents
from coordinator.http_api.bodies import (
    ChatBody,
    CompletionBody,
    NativeBody,
    TranslatedBody,
)
from coordinator.http_api.reading import (
    PAGE,
    BodyRoute,
    Entrance,
    ErrorBody,
    add_error_handlers,
    error_body,
    json_response,
    to_json,
)
from coordinator.http_api.responses import ResponseAnswer, ResponsesBody
from coordinator.http_api.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DocumentedApp,
    Health,
    Model,
    ModelList,
    ResponseEvent,
    ResponseObject,
    Version,
    answers,
)
from coordinator.http_api.server import HttpOptions, HttpServer, Metrics, until_gone
from coordinator.http_api.tokens import add_tokens
from coordinator.http_api.tool_parsers import ChatFormats
from coordinator.routing.discovery import SeenReplica
from coordinator.service import CoordinatorService
from outrider.api_keys import Caller
from outrider.errors import BadRequest, NotFound, Unavailable
from outrider.limits import EVENTS_AHEAD_MAX, MAX_TOKENS_DEFAULT, TRACEPARENT_CHARS_MAX
from outrider.request import Event, Finished

if TYPE_CHECKING:
    from outrider.telemetry.metrics import HttpTimes
    from outrider.tokenizer import TokenizerText


Events = AsyncGenerator[tuple[int, Event]]
"""Of all choices of a request, each with its choice's index."""
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Or a proxy waits for the end.
)


class Generated(Response):
    """The answer to a request whose body has been read: once, when all events have come, or each
    part as a server-sent event, and a last one. It ends, and closes the events, where the client
    goes or the server is closing. An error is raised before the first part, and the last event
    behind it."""

    def __init__(
        self, events: Events, closing: asyncio.Event, answer: Answer | NativeEvents
    ) -> None:
        """`answer` is told every event, and says what the client is told."""
        super().__init__()
        self._events = events
        self._closing = closing
        self._answer = answer
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(self._tell(scope, receive, send), receive, self._closing)
        except Exception as error:
            if not self._has_begun:
                raise
            for part in self._answer.failed(error_body(error)):
                await self._send(send, part)
            await send({"type": "http.response.body"})

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for index, event in events:
                for part in self._answer.take(index, event):
                    await self._send(send, part)
        whole = self._answer.whole()
        if whole is None:
            await send({"type": "http.response.body", "body": self._answer.last})
        else:
            await json_response(whole)(scope, receive, send)

    async def _send(self, send: Send, part: Json) -> None:
        if not self._has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._has_begun = True
        name = f"event: {part['type']}\n".encode() if self._answer.is_named else b""
        body = name + b"data: " + to_json(part) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _interleaved(streams: Sequence[AsyncGenerator[Event]], asked: TranslatedBody) -> Events:
    """The events of all streams as they come, once each has begun; the first error ends it. A
    stream waits while `EVENTS_AHEAD_MAX` events do."""
    index, tasks = 0, list[asyncio.Task[None]]()
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(EVENTS_AHEAD_MAX)

    async def forward(index: int, stream: AsyncGenerator[Event]) -> None:
        try:
            async for event in stream:
                await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:  # noqa: BLE001 (raised by whoever reads)
            await queue.put((index, error))

    try:
        first = await asyncio.gather(*map(anext, streams), return_exceptions=True)
        for place, begun in enumerate(first):
            if isinstance(begun, BaseException):
                index = place
                raise begun
        for index, event in enumerate(first):
            yield index, cast(Event, event)
        num_left = len(streams)
        if num_left == 1:  # Nothing to wait for beside it: no queue, and no task of its own.
            async for event in streams[0]:
                yield 0, event
            return
        tasks = [asyncio.create_task(forward(*pair)) for pair in enumerate(streams)]
        while num_left:
            index, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_left -= 1
            else:
                yield index, found
    except BadRequest as error:
        raise asked.renamed(error, index) from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _generated(
    service: CoordinatorService, access: AccessControl, request: Request, asked: TranslatedBody
) -> Events:
    """The events of all choices as they come, each with its choice's index. They count as one
    request of who calls, and as a generation each, whose places are free when the last one
    ends. None runs before every one of them was admitted, and none goes on once one of them has
    failed. Raises `BadRequest` for more choices than there can ever be room for, and what
    `CoordinatorService.generate` does, in the body's words."""
    caller: Caller = request.state.caller
    left = len(asked.requests)
    if 0 < caller.concurrency < left:
        raise BadRequest(
            "n" if asked.body.n > 1 else "prompt",
            f"asks for {left} generations; the key {caller.name!r} may run "
            f"{caller.concurrency} at a time",
        )
    # The trace that the caller is part of, as W3C Trace Context has it.
    trace = request.headers.get("traceparent", "")
    trace = trace if len(trace) <= TRACEPARENT_CHARS_MAX else ""
    async with AsyncExitStack() as exits:
        streams = [
            await exits.enter_async_context(
                aclosing(service.generate(one, caller.tenant, trace, resumable=False))
            )
            for one in asked.requests
        ]
        running = await exits.enter_async_context(aclosing(_interleaved(streams, asked)))
        admitted = access.admit(caller, num_generations=left)
        grant = await exits.enter_async_context(admitted)
        async for index, event in running:
            left -= isinstance(event, Finished)
            if left == 0:
                await grant.release()
            yield index, event


class Fleet(BaseModel):
    """Coordinators, targets and drafts."""

    replicas: list[SeenReplica]
    heard_ms_ago: float | None
    """When the registry was last read; null where the deployment has none."""


HEALTH_CACHED_S = 1.0
"""How long an answer is good for: no key is needed to ask, and each question costs the store and a
target one."""
SLOW_S = 0.5
"""Callers wait so long for a new answer where the last one said that all is well, ..."""
WELL_S = 5.0
"""... and are given that one then, unless it is older than this."""


class CachedHealth:
    """The newest answer of a coordinator, on its event loop."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._asking: asyncio.Task[str] | None = None
        self._good_until = self._well_until = 0.0

    async def trouble(self) -> str:
        """Why no request can make progress, as of `HEALTH_CACHED_S` ago at most; empty where they
        can, or could up to `WELL_S` ago and nothing else is known within `SLOW_S`. Where asking
        fails it raises, and the next caller asks again."""
        loop = asyncio.get_running_loop()
        if self._asking is None or (self._asking.done() and loop.time() >= self._good_until):
            self._good_until = 0.0
            self._asking = asyncio.create_task(self._answer())
        asking = self._asking
        await asyncio.wait([asking], timeout=SLOW_S)
        if not asking.done() and loop.time() < self._well_until:
            return ""
        return await asyncio.shield(asking)

    async def _answer(self) -> str:
        found = await self._service.trouble()
        now = asyncio.get_running_loop().time()
        self._good_until = now + HEALTH_CACHED_S
        self._well_until = 0.0 if found else now + WELL_S
        return found


_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # No text becomes HTML.
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # Kept, and asked for again: a 304 is quick.
}


class PageFiles(StaticFiles):
    """The page and what belongs to it."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


class TimingMiddleware:
    """Around an application, from a request's arrival to the last byte of its answer."""

    def __init__(self, app: ASGIApp, times: HttpTimes) -> None:
        self._app = app
        self._times = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begun = time.monotonic()
        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = status or 500  # As whoever catches it will say.
            raise
        finally:
            route = getattr(scope.get("route"), "path", "")
            seconds = time.monotonic() - begun
            self._times.add(seconds, scope["method"], scope["scheme"], route, status)


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong, or too much."},
    "5XX": {"model": ErrorBody, "description": "It cannot be served now."},
}
_EVENTS = """A stream of server-sent events, each a JSON object with its `type`:

* `started`: `session_id`, `model`, `seed`, `rule`, `num_prompt_tokens`
* `round`, before its tokens: `index`, `first_index` (of its first token in the answer),
  `proposed_token_ids`, `proposed_texts`, `proposed_parents` (of a tree: the index of the proposed
  token that each follows, -1 = what was committed before), `num_accepted`, `look_ahead_hit`,
  `draft_ms`, `wire_ms`, `queue_ms`, `verify_ms`, `commit_ms`
* `tokens`: `first_index`, `token_ids`, `origins` (`accepted`, `correction`, `bonus`), `texts` (the
  characters that became whole with each token), `text_delta` (the part of all texts that is certain
  to belong to the answer; it may lag behind), `logprobs` where they were asked for
* `finished`: `finish_reason` (`stop`, `length`, `cancelled`, `deadline`), `stop_string` and
  `stop_token_id` (that ended the text, or null), `usage`, `metrics`

Then `[DONE]`. An error behind `started` is an event with `error`, and the last one. Texts are null
where the model has no tokenizer. A client that goes cancels its session."""
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus' text.", "content": {"text/plain": {}}},
}


def http_server(
    service: CoordinatorService, options: HttpOptions, formats: ChatFormats | None = None
) -> HttpServer:
    """Serves a coordinator, whose model writes calls and reasoning in these `formats`; None = those
    that its chat template shows. Raises as `HttpServer`."""
    return HttpServer(
        options, lambda closing, hosts: build_app(service, closing, options, hosts, formats)
    )


def build_app(
    service: CoordinatorService,
    closing: asyncio.Event,
    options: HttpOptions,
    hosts: Collection[str] = (),
    formats: ChatFormats | None = None,
) -> FastAPI:
    """The application. `closing` is set when it waits no longer for what runs; `hosts` are the
    names that it is called by; none = any. `formats` are those of `http_server`."""
    access = options.access
    app = DocumentedApp(
        title="Outrider",
        version=version("outrider"),
        docs_url=None,  # Their pages load scripts from elsewhere; `/docs` is our own.
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,  # A path with one more is another, and not there.
    )
    app.router.route_class = BodyRoute
    app.state.access = access
    app.state.num_bytes = Counter()
    app.add_middleware(Entrance, access=access, hosts=hosts)  # The last one is asked first.
    if options.times is not None:
        app.add_middleware(TimingMiddleware, times=options.times)
    add_error_handlers(app)
    _add_generation(app, service, access, closing, formats or ChatFormats(service.text))
    add_tokens(app, service, access)
    _add_models(app, service)
    _add_operation(app, service, options.metrics)
    return app


def _add_generation(
    app: FastAPI,
    service: CoordinatorService,
    access: AccessControl,
    closing: asyncio.Event,
    formats: ChatFormats,
) -> None:
    def answered(
        request: Request,
        body: ChatBody | CompletionBody | ResponsesBody,
        kind: Callable[[TranslatedBody, TokenizerText | None, int, int], Answer],
    ) -> Response:
        asked = body.translate()
        if isinstance(asked.body, ChatBody):
            asked = formats.fitted(asked)
        bound = service.defaults.num_draft_tokens
        answer = kind(asked, service.text, bound, int(time.time()))
        return Generated(_generated(service, access, request, asked), closing, answer)

    @app.post("/v1/chat/completions", responses=answers(ChatCompletion, ChatCompletionChunk))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Goes on with a conversation."""
        return answered(request, body, ChatAnswer)

    @app.post("/v1/completions", responses=answers(Completion, CompletionChunk))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Goes on with raw text or tokens."""
        return answered(request, body, CompletionAnswer)

    @app.post("/v1/responses", responses=answers(ResponseObject, ResponseEvent))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Goes on with a conversation, of which nothing is kept."""
        return answered(request, body, partial(ResponseAnswer, body))

    told = {"description": _EVENTS, "content": {"text/event-stream": {}}}

    @app.post("/api/generate", responses={200: told}, response_class=Response)
    async def generate(body: NativeBody, request: Request) -> Response:
        """Goes on with a conversation or a prompt, and tells of every round."""
        if "stream" in body.model_fields_set and not body.stream:
            raise BadRequest("stream", "must be true, or be left out: events are always a stream")
        if isinstance(body, CompletionBody) and body.echo:
            raise BadRequest("echo", "is served by POST /v1/completions alone; leave it out")
        asked = body.translate()
        if len(asked.requests) != 1:
            field = "n" if body.n > 1 else "prompt"
            raise BadRequest(field, f"asks for {len(asked.requests)} answers; allowed: 1")
        [one] = asked.requests
        one = replace(one, include_rounds=True, default_max_tokens=MAX_TOKENS_DEFAULT)
        asked = replace(asked, requests=(one,))
        events = _generated(service, access, request, asked)
        return Generated(events, closing, NativeEvents(service.text))


def _add_models(app: FastAPI, service: CoordinatorService) -> None:
    created = int(time.time())

    def model_body() -> dict[str, Any]:
        return {
            "id": service.served.model,
            "object": "model",
            "created": created,
            "owned_by": "outrider",
            "root": service.served.model,
            "parent": None,
            "max_model_len": service.served.max_model_len,
        }

    @app.get("/v1/models", responses={200: {"model": ModelList}})
    async def list_models() -> Response:
        """The model that is served."""
        return json_response({"object": "list", "data": [model_body()]})

    @app.get("/v1/models/{name:path}", responses={200: {"model": Model}})
    async def get_model(name: str) -> Response:
        """The same by its name."""
        if name != service.served.model:
            raise NotFound(
                f"model {name[:256]!r} does not exist; this server serves {service.served.model!r}"
            )
        return json_response(model_body())


def _add_operation(app: FastAPI, service: CoordinatorService, metrics: Metrics | None) -> None:
    cached = CachedHealth(service)
    page = PageFiles(packages=[("coordinator.http_api", "page")])
    app.mount(PAGE, page)

    @app.post("/ping", responses={200: {"model": Health}})
    @app.get("/ping", responses={200: {"model": Health}})
    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={200: {"model": Health}})
    async def health() -> Response:
        """Whether a request that comes now can make progress; 503 says why not."""
        trouble = await cached.trouble()
        if trouble:
            raise Unavailable(trouble)
        return json_response({"status": "ok"})

    @app.get("/version", responses={200: {"model": Version}})
    async def tell_version() -> Response:
        """Of this program."""
        return json_response({"version": app.version})

    @app.get("/metrics", responses=_METRICS, response_class=Response)
    async def tell_metrics(request: Request) -> Response:
        """For Prometheus, of this coordinator."""
        if metrics is None:
            raise HTTPException(404, "this server keeps no metrics")
        accept = request.headers.get("accept", "")
        text, content_type = await asyncio.to_thread(metrics, accept)
        return Response(text, headers={"content-type": content_type})

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def show_page(request: Request) -> Response:
        """The window."""
        return await page.get_response("index.html", request.scope)

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def show_docs(request: Request) -> Response:
        """What the routes take and answer, for people."""
        return await page.get_response("docs.html", request.scope)

    @app.get("/api/fleet")
    async def tell_fleet() -> Fleet:
        """The replicas, as this coordinator knows them."""
        fleet = service.fleet
        seen = fleet.replicas(service.served.model, service.num_running, service.figures)
        return Fleet(replicas=list(seen), heard_ms_ago=fleet.heard_ms_ago)
