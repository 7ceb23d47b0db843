"""Time limits of HTTP connections, and their number: sockets that send nothing, or little."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from made_certificates import Made
from test_http_server import WAIT_S, Service, serving, trusting
from told_coordinator import FINISHED, STARTED
from uvicorn.server import ServerState

from coordinator.auth.access_control import access_control_of
from coordinator.http_api.server import HttpConnection, OpenConnections, TlsFiles
from outrider.request import Event

KEY = "0123456789abcdef0123"
GATE = access_control_of(KEY, "")
HEADERS = f"host: localhost\r\nauthorization: Bearer {KEY}\r\n".encode()
GET = b"GET /version HTTP/1.1\r\n" + HEADERS + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + b"content-type: application/json\r\n"
BODY = b'{"prompt": [1]}'
NUM_PLACES = 20
HEADERS_S = 0.5
LATE_S = 3.0
"""By then a limit of half a second has been met, on a busy machine, too."""

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.http_api.server.HTTP_CONNECTIONS_MAX", NUM_PLACES)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for headers."""
    monkeypatch.setattr("coordinator.http_api.server.HTTP_HEADERS_S", HEADERS_S)


@asynccontextmanager
async def connected(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Pair]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status(pair: Pair, request: bytes = GET) -> int:
    """Of one request; the connection stays open."""
    reader, writer = pair
    async with asyncio.timeout(WAIT_S):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        await reader.readexactly(length)
    return int(head.split()[1])


async def closed_after(pair: Pair, send: Callable[[int], bytes] = lambda _: b"") -> float:
    """Seconds until the server closes it, while the client sends a part each tenth of a second."""
    reader, writer = pair
    began = time.monotonic()

    async def trickle() -> None:
        with contextlib.suppress(ConnectionError):
            for index in range(int(WAIT_S * 10)):
                writer.write(send(index))
                await writer.drain()
                await asyncio.sleep(0.1)

    sending = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                while await reader.read(65_536):
                    pass
    finally:
        sending.cancel()
    return time.monotonic() - began


@pytest.mark.parametrize("encrypted", [False, True])
async def test_silent_sockets_keep_no_caller_out(tmp_path: Path, encrypted: bool) -> None:
    """As many as there are places, and twice as many: they make room for callers, and one that is
    between two requests goes after them. With TLS they have not even begun their handshake."""
    tls = context = None
    if encrypted:
        own = Made(tmp_path, "own", "127.0.0.1")
        tls, context = TlsFiles(own.file, own.key_file), trusting(own.file)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(Service(), tls, access=GATE))
        kept = await stack.enter_async_context(connected(port, context))
        assert await status(kept) == 200
        for _ in range(2):
            for _ in range(NUM_PLACES):
                await stack.enter_async_context(connected(port))
            for _ in range(3):
                async with connected(port, context) as pair:
                    assert await status(pair) == 200
                    assert await status(pair, POST + b"content-length: 15\r\n\r\n" + BODY) == 200
            assert await status(kept) == 200


async def test_a_burst_takes_few_descriptors_beyond_its_places() -> None:
    """Those that come at once are accepted a few at a time, and make room between."""
    async with serving(Service(), access=GATE) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(10 * NUM_PLACES):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            before = most = len(os.listdir("/dev/fd"))
            for _ in range(100):
                await asyncio.sleep(0)
                most = max(most, len(os.listdir("/dev/fd")))
            async with connected(port) as pair:
                assert await status(pair) == 200
    assert NUM_PLACES <= most - before < 5 * NUM_PLACES


async def test_idle_connections_make_room(tmp_path: Path) -> None:
    """Where all places have been answered and are kept, the one idle for longest goes."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(Service(), access=GATE))
        idle = [await stack.enter_async_context(connected(port)) for _ in range(NUM_PLACES)]
        assert [await status(pair) for pair in idle] == [200] * NUM_PLACES
        assert await status(idle[0]) == 200
        new = await stack.enter_async_context(connected(port))
        assert await status(new) == 200
        assert await closed_after(idle[1]) < LATE_S
        assert [await status(pair) for pair in (idle[0], *idle[2:])] == [200] * (NUM_PLACES - 1)


async def test_requests_that_run_make_no_room() -> None:
    """Where all places run one, the next is refused, and the others get their answers."""
    go_on = asyncio.Event()

    class Waiting(Service):
        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Event]:
            self.num_told += 1
            yield STARTED
            await go_on.wait()
            yield FINISHED

    service = Waiting()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(service, access=GATE))
        request = POST + b"content-length: 15\r\n\r\n" + BODY
        running = []
        for _ in range(NUM_PLACES):
            pair = await stack.enter_async_context(connected(port))
            running.append(asyncio.create_task(status(pair, request)))
        async with asyncio.timeout(WAIT_S):
            while service.num_told < NUM_PLACES:
                await asyncio.sleep(0.01)
        async with connected(port) as pair:
            pair[1].write(GET)
            assert (await pair[0].readline()).startswith(b"HTTP/1.1 503 ")
        go_on.set()
        assert await asyncio.gather(*running) == [200] * NUM_PLACES


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_silent_socket_is_closed(tmp_path: Path, encrypted: bool) -> None:
    tls = None
    if encrypted:
        own = Made(tmp_path, "own", "127.0.0.1")
        tls = TlsFiles(own.file, own.key_file)
    async with serving(Service(), tls, access=GATE) as port, connected(port) as pair:
        assert HEADERS_S * 0.9 < await closed_after(pair) < LATE_S


@pytest.mark.usefixtures("short")
async def test_trickled_headers_are_not_waited_for() -> None:
    """Neither those of a first request, nor of a second; nor a body that nobody reads, nor empty
    lines."""
    async with serving(Service(), access=GATE) as port:
        async with connected(port) as pair:
            waited = await closed_after(pair, lambda index: GET[index : index + 1])
            assert HEADERS_S * 0.9 < waited < LATE_S
        async with connected(port) as pair:
            assert await status(pair) == 200
            assert await closed_after(pair, lambda index: GET[index : index + 1]) < LATE_S
        async with connected(port) as pair:
            assert await status(pair) == 200
            assert await closed_after(pair, lambda _: b"\r\n") < LATE_S
        async with connected(port) as pair:
            refused = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4000\r\n\r\n"
            assert await status(pair, refused) == 401
            assert await closed_after(pair, lambda _: b"{") < LATE_S


@pytest.mark.usefixtures("short")
async def test_a_connection_between_requests_stays() -> None:
    """The limit for headers is none for what comes before their first byte."""
    async with serving(Service(), access=GATE) as port, connected(port) as pair:
        for _ in range(2):
            assert await status(pair) == 200
            await asyncio.sleep(3 * HEADERS_S)
        assert await status(pair) == 200


async def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free long before the time for the whole body is over."""
    monkeypatch.setattr("coordinator.http_api.reading.HTTP_BODY_PART_S_MAX", HEADERS_S)
    async with serving(Service(), access=GATE) as port:
        async with connected(port) as pair:
            began = time.monotonic()
            assert await status(pair, POST + b"content-length: 15\r\n\r\n{") == 408
            assert time.monotonic() - began < LATE_S
            assert await closed_after(pair) < LATE_S
        async with connected(port) as pair:  # Parts that come are waited for.
            pair[1].write(POST + b"content-length: 15\r\n\r\n")
            for index in range(len(BODY) - 1):
                pair[1].write(BODY[index : index + 1])
                await asyncio.sleep(HEADERS_S / 10)
            assert await status(pair, BODY[-1:]) == 200


async def test_a_last_answer_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `Connection: close`, and with less to send than stops a writer."""
    monkeypatch.setattr("coordinator.http_api.server.HTTP_STUCK_WRITE_S", 0.2)
    size = 60_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})

    config = uvicorn.Config(app, lifespan="off", ws="none", loop="none", log_config=None)
    config.load()
    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(listening.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        accepted, _ = listening.accept()
        accepted.setblocking(False)
        connection = HttpConnection(config, ServerState(), OpenConnections())
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: connection, accepted)
        async with asyncio.timeout(5):
            while accepted.fileno() >= 0:
                await asyncio.sleep(0.02)
