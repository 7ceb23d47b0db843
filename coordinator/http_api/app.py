"""The routes, and the one place that asks who calls."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.service import CoordinatorService
from outrider.errors import OutriderError, Overloaded, PermissionDenied, Unavailable
from outrider.limits import (
    HTTP_BODIES_BYTES_MAX,
    HTTP_BODY_BYTES_MAX,
    HTTP_BODY_PART_S_MAX,
    HTTP_BODY_S_MAX,
    HTTP_TENANT_BODIES_BYTES_MAX,
)
from outrider.security.callers import ANYBODY, Caller
from outrider.security.gate import OPEN, Gate

from . import fleet, models
from .bodies import ChatBody, CompletionBody
from .chat import ChatShape, translate_chat
from .completions import CompletionShape, translate_completion
from .errors import ErrorBody, add_error_handlers, error_response, meant
from .health import KeptHealth
from .native import EVENTS, NativeBody, told_events, translate_native
from .page_files import PAGE_PATHS, add_page
from .reading import BodyRoute
from .rendering import json_response
from .serving import Generations
from .timed import Timed

if TYPE_CHECKING:
    from outrider.telemetry.http_times import HttpTimes

Metrics = Callable[[str], tuple[bytes, str]]
"""Prometheus' text and its content type, of those that a scraper accepts. Blocks."""
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong, or too much."},
    "5XX": {"model": ErrorBody, "description": "It cannot be served now."},
}
_STREAMS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The answer; a stream of its chunks where `stream` is true.",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **_ERRORS,
}
_METRICS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "Prometheus' text.", "content": {"text/plain": {}}},
    **_ERRORS,
}

OPEN_PATHS: Final = frozenset({"/health", *PAGE_PATHS})
"""Where nobody is asked for a key: probes have none, and the page's files, which have no data, ask
for one themselves."""


_PORT: Final = re.compile(r":\d*$")


class Doorkeeper:
    """Learns who calls before anything of a request's body is read."""

    def __init__(self, app: ASGIApp, gate: Gate, hosts: Collection[str]) -> None:
        self._app = app
        self._gate = gate
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Names the caller, and lets the call in; or answers it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check_host(headers.get("host", ""))
                if scope["path"] not in OPEN_PATHS:
                    caller = self._gate.identify(headers.getlist("authorization"))
                    scope.setdefault("state", {})["caller"] = caller
            except OutriderError as error:
                await error_response(meant(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        """Raises `PermissionDenied` for what a browser sends on behalf of another site, whose name
        leads to this machine."""
        if self._hosts and _PORT.sub("", host).lower() not in self._hosts:
            raise PermissionDenied(
                "Host: is none of this machine's own names; call localhost, or give the server "
                "API keys"
            )


class BodyLimit:
    """Reads no more of a body than `HTTP_BODY_BYTES_MAX`, for no longer than `HTTP_BODY_S_MAX` in
    all and `HTTP_BODY_PART_S_MAX` for a part. Of all bodies that have begun to come it holds at
    most `HTTP_BODIES_BYTES_MAX`, and of those of one tenant, where keys tell tenants apart, at most
    `HTTP_TENANT_BODIES_BYTES_MAX`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_bytes = 0
        self._num_tenant_bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a call read its body."""
        end = asyncio.get_running_loop().time() + HTTP_BODY_S_MAX
        caller: Caller = scope.get("state", {}).get("caller", ANYBODY)
        size, is_read = 0, False

        async def bounded() -> Message:
            nonlocal size, is_read
            if is_read:
                return await receive()
            message = await _received_by(end, receive)
            num_new = len(message.get("body", b""))
            size += num_new
            self._count(caller, num_new)
            if size > HTTP_BODY_BYTES_MAX:
                raise HTTPException(413, f"the body has more than {HTTP_BODY_BYTES_MAX} bytes")
            self._check(caller)
            if not message.get("more_body", False):
                self._count(caller, -size)
                size, is_read = 0, True
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._count(caller, -size)

    def _count(self, caller: Caller, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._num_tenant_bytes[caller.tenant] += num_bytes
        if not self._num_tenant_bytes[caller.tenant]:
            del self._num_tenant_bytes[caller.tenant]

    def _check(self, caller: Caller) -> None:
        if self._num_bytes > HTTP_BODIES_BYTES_MAX:
            raise Unavailable("too many bodies are being read; try again later")
        num_bytes = self._num_tenant_bytes[caller.tenant]
        if caller is not ANYBODY and num_bytes > HTTP_TENANT_BODIES_BYTES_MAX:
            raise Overloaded(
                f"the tenant {caller.tenant!r} sends bodies of more than "
                f"{HTTP_TENANT_BODIES_BYTES_MAX} bytes at a time; try again later"
            )


async def _received_by(end: float, receive: Receive) -> Message:
    """The next part of a body, if it comes in time."""
    part_end = asyncio.get_running_loop().time() + HTTP_BODY_PART_S_MAX
    try:
        async with asyncio.timeout_at(min(end, part_end)):
            return await receive()
    except TimeoutError:
        if part_end < end:
            reason = f"no part of the body has come for {HTTP_BODY_PART_S_MAX} s"
        else:
            reason = f"the body has not come within {HTTP_BODY_S_MAX} s"
        raise HTTPException(408, reason, {"connection": "close"}) from None


def build_app(
    service: CoordinatorService,
    closing: asyncio.Event,
    metrics: Metrics | None,
    gate: Gate = OPEN,
    times: HttpTimes | None = None,
    hosts: Collection[str] = (),
) -> FastAPI:
    """The application, behind the `gate`. `closing` is set when it waits no longer for what runs;
    without `metrics` there are none. `times` hear of each request. `hosts` are the names that it is
    called by; none = any."""
    app = FastAPI(
        title="Outrider",
        version=version("outrider"),
        docs_url=None,  # Their pages load scripts from elsewhere.
        redoc_url=None,
        redirect_slashes=False,  # A path with one more is another, and not there.
    )
    app.router.route_class = BodyRoute
    app.state.gate = gate
    app.add_middleware(BodyLimit)
    app.add_middleware(Doorkeeper, gate=gate, hosts=hosts)  # The last one is asked first.
    if times is not None:
        app.add_middleware(Timed, times=times)
    add_error_handlers(app)
    generations = Generations(service, gate, closing)
    _add_generation(app, generations, service)
    _add_models(app, service)
    _add_operation(app, service, metrics)
    _add_window(app, generations, service)
    return app


def _add_generation(app: FastAPI, generations: Generations, service: CoordinatorService) -> None:
    @app.post("/v1/chat/completions", responses=_STREAMS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Goes on with a conversation."""
        asked = translate_chat(body, service.draw_seed)
        return await generations.answer(request, asked, ChatShape())

    @app.post("/v1/completions", responses=_STREAMS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Goes on with raw text or tokens."""
        asked = translate_completion(body, service.draw_seed)
        return await generations.answer(request, asked, CompletionShape())


def _add_models(app: FastAPI, service: CoordinatorService) -> None:
    created = int(time.time())

    @app.get("/v1/models", responses=_ERRORS)
    async def list_models() -> Response:
        """The model that is served."""
        return json_response(models.listed(service.model, created))

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def get_model(name: str) -> Response:
        """The same by its name."""
        return json_response(models.found(service.model, name, created))


def _add_operation(app: FastAPI, service: CoordinatorService, metrics: Metrics | None) -> None:
    kept = KeptHealth(service)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        """Whether a request that comes now can make progress; 503 says why not."""
        trouble = await kept.trouble()
        if trouble:
            raise Unavailable(trouble)
        return json_response({"status": "ok"})

    @app.get("/version", responses=_ERRORS)
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


def _add_window(app: FastAPI, generations: Generations, service: CoordinatorService) -> None:
    """The page, and what it asks for."""
    events = {"description": EVENTS, "content": {"text/event-stream": {}}}
    add_page(app)

    @app.post("/api/generate", responses={200: events, **_ERRORS}, response_class=Response)
    async def generate(body: NativeBody, request: Request) -> Response:
        """Goes on with a conversation or a prompt, and tells of every round."""
        asked = translate_native(body, service.draw_seed)
        told = told_events(service.text, generations.events(request, asked))
        return await generations.stream(request, told)

    @app.get("/api/fleet", responses={200: {"model": fleet.Fleet}, **_ERRORS})
    async def tell_fleet() -> Response:
        """The replicas, as this coordinator knows them."""
        return json_response(fleet.told(service))
