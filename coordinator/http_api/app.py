"""The routes of a coordinator, and the responses with generated text."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, TypeVar, cast

from fastapi import FastAPI, Header, Request, Response
from pydantic import BaseModel
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from coordinator.auth.access_control import AccessControl
from coordinator.http_api import answers, bodies, reading, schemas
from coordinator.http_api.answers import EventStream, Json
from coordinator.http_api.bodies import CompletionBody, TranslatedBody
from coordinator.http_api.body_route import BodyAdmission, BodyRoute
from coordinator.http_api.progress import Progress, RepeatedRequests, request_keys
from coordinator.http_api.responses import ResponseAnswer, ResponsesBody
from coordinator.http_api.server import (
    HttpOptions,
    LiveResponse,
    Metrics,
    metrics_response,
    send_part,
)
from coordinator.http_api.tools import AnswerForm, ChatFormats
from coordinator.routing.discovery import SeenReplica
from coordinator.service import CoordinatorService
from outrider.errors import BadRequest, NotFound, OtherTokens, SessionNotFound, Unavailable
from outrider.foundation.api_keys import Caller
from outrider.interfaces.request import Event
from outrider.limits import ENDINGS_MAX, EVENTS_AHEAD_MAX, MAX_TOKENS_DEFAULT, STARTS_MAX

T = TypeVar("T")
Events = AsyncGenerator[tuple[int, Event]]
"""The events of all choices of a request, each with the index of its choice."""
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Tells nginx to pass each event on at once.
)


class GeneratedResponse(LiveResponse):
    """A response with generated text: a whole answer, sent after the last event, or a stream of
    server-sent events. When the response ends for any reason, it closes `events`."""

    def __init__(self, events: Events, answer: EventStream, progress: Progress) -> None:
        super().__init__()
        self._events, self._answer, self._progress = events, answer, progress

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for index, event in events:
                parts = self._answer.take(index, event)
                for part, event_id in self._progress.unsent(index, event, parts):
                    await self._begin(send, 200, _HEADERS)
                    number = self._progress.num_parts - 1
                    await send_part(send, self._event(part, number, event_id))
        if not self._answer.is_stream:
            await reading.json_response(self._answer.whole())(scope, receive, send)
            return
        await self._begin(send, 200, _HEADERS)
        await send_part(send, self._answer.last, more=False)

    def _event(self, part: Json, number: int, event_id: str = "") -> bytes:
        name = b""
        if self._answer.is_named:
            named: schemas.ResponseEvent = {"type": part["type"], "sequence_number": number}
            name, part = f"event: {named['type']}\n".encode(), {**part, **named}
        line = f"\nid: {event_id}".encode() if event_id else b""
        return name + b"data: " + reading.to_json(part) + line + b"\n\n"

    def _error_events(self, error: schemas.ErrorBody) -> bytes:
        return self._event(self._answer.failed(error), self._progress.num_parts)


async def _interleaved(streams: Sequence[AsyncGenerator[Event]], progress: Progress) -> Events:
    """Merges the events of all streams. Yields the first event of each stream. Resumed streams then
    repeat events that the client has. Yields these events stream by stream, and later events
    as they arrive. An error of one stream ends all. Streams pause while `EVENTS_AHEAD_MAX` events
    are queued."""
    tasks = list[asyncio.Task[None]]()
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(EVENTS_AHEAD_MAX)

    async def forward(index: int, stream: AsyncGenerator[Event]) -> None:
        try:
            async for event in stream:
                await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:  # noqa: BLE001 (raised where the queue is read)
            await queue.put((index, error))

    try:
        try:
            first = await _few_at_a_time([anext(stream) for stream in streams])
        except OtherTokens:
            reason = "does not match the stored tokens; leave it out to get the whole answer"
            raise BadRequest("Last-Event-ID", reason) from None
        for index, event in enumerate(first):
            if index % STARTS_MAX == 0:
                await asyncio.sleep(0)
            yield index, event
        for index, stream in enumerate(streams):
            while progress.is_behind(index) and (known := await anext(stream, None)) is not None:
                yield index, known
        num_left = len(streams)
        if num_left == 1:  # A single stream needs no queue and no task.
            async for event in streams[0]:
                yield 0, event
            return
        tasks = [asyncio.create_task(forward(*pair)) for pair in enumerate(streams)]
        while num_left:
            index, entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_left -= 1
            else:
                yield index, entry
    finally:
        await _cancel(tasks)


async def _few_at_a_time(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines a few at a time, because all at once would hold the event loop. Returns their
    results. Raises the first error, once the few have ended. The others then never begin."""
    results: list[T] = []
    try:
        for start in range(0, len(work), STARTS_MAX):
            some = await asyncio.gather(*work[start : start + STARTS_MAX], return_exceptions=True)
            for result in some:
                if isinstance(result, BaseException):
                    raise result
                results.append(result)
    finally:
        for one in work:
            one.close()
    return results


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels tasks a few at a time, because all at once would hold the event loop."""
    try:
        for start in range(0, len(tasks), ENDINGS_MAX):
            some = tasks[start : start + ENDINGS_MAX]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()


class RepeatHeaders(BaseModel):
    idempotency_key: str | None = None
    """A request with the key of an earlier request continues the earlier request."""
    last_event_id: str | None = None


class Generations:
    def __init__(self, service: CoordinatorService, access: AccessControl) -> None:
        self._service, self._access = service, access
        self._repeated = RepeatedRequests()

    async def resumes(self, request: Request) -> bool:
        """Whether a request asks for an answer that an earlier request has begun. Raises
        `BadRequest` if the earlier request with its `Idempotency-Key` was different."""
        if "answer_id" in request.path_params:
            return True
        key = request.headers.get("idempotency-key")
        if key is None:
            return False
        [first] = request_keys(key, request.state.caller.tenant, request.state.digest, 1)
        return bool((await self._service.admission.known(first)).session_id)

    def answer(
        self,
        request: Request,
        translated: TranslatedBody,
        kind: Callable[..., EventStream],
        headers: RepeatHeaders,
        session_id: str = "",
    ) -> Response:
        """Responds with an answer of the class `kind`. If `session_id` is given, the response has
        the rest of this session's answer. Raises `BadRequest` for an unusable `Last-Event-ID`."""
        service = self._service
        answer = kind(translated, service.text, service.config.num_draft_tokens, int(time.time()))
        key, event_id = headers.idempotency_key, headers.last_event_id
        if event_id is not None and not (answer.is_stream and (key or session_id)):
            reason = (
                "needs an Idempotency-Key, and stream set to true; without a key, resume a stream "
                "with POST /v1/sessions/ID/resume"
            )
            raise BadRequest("Last-Event-ID", reason)
        progress = Progress(len(translated.requests), event_id)
        events = self._events(request, translated, progress, key, session_id)
        return GeneratedResponse(events, answer, progress)

    async def _events(
        self,
        request: Request,
        translated: TranslatedBody,
        progress: Progress,
        key: str | None,
        session_id: str,
    ) -> Events:
        """Yields the events of all choices. Continues the session `session_id` or the sessions of
        the `key`, if there are any. Otherwise opens new sessions.

        The request must have been counted. Each choice counts as one generation until the last
        choice ends. No choice runs before all are admitted. Raises `BadRequest` if the
        caller may not run so many choices at a time. Also raises the service's errors."""
        service, caller = self._service, cast(Caller, request.state.caller)
        tenant, number, resumed = caller.tenant, len(translated.requests), list[str]()
        if 0 < caller.concurrency < number:
            raise BadRequest(
                "n" if translated.n > 1 else "prompt",
                f"asks for {number} generations; the key {caller.name!r} may run "
                f"{caller.concurrency} at a time",
            )
        # The caller's trace context, in W3C's format.
        trace = request.headers.get("traceparent", "")
        async with AsyncExitStack() as exits:
            if is_large := number > STARTS_MAX:
                # They begin a few at a time. Without a place for each, some would begin in vain.
                exits.enter_context(service.admission.admitted(number))
            if session_id:
                resumed = [session_id]
                resume = progress.resume_request(0, session_id)
                streams = [service.streams.resume(resume, tenant, trace, outlasts_errors=True)]
            elif key is None:
                each = translated.requests
                streams = [
                    service.streams.generate(
                        generation, tenant, trace, resumable=False, is_admitted=is_large
                    )
                    for generation in each
                ]
            else:
                new = request_keys(key, tenant, request.state.digest, number)
                await exits.enter_async_context(self._repeated.turn(new[0], progress, tenant))
                keys = await _few_at_a_time([service.admission.known(key) for key in new])
                streams = [
                    service.streams.generate_once(
                        generation,
                        own,
                        progress.resume_request(index),
                        tenant,
                        trace,
                        is_admitted=is_large,
                    )
                    for index, (generation, own) in enumerate(
                        zip(translated.requests, keys, strict=True)
                    )
                ]
                if all(key.session_id for key in keys):
                    resumed = [key.session_id for key in keys]
            for stream in streams:
                await exits.enter_async_context(aclosing(stream))
            interleaved = _interleaved(streams, progress)
            running = await exits.enter_async_context(aclosing(interleaved))
            admitted = self._access.admit(caller, resumed, number, is_counted=True)
            grant = await exits.enter_async_context(admitted)
            async for index, event in running:
                await grant.note(event, index)
                yield index, event


class Fleet(BaseModel):
    replicas: list[SeenReplica]
    heard_ms_ago: float | None
    """Time since the registry was last read, ms. null = there is no registry."""


_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # Scripts cannot write HTML.
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # Before each use, browsers ask whether a file has changed.
}


class PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


_ERRORS: schemas.Responses = {
    "4XX": {"model": schemas.ErrorBody, "description": "The request is wrong, or exceeds a limit."},
    "5XX": {"model": schemas.ErrorBody, "description": "The request cannot be served now."},
}
_EVENTS = """A stream of server-sent events, each a JSON object with its `type`: `started`, `round`,
`tokens` or `finished`. docs/window.md describes their fields. The stream ends with `[DONE]`. If an
error occurs after `started`, the stream ends with an event that has the field `error`."""
_METRICS: schemas.Responses = {
    200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}
}


def build_app(
    service: CoordinatorService, options: HttpOptions, formats: ChatFormats | None = None
) -> FastAPI:
    """Makes the application of a coordinator. By default, the model's chat template decides the
    `formats` of tool calls and reasoning."""
    access = options.access
    runs = Generations(service, access)
    app = schemas.DocumentedApp(
        title="Outrider",
        version=version("outrider"),
        responses=_ERRORS,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads scripts from other hosts. `show_page` replaces it.
        redoc_url=None,
    )
    app.router.route_class = BodyRoute
    app.state.admission = BodyAdmission(access, runs.resumes)
    app.add_middleware(reading.AuthenticationMiddleware, access=access, hosts=options.hosts)
    reading.add_error_handlers(app)
    _add_generation(app, service, runs, formats or ChatFormats(service.text))
    _add_tokens(app, service)
    _add_models(app, service)
    _add_operation(app, service, options.metrics)
    return app


Headers = Annotated[RepeatHeaders, Header()]
_REST = bodies.ResumeBody()
_REST_OF_ANSWER: schemas.Responses = {
    200: {
        "description": "The remaining chunks. If `stream` is false, the whole answer.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
_RESUMED = {kind.id_prefix: kind for kind in (answers.ChatAnswer, answers.CompletionAnswer)}


def _add_generation(
    app: FastAPI, service: CoordinatorService, runs: Generations, formats: ChatFormats
) -> None:

    @app.post("/v1/chat/completions", responses=schemas.CHAT)
    async def chat_completions(
        body: bodies.ChatBody, request: Request, headers: Headers
    ) -> Response:
        """Continues a conversation."""
        return runs.answer(request, body.translate(formats), answers.ChatAnswer, headers)

    @app.post("/v1/completions", responses=schemas.COMPLETION)
    async def completions(body: CompletionBody, request: Request, headers: Headers) -> Response:
        """Continues raw text or tokens."""
        return runs.answer(request, body.translate(), answers.CompletionAnswer, headers)

    @app.post("/v1/responses", responses=schemas.RESPONSE)
    async def responses(body: ResponsesBody, request: Request, headers: Headers) -> Response:
        """Continues a conversation. Responses are not stored."""
        return runs.answer(request, body.translate(formats), ResponseAnswer, headers)

    @app.post("/v1/sessions/{answer_id}/resume", responses=_REST_OF_ANSWER)
    async def resume(
        answer_id: str, request: Request, headers: Headers, body: bodies.ResumeBody = _REST
    ) -> Response:
        """Returns the rest of the answer with this id. Only the first choice is resumed."""
        prefix, session_id = answer_id[:-32], answer_id[-32:]
        if prefix not in _RESUMED or not re.fullmatch("[0-9a-f]{32}", session_id):
            raise SessionNotFound(f"there is no session {answer_id[:64]}")
        parameters = await service.streams.stored_parameters(
            session_id, request.state.caller.tenant
        )
        form = AnswerForm(**json.loads(parameters.answer_form or "{}"))
        echoes = parameters.prompt_logprobs is not None
        translated = TranslatedBody(body, (parameters,), echoes=echoes, form=form)
        return runs.answer(request, translated, _RESUMED[prefix], headers, session_id)

    described = {"description": _EVENTS, "content": {"text/event-stream": {}}}

    @app.post("/api/generate", responses={200: described}, response_class=Response)
    async def generate(body: bodies.NativeBody, request: Request, headers: Headers) -> Response:
        """Continues a conversation or a prompt, with an event for every round."""
        if "stream" in body.model_fields_set and not body.stream:
            raise BadRequest("stream", "must be true or left out, because the answer is a stream")
        if isinstance(body, CompletionBody) and body.echo:
            raise BadRequest("echo", "is allowed only in POST /v1/completions; leave it out")
        translated = body.translate()
        if len(translated.requests) != 1:
            field = "n" if translated.n > 1 else "prompt"
            raise BadRequest(field, f"asks for {len(translated.requests)} answers; allowed: 1")
        [generation] = translated.requests
        generation = replace(generation, include_rounds=True, default_max_tokens=MAX_TOKENS_DEFAULT)
        translated = replace(translated, requests=(generation,))
        return runs.answer(
            request, translated, lambda *_: answers.NativeEvents(service.text), headers
        )


def _add_tokens(app: FastAPI, service: CoordinatorService) -> None:

    @app.post("/tokenize", responses={200: {"model": schemas.Tokenized}})
    async def tokenize(body: bodies.TokenizeBody, request: Request) -> Response:
        """Returns the tokens of a prompt, and their number."""
        translated, special = body.translate(), body.add_special_tokens is not False
        tenant = request.state.caller.tenant
        token_ids = await service.admission.tokenize(translated.requests[0], special, tenant)

        def as_json() -> str:
            strs, text, length = None, service.text, service.served.max_model_len
            if body.return_token_strs and text is not None:
                strs = [answers.as_text(text.spell(token_id)) for token_id in token_ids]
            return schemas.Tokenized(
                count=len(token_ids), max_model_len=length, tokens=list(token_ids), token_strs=strs
            ).model_dump_json()

        return Response(await asyncio.to_thread(as_json), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: bodies.DetokenizeBody, request: Request) -> schemas.Detokenized:
        """Returns the text of tokens. Special tokens appear by their names."""
        tenant = request.state.caller.tenant
        text = await service.admission.detokenize(body.tokens, body.model, tenant)
        return schemas.Detokenized(prompt=text)


def _add_models(app: FastAPI, service: CoordinatorService) -> None:
    created = int(time.time())

    def served_model() -> schemas.Model:
        name, length = service.served.model, service.served.max_model_len
        return schemas.Model(id=name, created=created, root=name, max_model_len=length)

    @app.get("/v1/models")
    async def list_models() -> schemas.ModelList:
        """Lists the served model. There is only one."""
        return schemas.ModelList(data=[served_model()])

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> schemas.Model:
        """Describes the served model."""
        if name != service.served.model:
            raise NotFound(
                f"model {name[:256]!r} does not exist; this server serves {service.served.model!r}"
            )
        return served_model()


def _add_operation(app: FastAPI, service: CoordinatorService, metrics: Metrics) -> None:
    page = PageFiles(packages=[("coordinator.http_api", "page")])
    app.mount(reading.PAGE, page)

    @app.post("/ping")
    @app.get("/ping")
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Checks whether new requests can make progress. If not, the status is 503."""
        if service.health.trouble:
            raise Unavailable(service.health.trouble)
        return {"status": "ok"}

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        """Returns the version of Outrider."""
        return {"version": app.version}

    @app.get("/metrics", responses=_METRICS, response_class=Response)
    async def get_metrics() -> Response:
        """Returns the metrics of this coordinator, for Prometheus."""
        return await metrics_response(metrics)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def show_page(request: Request) -> Response:
        """Sends the page of the window (docs/window.md), or the page of the API documentation."""
        name = "docs.html" if request.url.path == "/docs" else "index.html"
        return await page.get_response(name, request.scope)

    @app.get("/api/fleet")
    async def get_fleet() -> Fleet:
        """Returns the replicas that this coordinator knows."""
        fleet = service.fleet
        seen = fleet.replicas(service.served.model, service.num_running, service.health.figures)
        return Fleet(replicas=list(seen), heard_ms_ago=fleet.heard_ms_ago)
