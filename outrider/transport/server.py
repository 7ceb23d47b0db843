"""gRPC servers. All methods, also health and reflection, have the same guard, decoding and
conversion of errors. This module decodes messages itself, so a malformed message ends its call with
INVALID_ARGUMENT. With gRPC's own decoding, the status would be INTERNAL.

A `Service` maps the name of each rpc to the method that answers it:

    unary(Request, method)            async def method(request, context) -> Reply
    server_stream(Request, method)    def method(request, context) -> AsyncGenerator[Reply]
    both_stream(Request, method)      def method(requests, context) -> AsyncGenerator[Reply | bytes]

These methods raise errors of `outrider.errors`, and do not call `context.abort`."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import _async as reflection
from grpc_reflection.v1alpha import reflection_pb2

from outrider import limits
from outrider.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    InvariantError,
    NotFound,
    OutriderError,
    Overloaded,
    Unavailable,
    check,
)
from outrider.transport.callers import OpenCalls, source
from outrider.transport.channel import server_options
from outrider.transport.status import abort
from outrider.transport.wire import check_fields

Context = grpc.aio.ServicerContext[bytes, bytes]
Serving = health_pb2.HealthCheckResponse.ServingStatus
Request = TypeVar("Request", bound=Message)
Guard = Callable[[str, Context], str | None]
"""Called with `/package.Service/Method` before the messages of a call are read. Returns the name
under which the caller's calls are counted, empty = count by address. Returns None for a stranger
who may make this call without a valid key: the call's message is not read, so that a stranger
cannot make the server hold it. If the call is not allowed, raises the error for the caller.
An `Overloaded` error is about a caller with a valid key."""
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
HEALTH_PATH = f"/{_HEALTH.full_name}/"
_WRITE_DEADLINE: ContextVar[float] = ContextVar("write_deadline")


def set_write_deadline(until: float) -> None:
    """Says until when (on the event loop's clock) the client must have taken the answer of the
    current call. After that time, a message that cannot be sent ends the call."""
    _WRITE_DEADLINE.set(until)


@dataclass(frozen=True, slots=True)
class _Unary:
    call: Callable[[bytes, Context], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class _ServerStream:
    call: Callable[[bytes, Context], AsyncGenerator[Message]]


@dataclass(frozen=True, slots=True)
class _BothStream:
    call: Callable[[AsyncIterator[bytes], Context], AsyncGenerator[Message | bytes]]


Method = _Unary | _ServerStream | _BothStream


def unary(kind: type[Request], method: Callable[[Request, Context], Awaitable[Message]]) -> Method:
    """An rpc with one request and one reply."""
    return _Unary(lambda data, context: method(_decode(kind, data), context))


def server_stream(
    kind: type[Request], method: Callable[[Request, Context], AsyncGenerator[Message]]
) -> Method:
    """An rpc with one request and a stream of replies."""
    return _ServerStream(lambda data, context: method(_decode(kind, data), context))


def both_stream(
    kind: type[Request],
    method: Callable[[AsyncIterator[Request], Context], AsyncGenerator[Message | bytes]],
) -> Method:
    """An rpc with a stream of requests and a stream of replies, which may be serialised."""
    return _BothStream(
        lambda frames, context: method((_decode(kind, data) async for data in frames), context)
    )


@dataclass(frozen=True, slots=True)
class Service:
    """A service of a .proto file, and what answers its rpcs, by name."""

    descriptor: ServiceDescriptor
    methods: Mapping[str, Method]

    def __post_init__(self) -> None:
        names = {method.name for method in self.descriptor.methods}
        check(names == {*self.methods}, f"the rpcs of {self.descriptor.full_name} are {names}")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how a server listens."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 = any free port
    reflection: bool = True
    credentials: grpc.ServerCredentials | None = None  # credentials for TLS; None = no TLS
    shares_port: bool = False  # whether a later server may take over the port
    takes_over: bool = False  # whether to take over the port of a server with `shares_port`
    connection_age_ms: int | None = None
    """A connection of this age takes no new calls, so that the client connects again, perhaps to
    another server. None = no limit."""
    guard: Guard | None = None  # checks each call; None = all callers may call every method


class RpcServer(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A grpc.aio server with the health service (overall and per service) and, if configured,
    reflection. The health is NOT_SERVING until `set_serving(True)`."""

    def __init__(self, services: Sequence[Service], options: ServerOptions | None = None) -> None:
        self._options = options or ServerOptions()
        names = [service.descriptor.full_name for service in services]
        self._health = _Health(names)
        served = [*services, self._health.service]
        if self._options.reflection:
            names += [_HEALTH.full_name, _REFLECTION.full_name]
            reflected = reflection.ReflectionServicer(names).ServerReflectionInfo
            info = both_stream(reflection_pb2.ServerReflectionRequest, reflected)
            served.append(Service(_REFLECTION, {"ServerReflectionInfo": info}))
        self._methods = {
            f"/{service.descriptor.full_name}/{method.name}": (method, service.methods[method.name])
            for service in served
            for method in service.descriptor.methods
        }
        self._server = grpc.aio.server(
            handlers=(weakref.proxy(self),),  # A reference cycle would keep a stopped server alive.
            options=server_options(
                shares_port=self._options.shares_port, age_ms=self._options.connection_age_ms
            ),
        )
        # A registered method has its own queue, so a flood of health checks delays no other call.
        for service in served:
            prefix, methods = service.descriptor.full_name, service.descriptor.methods
            handlers = {
                method.name: _handler(
                    weakref.proxy(self),
                    f"/{prefix}/{method.name}",
                    server_streaming=method.server_streaming,
                )
                for method in methods
            }
            self._server.add_registered_method_handlers(prefix, handlers)  # type: ignore[attr-defined]
        self._open = OpenCalls()
        self._port = 0

    @property
    def address(self) -> str:
        check(self._port > 0, "the server has not been started")
        return _join(self._options.host, self._port)

    async def start(self) -> int:
        """Starts to listen. Returns the port. Raises `ConfigError` if the address is not usable."""
        options = self._options
        address = _join(options.host, options.port)
        try:
            if options.port and not options.takes_over:
                check_port(options.host, options.port)
            if options.credentials is None:
                self._port = self._server.add_insecure_port(address)
            else:
                self._port = self._server.add_secure_port(address, options.credentials)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"cannot listen on {address}: the port is taken (use 0 for any free port), or the "
                "host is not an address of this machine"
            ) from error
        await self._server.start()
        return self._port

    async def set_serving(self, serving: bool) -> None:
        """Sets the health status of all services."""
        self._health.set(Serving.SERVING if serving else Serving.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Reports NOT_SERVING, takes no more calls, and ends running calls after `grace_s`."""
        self._health.set(Serving.NOT_SERVING)
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return _handler(self, details.method, server_streaming=False)  # an unknown method

    async def answer(self, path: str, frames: AsyncIterator[bytes], context: Context) -> bytes:
        """Answers a call. Returns the reply, or nothing if the method streams its replies. The call
        is counted until its client has taken the answer."""
        is_known = path in self._methods
        known, refusal = self._check(path, context)
        name = known or source(context.peer())
        counted = ExitStack()
        context.add_done_callback(lambda _: counted.close())  # type: ignore[arg-type]
        try:
            if known is None:
                stays = is_known and self._methods[path][0].server_streaming
                counted.enter_context(self._open.of_stranger(name, stays=stays))
            else:
                counted.enter_context(self._open.of_caller(name))
            if refusal is not None:
                raise refusal
            if is_known:
                return await self._call(path, None if known is None else frames, context, name)
        except grpc.aio.InternalError:  # The client has left.
            return b""
        except grpc.aio.BaseError:  # The call was aborted already.
            raise
        except Exception as error:  # noqa: BLE001 - the one place that maps every error
            await abort(context, error, path[1:].replace("/", "."))
        if not is_known:  # Not in `try`: on an ended call this raises, and `except` would log.
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
        return b""

    def _check(self, path: str, context: Context) -> tuple[str | None, Exception | None]:
        """Returns the answer of the guard, and the error that it raised."""
        if self._options.guard is None:
            return "", None
        try:
            return self._options.guard(path, context), None
        except Overloaded as error:  # A known caller, who is counted by address here.
            return "", error
        except Exception as error:  # noqa: BLE001 - `answer` raises it
            return None, error

    async def _call(
        self, path: str, frames: AsyncIterator[bytes] | None, context: Context, name: str
    ) -> bytes:
        """Makes a call of the caller `name`. Without `frames`, the request is an empty message."""
        about, method = self._methods[path]
        if isinstance(method, _BothStream):
            if frames is None:
                raise InvariantError(f"{path}: a guard let a stranger stream")
            await _write_all(method.call(frames, context), context.write)
            return b""
        data = b"" if frames is None else await self._message(path, frames, name)
        if len(data) > limits.GRPC_INLINE_BYTES:
            check_fields(data, about.input_type)
            await asyncio.sleep(0)  # Other calls go on between this and the decoding.
        if isinstance(method, _Unary):
            return (await method.call(data, context)).SerializeToString()
        async with _writing(context) as write:
            await _write_all(method.call(data, context), write)
        return b""

    async def _message(self, path: str, frames: AsyncIterator[bytes], name: str) -> bytes:
        read = _health_message if path.startswith(HEALTH_PATH) else self._open.message
        data = await read(frames, name)
        if data is None:
            raise BadRequest("message", "is missing")
        return data


async def _write_all(
    replies: AsyncGenerator[Message | bytes], write: Callable[[bytes], Awaitable[None]]
) -> None:
    # `aclosing` runs the iterator's `finally` as soon as the call ends.
    async with aclosing(replies):
        async for reply in replies:
            await write(reply if isinstance(reply, bytes) else reply.SerializeToString())


def _handler(
    server: RpcServer, path: str, *, server_streaming: bool
) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Every method is registered with a stream of requests, because gRPC would read a unary request
    before the guard is called. gRPC sends a unary reply and its status together."""

    async def answer(frames: AsyncIterator[bytes], context: Context) -> bytes:
        return await server.answer(path, frames, context)

    async def stream(frames: AsyncIterator[bytes], context: Context) -> None:
        await server.answer(path, frames, context)

    if server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    return grpc.stream_unary_rpc_method_handler(answer)


async def _health_message(frames: AsyncIterator[bytes], name: str) -> bytes | None:
    """Returns the message of a health check. Does not wait for other messages of the caller, so
    that probes are answered. Raises `Overloaded` if the message arrives too late."""
    try:
        async with asyncio.timeout(limits.HEALTH_MESSAGE_S_MAX):
            return await anext(aiter(frames), None)
    except TimeoutError:
        raise Overloaded(
            f"the message did not arrive within {limits.HEALTH_MESSAGE_S_MAX} s",
            limit="message_arrival",
        ) from None


@asynccontextmanager
async def _writing(context: Context) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Yields a function that sends a message of an answer. If the client does not take a message in
    time, the current task is cancelled, and the context raises an error."""
    scope = asyncio.timeout(None)
    writer = _Writer(context, scope)
    try:
        async with scope:
            yield writer.write
    except TimeoutError:
        if not scope.expired():
            raise
        raise writer.late() from None
    finally:
        writer.close()


class _Writer:
    """Sends the messages of an answer. One timer serves many messages."""

    def __init__(self, context: Context, scope: asyncio.Timeout) -> None:
        self._context = context
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._has_begun = False
        self._due = math.inf
        """When the client must have taken the current message; infinity between messages."""
        self._timer: asyncio.TimerHandle | None = None
        """Calls `_look` not after `_due`."""
        self._late: OutriderError | None = None
        """Set while `_scope` is about to cancel the task."""

    async def write(self, data: bytes) -> None:
        if not self._has_begun:  # Together with a message that is not taken, no status can be sent.
            await self._context.send_initial_metadata(())
            self._has_begun = True
        stuck_at = self._loop.time() + limits.GRPC_STUCK_WRITE_S
        self._due = min(_WRITE_DEADLINE.get(math.inf), stuck_at)
        if self._timer is None or self._timer.when() > self._due:
            self.close()
            self._timer = self._loop.call_at(self._due, self._look)
        try:
            await self._context.write(data)
        finally:
            self._due = math.inf
        if self._late is not None:  # The message was taken at the last moment.
            self._late = None
            self._scope.reschedule(None)

    def _look(self) -> None:
        self._timer = None
        if self._due <= self._loop.time():
            self._late = self._error()
            self._scope.reschedule(self._due)
        elif self._due < math.inf:
            self._timer = self._loop.call_at(self._due, self._look)

    def late(self) -> OutriderError:
        """The error of a client that has not taken a message in time."""
        return self._late or self._error()

    def _error(self) -> OutriderError:
        if _WRITE_DEADLINE.get(math.inf) <= self._due:
            return DeadlineExceeded("deadline_ms: the client did not take the answer in time")
        return Unavailable(f"the client took no data for {limits.GRPC_STUCK_WRITE_S} s")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Health:
    """The health service. All services of a server have the same status."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = ("", *names)
        self._status: int = Serving.NOT_SERVING
        self._changed = asyncio.Event()

    @property
    def service(self) -> Service:
        methods = {
            "Check": unary(health_pb2.HealthCheckRequest, self.check),
            "List": unary(health_pb2.HealthListRequest, self.list),
            "Watch": server_stream(health_pb2.HealthCheckRequest, self.watch),
        }
        return Service(_HEALTH, methods)

    def set(self, status: int) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Message:
        if request.service not in self._names:
            raise NotFound(f"service: {request.service[:256]!r} is not served")
        response: Message = health_pb2.HealthCheckResponse(status=self._status)
        return response

    async def list(self, request: health_pb2.HealthListRequest, context: Context) -> Message:
        status = health_pb2.HealthCheckResponse(status=self._status)
        statuses = dict.fromkeys(self._names, status)
        response: Message = health_pb2.HealthListResponse(statuses=statuses)
        return response

    async def watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[Message]:
        """Yields the status now and after each change."""
        while True:
            changed, status = self._changed, self._status
            if request.service not in self._names:
                status = Serving.SERVICE_UNKNOWN
            yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _decode(kind: type[Request], data: bytes) -> Request:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise BadRequest(
            "message", f"these {len(data)} bytes are not a {message.DESCRIPTOR.full_name}"
        ) from error
    return message


def check_port(host: str, port: int) -> None:
    """Raises `OSError` if another server listens on `port` at an address of `host`. Binds each
    address for a moment without SO_REUSEPORT, because two servers that both set this option share a
    port without an error. Ignores other reasons why binding fails."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return
    for family, *_, address in addresses:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # Like the server, allows a port that has connections in TIME_WAIT.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
