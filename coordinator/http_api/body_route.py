"""Admits requests with a body, and validates the body without holding up the event loop.

The validation of a long body would block the loop for up to half a second. So it is divided into
steps, between which the loop has time for other work. Tenants take turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from coordinator.auth.access_control import AccessControl
from coordinator.http_api import reading
from coordinator.http_api.bodies import Turn
from coordinator.http_api.incoming import IncomingBodies
from coordinator.http_api.responses import ItemTurn
from outrider import limits
from outrider.errors import BadRequest

_LONG: Mapping[str, TypeAdapter[Any]] = {
    "messages": TypeAdapter(Turn),
    "input": TypeAdapter(ItemTurn),
}
"""Fields with lists that may be long. In long bodies, their items are validated one by one."""
Step = Callable[[], AbstractAsyncContextManager[None]]
Validate = Callable[[Any], tuple[Any, Sequence[Mapping[str, Any]]]]
"""Returns the validated value, and pydantic's errors."""


class Turns:
    """Lets tenants take turns at validating long bodies."""

    def __init__(self) -> None:
        self._of_tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._step = asyncio.Lock()

    @asynccontextmanager
    async def begin(self, tenant: str) -> AsyncIterator[Step]:
        """Waits until no other body of the tenant is being validated. Yields a function that makes
        a context for each step. Within this context, the caller must not wait for anything."""
        lock = self._of_tenants.setdefault(tenant, asyncio.Lock())
        async with lock:
            yield self._next_step

    @asynccontextmanager
    async def _next_step(self) -> AsyncIterator[None]:
        async with self._step:  # Locks are given in the order in which they are asked for.
            began = time.thread_time()
            try:
                yield
            finally:  # Also after the step that refuses the body.
                # One turn of the loop would not do: other requests need many, one after another.
                rest_s = min(time.thread_time() - began, limits.HTTP_BODY_REST_MS / 1e3)
                await asyncio.sleep(rest_s)


@dataclass(frozen=True, slots=True)
class BodyAdmission:
    """What the routes of an application need to admit requests and to validate their bodies."""

    access: AccessControl
    resumes: Callable[[Request], Awaitable[bool]]
    """Whether a request continues an earlier request."""
    incoming: IncomingBodies = field(default_factory=IncomingBodies)
    turns: Turns = field(default_factory=Turns)


class ValidatedRequest(Request):
    """A request whose body is read and validated already."""

    def __init__(self, request: Request, given: bool, value: Any) -> None:
        """`given` says whether there is a body. `value` is what its validation has returned."""
        super().__init__(request.scope, request.receive)
        self._content, self._value = b"{}" if given else b"", value

    async def body(self) -> bytes:
        """Stands for the body. FastAPI only looks whether it is empty, and takes its value from
        `json`. A body that is not JSON is refused."""
        return self._content

    async def json(self) -> Any:
        return self._value


class BodyRoute(APIRoute):
    """If the route takes a body, counts the request of the caller before the body is parsed.
    `Request.app.state.admission` must be a `BodyAdmission`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, body_field = super().get_route_handler(), self.body_field
        if body_field is None:
            return handle

        validate = partial(body_field.validate, loc=("body",))

        async def take_in(request: Request) -> ValidatedRequest:
            admission: BodyAdmission = request.app.state.admission
            caller = request.state.caller
            has_key = "idempotency-key" in request.headers
            may_resume = has_key or "answer_id" in request.path_params
            admission.access.check_rate(caller, may_resume=may_resume)
            async with admission.incoming.read(request) as file:
                data = file.read()
                if has_key:
                    request.state.digest = await _digest(request, data)
                await admission.access.count(caller, lambda: admission.resumes(request))
                is_json = "json" in request.headers.get("content-type", "").lower()
                value = None
                if data and is_json:
                    value = await _validated(data, validate, admission.turns, caller.tenant)
                return ValidatedRequest(request, bool(data), value)

        async def respond(request: Request) -> Response:
            return await handle(await take_in(request))

        return respond


async def _digest(request: Request, data: bytes) -> str:
    """Hashes the path and the body of a request."""
    hashed = hashlib.sha256(request.url.path.encode() + b"\n")
    if len(data) > limits.HTTP_BODY_INLINE_BYTES:
        await asyncio.to_thread(hashed.update, data)  # Releases the GIL.
    else:
        hashed.update(data)
    return hashed.hexdigest()


async def _validated(data: bytes, validate: Validate, turns: Turns, tenant: str) -> Any:
    """Returns a validated body. Raises `BadRequest`."""
    if len(data) <= limits.HTTP_BODY_INLINE_BYTES:
        value = reading.read_body(data)
        _check_arguments(value)
        validated, wrong = validate(value)
        if wrong:
            raise reading.wrong_body(wrong)
        return validated
    async with turns.begin(tenant) as step:
        async with step():
            reading.check_size(data)
        async with step():
            value = reading.parse(data)
        async with step():
            _check_arguments(value)
        await _validate_items(value, step)
        async with step():
            validated, wrong = validate(value)
        if wrong:
            async with step():
                raise reading.wrong_body(wrong)
        return validated


async def _validate_items(value: Any, step: Step) -> None:
    """Replaces the items of these lists by what their validation returns. Raises `BadRequest`."""
    for name, adapter in _LONG.items():
        items = value.get(name) if isinstance(value, dict) else None
        if not isinstance(items, list):
            continue
        if len(items) > (most := limits.CHAT_MESSAGES_MAX):
            raise BadRequest(name, f"has {len(items)} items; at most {most} items are allowed")
        index = 0
        while index < len(items):
            async with step():
                end = time.monotonic() + limits.HTTP_BODY_STEP_MS / 1e3
                while index < len(items) and time.monotonic() < end:
                    try:
                        items[index] = adapter.validate_python(items[index])
                    except ValidationError as error:
                        wrong = error.errors(include_url=False)
                        raise reading.wrong_body(
                            [{**entry, "loc": (name, index, *entry["loc"])} for entry in wrong]
                        ) from None
                    index += 1


def _check_arguments(value: Any) -> None:
    """Refuses a body whose calls' arguments would be too large as a body of their own. Raises
    `BadRequest`."""
    for name in _LONG:
        items = value.get(name) if isinstance(value, dict) else None
        texts = [*_arguments(items)] if isinstance(items, list) else []
        if excess := reading.exceeded("".join(texts).encode(errors="surrogatepass")):
            raise BadRequest(name, f"the arguments of the calls have more than {excess}")


def _arguments(items: list[Any]) -> Iterator[str]:
    """Yields the arguments of all calls, before the items are validated."""
    for item in items:
        match item:
            case {"tool_calls": [*calls]}:
                for call in calls:
                    match call:
                        case {"function": {"arguments": str(text)}}:
                            yield text
            case {"arguments": str(text)}:
                yield text
