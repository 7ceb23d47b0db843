"""What each call to a gRPC server passes first: who is it, and may they?

A refused call gets its status before a byte of its messages is read. Health is answered to
everybody who can connect: probes and balancers have no key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import grpc

from outrider.errors import OutriderError, PermissionDenied
from outrider.transport.status import abort

_CERTIFICATE_NAMES: Final = "x509_subject_alternative_name"

Continuation = Callable[[Any], Awaitable[Any]]
_Entry = Callable[[Any], AbstractAsyncContextManager[None]]
"""Ends a call by its context, or lets it run within."""


class RoleGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets in whose certificate has one of these names; that it is one of ours TLS has checked."""

    def __init__(self, *names: str) -> None:
        """DNS names, as `outrider.transport.certificates.name_of` gives them to roles."""
        self._names = frozenset(name.encode() for name in names)

    async def intercept_service(self, continuation: Continuation, details: Any) -> Any:
        method: str = details.method

        @asynccontextmanager
        async def checked(context: Any) -> AsyncIterator[None]:
            found = context.auth_context().get(_CERTIFICATE_NAMES, ())
            if not self._names.intersection(found):
                shown = ", ".join(name.decode(errors="replace") for name in found) or "no name"
                await abort(context, PermissionDenied(f"{shown}: may not call {method}"), method)
            yield

        return behind(await continuation(details), checked)


def refusing(error: OutriderError, method: str) -> Any:
    """A handler for any kind of method: the messages of a call are left unread."""

    async def refuse(_: Any, context: Any) -> None:
        await abort(context, error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


def behind(handler: Any, entry: _Entry, read: Callable[[Any], Any] | None = None) -> Any:
    """A handler that runs another one within what `entry` lets happen. With `read` gRPC hands over
    bytes, and that decodes them."""
    if handler is None:
        return None
    streaming = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if streams else "unary" for streams in streaming)
    answer = getattr(handler, kind)

    async def one(request: Any, context: Any) -> Any:
        async with entry(context):
            return await answer(request if read is None else read(request), context)

    async def many(request: Any, context: Any) -> None:
        async with entry(context):
            replies = answer(request if read is None else read(request), context)
            if not hasattr(replies, "__aiter__"):
                await replies
                return
            async for reply in replies:
                await context.write(reply)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        many if handler.response_streaming else one,
        handler.request_deserializer if read is None else None,
        handler.response_serializer,
    )
