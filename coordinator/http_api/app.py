"""The routes, and the middlewares around them: timing, callers, bodies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.auth.access_control import OPEN, AccessControl
from coordinator.http_api.answers import ChatAnswer, CompletionAnswer, NativeEvents
from coordinator.http_api.bodies import ChatBody, CompletionBody, NativeBody
from coordinator.http_api.errors import (
    ErrorBody,
    add_error_handlers,
    json_response,
)
from coordinator.http_api.reading import PAGE, BodyRoute, Entrance
from coordinator.http_api.serving import Generations
from coordinator.routing.discovery import SeenReplica
from coordinator.service import CoordinatorService
from outrider.errors import BadRequest, NotFound, Unavailable
from outrider.limits import MAX_TOKENS_DEFAULT

if TYPE_CHECKING:
    from outrider.telemetry.metrics import HttpTimes


class Fleet(BaseModel):
    """Coordinators, targets and drafts."""

    replicas: list[SeenReplica]
    heard_ms_ago: float | None
    """When the registry was last read; null where the deployment has none."""


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


_PAGE_HEADERS: Final = {
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
_EVENTS: Final = """A stream of server-sent events, each a JSON object with its `type`:

* `started`: `session_id`, `model`, `seed`, `rule`, `num_prompt_tokens`
* `round`, before its tokens: `index`, `first_index` (of its first token in the answer),
  `proposed_token_ids`, `proposed_texts`, `proposed_parents` (of a tree: the index of the proposed
  token that each follows, -1 = what was committed before), `num_accepted`, `look_ahead_hit`,
  `draft_ms`, `wire_ms`, `queue_ms`, `verify_ms`, `commit_ms`
* `tokens`: `first_index`, `token_ids`, `origins` (`accepted`, `correction`, `bonus`), `texts` (the
  characters that became whole with each token), `text_delta` (the part of all texts that is certain
  to belong to the answer; it may lag behind), `logprobs` where they were asked for
* `finished`: `finish_reason` (`stop`, `length`, `cancelled`, `deadline`), `usage`, `metrics`

Then `[DONE]`. An error behind `started` is an event with `error`, and the last one. Texts are null
where the model has no tokenizer. A client that goes cancels its session."""
_METRICS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "Prometheus' text.", "content": {"text/plain": {}}},
    **_ERRORS,
}


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
    app.add_middleware(Entrance, access=access, hosts=hosts)  # The last one is asked first.
    if times is not None:
        app.add_middleware(TimingMiddleware, times=times)
    add_error_handlers(app)
    _add_generation(app, Generations(service, access, closing), service)
    _add_operation(app, service, metrics)
    return app


def _add_generation(app: FastAPI, generations: Generations, service: CoordinatorService) -> None:
    @app.post("/v1/chat/completions", responses=_STREAMS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Goes on with a conversation."""
        return generations.answer(request, body.translate(service.draw_seed), ChatAnswer)

    @app.post("/v1/completions", responses=_STREAMS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Goes on with raw text or tokens."""
        return generations.answer(request, body.translate(service.draw_seed), CompletionAnswer)

    events = {"description": _EVENTS, "content": {"text/event-stream": {}}}

    @app.post("/api/generate", responses={200: events, **_ERRORS}, response_class=Response)
    async def generate(body: NativeBody, request: Request) -> Response:
        """Goes on with a conversation or a prompt, and tells of every round."""
        if "stream" in body.model_fields_set and not body.stream:
            raise BadRequest("stream", "must be true, or be left out: events are always a stream")
        asked = body.translate(service.draw_seed)
        if len(asked.requests) != 1:
            field = "n" if body.n > 1 else "prompt"
            raise BadRequest(field, f"asks for {len(asked.requests)} answers; allowed: 1")
        [one] = asked.requests
        one = replace(one, include_rounds=True, default_max_tokens=MAX_TOKENS_DEFAULT)
        asked = replace(asked, requests=(one,))
        return generations.stream(request, asked, NativeEvents(service.text).take)


def _add_operation(app: FastAPI, service: CoordinatorService, metrics: Metrics | None) -> None:
    created, cached = int(time.time()), CachedHealth(service)
    page = PageFiles(packages=[("coordinator.http_api", "page")])
    app.mount(PAGE, page)

    def model_body() -> dict[str, Any]:
        return {
            "id": service.model.name,
            "object": "model",
            "created": created,
            "owned_by": "outrider",
            "root": service.model.name,
            "parent": None,
            "max_model_len": service.model.max_model_len,
        }

    @app.get("/v1/models", responses=_ERRORS)
    async def list_models() -> Response:
        """The model that is served."""
        return json_response({"object": "list", "data": [model_body()]})

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def get_model(name: str) -> Response:
        """The same by its name."""
        if name != service.model.name:
            raise NotFound(f"model: {name[:256]!r} is not served; {service.model.name!r} is")
        return json_response(model_body())

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        """Whether a request that comes now can make progress; 503 says why not."""
        trouble = await cached.trouble()
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

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def show_page(request: Request) -> Response:
        """The window."""
        return await page.get_response("index.html", request.scope)

    @app.get("/api/fleet", responses={200: {"model": Fleet}, **_ERRORS})
    async def tell_fleet() -> Response:
        """The replicas, as this coordinator knows them."""
        fleet = service.fleet
        seen = fleet.replicas(service.model.name, service.num_running, service.figures)
        replicas = [asdict(one) for one in seen]
        return json_response({"replicas": replicas, "heard_ms_ago": fleet.heard_ms_ago})
