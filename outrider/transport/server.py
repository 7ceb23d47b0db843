"""gRPC servers: every method of a service goes through one decode step and one error map.

gRPC hands over bytes and we decode them, so that a message that cannot be decoded is the caller's
INVALID_ARGUMENT and not our INTERNAL. A servicer is any object with a method per rpc, named in
snake case (`GetSession` -> `get_session`):

    unary -> unary      async def describe(self, request, context) -> Reply
    unary -> stream     def generate(self, request, context) -> AsyncIterator[Reply]
    stream -> stream    def verify(self, requests, context) -> AsyncIterator[Reply]

It raises errors of `outrider.errors`, and only this module calls `context.abort`.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import BadRequest, ConfigError, check
from outrider.limits import SESSIONS_PER_COORDINATOR_MAX
from outrider.transport.authorization import behind
from outrider.transport.channel import server_options
from outrider.transport.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Serving = health_pb2.HealthCheckResponse.ServingStatus
_health_aio: Any = vars(health)["aio"]
"""The asyncio half of the health package, which its type stubs do not know."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service of a .proto file and the object that answers its calls."""

    descriptor: ServiceDescriptor
    servicer: object


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    """Address to bind; the default is loopback, which only this machine reaches."""
    port: int = 0
    """0 = any free port."""
    reflection: bool = True
    """Whether the server describes its services by reflection."""
    max_concurrent_calls: int = 2 * SESSIONS_PER_COORDINATOR_MAX
    """Calls beyond it are refused with RESOURCE_EXHAUSTED."""
    credentials: grpc.ServerCredentials | None = None
    """TLS; None = plain text."""
    shares_port: bool = False
    """Whether a later server that has `takes_over` may listen on the same port."""
    takes_over: bool = False
    """Whether the port may be held by a server that `shares_port`, whose place this one takes.
    Else a port that another process holds is refused."""
    guards: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = ()
    """Each call passes them, in this order."""


class RpcServer:
    """A grpc.aio server with health (overall and per service) and, where asked for, reflection.

    It reports NOT_SERVING until `set_serving(True)`."""

    def __init__(self, services: Sequence[Service], options: ServerOptions | None = None) -> None:
        self._options = options or ServerOptions()
        self._names = [service.descriptor.full_name for service in services]
        self._server = grpc.aio.server(
            interceptors=[*self._options.guards, _DecodesForOthers()],
            options=server_options(shares_port=self._options.shares_port),
            maximum_concurrent_rpcs=self._options.max_concurrent_calls,
        )
        self._server.add_generic_rpc_handlers(tuple(_handlers(service) for service in services))
        self._health: Any = _health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._options.reflection:
            names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        self._port = 0

    @property
    def address(self) -> str:
        check(self._port > 0, "the server has not been started")
        return _join(self._options.host, self._port)

    async def start(self) -> int:
        """Listens, and returns the port. Raises `ConfigError` where the address cannot be had."""
        await self.set_serving(False)
        options = self._options
        address = _join(options.host, options.port)
        try:
            if options.port and not options.takes_over and is_taken(options.host, options.port):
                raise RuntimeError("another process listens there")
            if options.credentials is None:
                self._port = self._server.add_insecure_port(address)
            else:
                self._port = self._server.add_secure_port(address, options.credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: the port is taken (0 = any free one), or the host "
                "is no address of this machine"
            ) from error
        await self._server.start()
        return self._port

    async def set_serving(self, serving: bool) -> None:
        """What health answers, overall and for each service."""
        status = Serving.SERVING if serving else Serving.NOT_SERVING
        for name in (health.OVERALL_HEALTH, *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Reports NOT_SERVING, takes no more calls and ends those that last longer than
        `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()


class _DecodesForOthers(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Health and reflection have handlers of their packages' own, which leave decoding to gRPC:
    bytes that are no message would be UNKNOWN. They get messages, too, and never such bytes."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse, method = handler.request_deserializer, details.method

        def decode(data: bytes) -> Message:
            try:
                found: Message = parse(data)
            except DecodeError as error:
                reason = f"these {len(data)} bytes are no message of {method}"
                raise BadRequest("message", reason) from error
            return found

        async def decode_all(frames: AsyncIterator[bytes]) -> AsyncGenerator[Message]:
            async for data in frames:
                yield decode(data)

        @asynccontextmanager
        async def mapped(context: Context) -> AsyncIterator[None]:
            try:
                yield
            except BadRequest as error:
                await abort(context, error, method)
            except NotImplementedError:  # Or each call would be a traceback in the log.
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "is not served")

        return behind(handler, mapped, decode_all if handler.request_streaming else decode)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _handlers(service: Service) -> Any:
    methods = {}
    for method in service.descriptor.methods:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
        call = getattr(service.servicer, name, None)
        check(callable(call), f"{type(service.servicer).__name__} has no method {name}")
        methods[method.name] = _handler(method, call)
    return grpc.method_handlers_generic_handler(service.descriptor.full_name, methods)


def _handler(method: MethodDescriptor, call: Any) -> Any:
    """Wraps one method of a servicer: bytes in, bytes out, errors as statuses."""
    request_type = GetMessageClass(method.input_type)
    name = method.full_name

    async def unary_unary(data: bytes, context: Context) -> bytes:
        async with _errors_as_statuses(context, name):
            reply: Message = await call(_decode(request_type, data), context)
            return reply.SerializeToString()

    async def unary_stream(data: bytes, context: Context) -> None:
        async with _errors_as_statuses(context, name):
            await _write_all(call(_decode(request_type, data), context), context)

    async def stream_stream(frames: AsyncIterator[bytes], context: Context) -> None:
        async with _errors_as_statuses(context, name):
            await _write_all(call(_decode_all(request_type, frames), context), context)

    if method.client_streaming:
        check(method.server_streaming, f"{name}: client streaming alone is not used")
        return grpc.stream_stream_rpc_method_handler(stream_stream)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(unary_stream)
    return grpc.unary_unary_rpc_method_handler(unary_unary)


async def _write_all(replies: AsyncGenerator[Message], context: Context) -> None:
    """Writes what the servicer yields. However the call ends, the generator is closed at once,
    so that the servicer's `finally` does not wait for a garbage collection."""
    try:
        async for reply in replies:
            await context.write(reply.SerializeToString())
    finally:
        await replies.aclose()


def _decode(kind: Callable[[], Message], data: bytes) -> Message:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise BadRequest(
            "message", f"these {len(data)} bytes are no {message.DESCRIPTOR.full_name}"
        ) from error
    return message


async def _decode_all(
    kind: Callable[[], Message], frames: AsyncIterator[bytes]
) -> AsyncGenerator[Message]:
    async for data in frames:
        yield _decode(kind, data)


@asynccontextmanager
async def _errors_as_statuses(context: Context, method: str) -> AsyncGenerator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # noqa: BLE001 - the one place that maps every error
        await abort(context, error, method)


def is_taken(host: str, port: int) -> bool:
    """Whether an address of `host` has a listener on `port`. Two servers with SO_REUSEPORT would
    share it silently: the kernel gives each new connection to one of them. Binds each address for
    a moment. False where an address cannot be bound for another reason."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return any(_in_use(family, address) for family, _, _, _, address in found)


def _in_use(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Connections that have just ended do not count, as for the server itself.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
