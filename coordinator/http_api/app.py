"""The routes, and the middlewares around them: timing, callers, bodies."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.http_api.answers import ChatShape, CompletionShape, NativeEvents
from coordinator.http_api.bodies import ChatBody, CompletionBody
from coordinator.http_api.errors import (
    ErrorBody,
    add_error_handlers,
    error_response,
    json_response,
    meant,
)
from coordinator.http_api.reading import BodyLimit, BodyRoute
from coordinator.http_api.serving import Generations
from coordinator.http_api.translation import (
    EVENTS,
    NativeBody,
    translate_chat,
    translate_completion,
    translate_native,
)
from coordinator.requests.validation import ServedModel
from coordinator.routing.discovery import SeenReplica
from coordinator.service import CoordinatorService
from outrider.errors import NotFound, OutriderError, PermissionDenied, Unavailable

if TYPE_CHECKING:
    from outrider.telemetry.http_times import HttpTimes


def listed_models(model: ServedModel, created: int) -> dict[str, Any]:
    """All models, of which there is one. `created` is when it began to be served, in seconds since
    1970."""
    return {"object": "list", "data": [_model_body(model, created)]}


def found_model(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    """The model of a name. Raises `NotFound`."""
    if name != model.name:
        raise NotFound(f"model: {name[:256]!r} is not served; {model.name!r} is")
    return _model_body(model, created)


def _model_body(model: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


class Fleet(BaseModel):
    """Coordinators, targets and drafts."""

    replicas: list[SeenReplica]
    heard_ms_ago: float | None
    """When the registry was last read; null where the deployment has none."""


def fleet_body(service: CoordinatorService) -> dict[str, Any]:
    """All of them. Raises `Unavailable` before the coordinator has started."""
    fleet = service.fleet
    seen = fleet.replicas(service.model.name, service.num_running, service.figures)
    return {"replicas": [asdict(one) for one in seen], "heard_ms_ago": fleet.heard_ms_ago}


HEALTH_CACHED_S: Final = 1.0
"""How long an answer is good for: no key is needed to ask, and each question costs the store and a
target one."""
SLOW_S: Final = 0.5
"""Callers wait so long for a new answer where the last one said that all is well, ..."""
WELL_S: Final = 5.0
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


PAGE: Final = "index.html"
FOLDER: Final = "/page/"
"""Where files other than the page itself are."""
CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # No text becomes HTML.
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # Kept, and asked for again: a 304 is quick.
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is served."""

    content: bytes
    content_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self.etag}
        known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or f"W/{self.etag}" in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.content_type})


def load_page() -> dict[str, PageFile]:
    """All files of the page, by the paths that they are served at."""
    found = {}
    for one in files("coordinator.http_api").joinpath("page").iterdir():
        kind = CONTENT_TYPES.get(one.name.rpartition(".")[2])
        if kind is None:
            continue
        content = one.read_bytes()
        etag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
        path = "/" if one.name == PAGE else FOLDER + one.name
        found[path] = PageFile(content, kind, etag)
    return found


_FILES: Final = load_page()
PAGE_PATHS: Final = frozenset(_FILES)
"""Where the page and its files are."""


def add_page(app: FastAPI) -> None:
    for path, file in sorted(_FILES.items()):
        app.add_api_route(path, _server(file), methods=["GET", "HEAD"], include_in_schema=False)


def _server(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return file.response(request)

    return serve


class TimingMiddleware:
    """Around an application, from a request's arrival to the last byte of its answer."""

    def __init__(self, app: ASGIApp, times: HttpTimes) -> None:
        self._app = app
        self._times = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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


class CallerMiddleware:
    """Learns who calls before anything of a request's body is read."""

    def __init__(self, app: ASGIApp, access: AccessControl, hosts: Collection[str]) -> None:
        self._app = app
        self._access = access
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check_host(headers.get("host", ""))
                if scope["path"] not in OPEN_PATHS:
                    caller = self._access.identify(headers.getlist("authorization"))
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


def build_app(
    service: CoordinatorService,
    closing: asyncio.Event,
    metrics: Metrics | None,
    access: AccessControl = OPEN,
    times: HttpTimes | None = None,
    hosts: Collection[str] = (),
) -> FastAPI:
    """The application, behind the `access`. `closing` is set when it waits no longer for what runs;
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
    app.state.access = access
    app.add_middleware(BodyLimit)
    app.add_middleware(CallerMiddleware, access=access, hosts=hosts)  # The last one is asked first.
    if times is not None:
        app.add_middleware(TimingMiddleware, times=times)
    add_error_handlers(app)
    generations = Generations(service, access, closing)
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
        return json_response(listed_models(service.model, created))

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def get_model(name: str) -> Response:
        """The same by its name."""
        return json_response(found_model(service.model, name, created))


def _add_operation(app: FastAPI, service: CoordinatorService, metrics: Metrics | None) -> None:
    kept = CachedHealth(service)

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
    events = {"description": EVENTS, "content": {"text/event-stream": {}}}
    add_page(app)

    @app.post("/api/generate", responses={200: events, **_ERRORS}, response_class=Response)
    async def generate(body: NativeBody, request: Request) -> Response:
        """Goes on with a conversation or a prompt, and tells of every round."""
        asked = translate_native(body, service.draw_seed)
        return await generations.stream(request, asked, NativeEvents(service.text).take)

    @app.get("/api/fleet", responses={200: {"model": Fleet}, **_ERRORS})
    async def tell_fleet() -> Response:
        """The replicas, as this coordinator knows them."""
        return json_response(fleet_body(service))
