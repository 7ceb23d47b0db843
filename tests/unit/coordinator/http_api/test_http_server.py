"""The HTTP server with real connections, and a coordinator that gives prepared answers."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.auth.access_control import AccessControl, watch_keys
from coordinator.http_api.app import build_app
from coordinator.http_api.server import HttpOptions, HttpServer, OpenConnections, TlsFiles, _State
from outrider.client import Client
from outrider.config.deployment import load_config
from outrider.errors import ConfigError, SettingError
from outrider.fleet.preflight import check_ports
from outrider.foundation import refusals
from outrider.foundation.api_keys import given_keys
from outrider.interfaces.request import Event, Tokens
from outrider.limits import HTTP_LAST_REQUEST_S
from outrider.speculation.accept_reject import Origin
from outrider.transport.server import RpcServer, ServerOptions
from tests.support.made_certificates import Made
from tests.support.told_coordinator import FINISHED, STARTED, ToldCoordinator

PIECE = "a" * 4096
WAIT_S = 20.0
KEY = "0123456789abcdef0123"
ACCESS = AccessControl(watch_keys(None, given_keys(KEY)))
HEADERS = f"host: localhost\r\nauthorization: Bearer {KEY}\r\n".encode()
GET = b"GET /version HTTP/1.1\r\n" + HEADERS + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + b"content-type: application/json\r\n"
BODY = b'{"prompt": [1]}'
STREAM = b'{"prompt": [1], "stream": true}'
NUM_PLACES = 20
HEADERS_S = 0.5
LATE_S = 3.0
"""Time within which even a busy machine meets a limit of half a second."""
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Service(ToldCoordinator):
    """A coordinator whose answers have `num_pieces` pieces of text, and do not end before `go_on`
    is set."""

    def __init__(self, num_pieces: int = 0, go_on: asyncio.Event | None = None) -> None:
        super().__init__()
        self.num_pieces = num_pieces
        self.go_on = go_on
        self.num_begun = self.num_told = 0
        self.closed = asyncio.Event()

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Event]:
        self.num_begun += 1
        try:
            yield STARTED
            for index in range(self.num_pieces):
                await asyncio.sleep(0)  # A real coordinator waits for its target.
                self.num_told = index + 1
                yield Tokens(index, (7,), PIECE, (Origin.BONUS,), ())
            if self.go_on is not None:
                await self.go_on.wait()
            yield FINISHED
        finally:
            self.closed.set()


async def started(service: Service | None = None, **options: Any) -> tuple[Any, int]:
    """A server that has started, and its port."""
    made: Any = service or Service()
    server = HttpServer(HttpOptions(**options), build_app(made, HttpOptions(**options)))
    await server.start()
    return server, int(server.address.rpartition(":")[2])


@asynccontextmanager
async def serving(service: Service | None = None, **options: Any) -> AsyncIterator[int]:
    """Runs a server and yields its port."""
    server, port = await started(service, **options)
    try:
        yield port
    finally:
        async with asyncio.timeout(WAIT_S):
            await server.stop()


def trusting(*authorities: Path, shows: Made | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for one in authorities:
        context.load_verify_locations(one)
    if shows is not None:
        context.load_cert_chain(shows.file, shows.key_file)
    return context


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def encryption(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[TlsFiles | None, ssl.SSLContext | None]:
    """TLS of the server and of its clients."""
    if not request.param:
        return None, None
    own = Made(tmp_path, "own", "127.0.0.1")
    return TlsFiles(own.file, own.key_file), trusting(own.file)


@asynccontextmanager
async def connected(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Pair]:
    """A connection of a client with small buffers."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    host = "127.0.0.1" if context else None
    reader, writer = await asyncio.open_connection(
        sock=client, limit=8192, ssl=context, server_hostname=host
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def posted(body: bytes) -> bytes:
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


async def status(pair: Pair, request: bytes = GET) -> int:
    """The status of a request, after which the connection stays open."""
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
    """Seconds until the server closes the connection, while the client sends a part every 0.1 s."""
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


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no dual-stack IPv6 is here")
async def test_all_addresses_of_ipv6_are_those_of_ipv4_as_well() -> None:
    async with serving(host="::") as port, connected(port) as pair:
        assert await status(pair) == 200


async def test_a_client_that_stops_reading_is_given_up(
    monkeypatch: pytest.MonkeyPatch, encryption: Any
) -> None:
    monkeypatch.setattr("outrider.limits.HTTP_STUCK_WRITE_S", 0.5)
    tls, context = encryption
    num_pieces = 20_000  # More than the buffers of the kernel hold.
    service = Service(num_pieces)
    async with serving(service, tls=tls) as port, connected(port, context) as (reader, writer):
        writer.write(posted(STREAM))
        async with asyncio.timeout(WAIT_S):
            await service.closed.wait()
        assert 0 < service.num_told < num_pieces
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(num_pieces * len(PIECE))
    service = Service(1000)
    async with serving(service, tls=tls) as port, connected(port, context) as (reader, writer):
        writer.write(posted(STREAM))
        read = b""
        async with asyncio.timeout(WAIT_S):
            while b"data: [DONE]" not in read[-64:]:
                assert not reader.at_eof()
                if len(read) % 7 == 0:
                    await asyncio.sleep(0.02)
                read += await reader.read(65_536)
        assert service.num_told == 1000


async def answered(port: int, context: ssl.SSLContext) -> bool:
    """Whether a new connection is served."""
    try:
        async with connected(port, context) as pair:
            return await status(pair) == 200
    except (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
        return False


async def test_a_new_certificate_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So is a new authority. A certificate without its key changes nothing."""
    monkeypatch.setattr("outrider.foundation.files.KEY_FILE_CHECK_MS", 0)
    files = TlsFiles(tmp_path / "tls.pem", tmp_path / "key.pem", tmp_path / "ca.pem")

    def made(age: str) -> tuple[Made, Made, Made]:
        authority = Made(tmp_path, f"{age} authority")
        own = Made(tmp_path, f"{age} server", "127.0.0.1", by=authority)
        return own, authority, Made(tmp_path, f"{age} caller", by=authority)

    def put(own: Made, authority: Made) -> None:
        shutil.copy(own.file, files.certificate)
        shutil.copy(own.key_file, files.key)
        shutil.copy(authority.file, tmp_path / "ca.pem")

    (old, old_authority, alice), (new, new_authority, bob) = made("old"), made("new")
    by_alice = trusting(old_authority.file, new_authority.file, shows=alice)
    by_bob = trusting(new_authority.file, shows=bob)
    put(old, old_authority)
    async with serving(tls=files) as port, connected(port, by_alice) as pair:
        assert not await answered(port, trusting(old_authority.file))
        shutil.copy(new.file, files.certificate)  # The key of the new certificate is not there yet.
        assert await answered(port, by_alice)
        assert "keeping the former contents" in caplog.text
        put(new, new_authority)
        assert await answered(port, by_bob)
        assert not await answered(port, by_alice)
        assert await status(pair) == 200


async def statuses(port: int, *hosts: str) -> list[int]:
    """The statuses of calls with these `Host` headers."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        return [
            (await http.get(path, headers={"host": host})).status_code
            for host in hosts
            for path in ("/version", "/")
        ]


async def test_a_web_page_whose_name_leads_here_is_refused() -> None:
    """On loopback and without keys, `Host` must be a name of the server."""
    own = ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]")
    others = ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.2", "1", "::1")
    async with serving() as port:
        assert set(await statuses(port, *own)) == {200}
        assert set(await statuses(port, *others)) == {403}
    async with serving(host="127.0.0.2") as port, httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.2:{port}/version")).status_code == 200
    async with serving(access=ACCESS) as port:
        assert await statuses(port, "evil.example") == [401, 200]
    async with serving(host="0.0.0.0") as port:  # noqa: S104
        assert await statuses(port, "evil.example") == [200, 200]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A low maximum of connections."""
    monkeypatch.setattr("outrider.limits.HTTP_CONNECTIONS_MAX", NUM_PLACES)


@pytest.mark.usefixtures("few")
async def test_silent_sockets_keep_no_caller_out(encryption: Any) -> None:
    """There are twice as many as there may be connections. With TLS, they begin no handshake."""
    tls, context = encryption
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(tls=tls, access=ACCESS))
        kept = await stack.enter_async_context(connected(port, context))
        assert await status(kept) == 200
        for _ in range(2):
            for _ in range(NUM_PLACES):
                await stack.enter_async_context(connected(port))
            for _ in range(3):
                async with connected(port, context) as pair:
                    assert await status(pair, posted(BODY)) == 200
            assert await status(kept) == 200


@pytest.mark.usefixtures("few")
async def test_idle_connections_make_room_and_busy_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that has been idle for longest goes first."""
    monkeypatch.setattr(refusals, "REFUSALS", counted := Counter[str]())
    go_on = asyncio.Event()
    service = Service(go_on=go_on)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(service, access=ACCESS))
        pairs = [await stack.enter_async_context(connected(port)) for _ in range(NUM_PLACES)]
        assert [await status(pair) for pair in pairs] == [200] * NUM_PLACES
        assert await status(pairs[0]) == 200
        pairs.append(await stack.enter_async_context(connected(port)))
        assert await status(pairs[-1]) == 200
        assert await closed_after(pairs.pop(1)) < LATE_S
        running = [asyncio.create_task(status(pair, posted(BODY))) for pair in pairs]
        async with asyncio.timeout(WAIT_S):
            while service.num_begun < NUM_PLACES:
                await asyncio.sleep(0.01)
        async with connected(port) as pair:
            pair[1].write(GET)
            head = (await pair[0].readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 429 ")
            assert {b"connection: close", b"retry-after: 1"} <= {*head.split(b"\r\n")}
            error = json.loads(await pair[0].read())["error"]
            assert f"the server has {NUM_PLACES} connections" in error["message"]
            assert error["code"] == "server_full"
            assert counted == {"http_connections": 1}
        go_on.set()
        assert await asyncio.gather(*running) == [200] * NUM_PLACES


def test_room_is_made_at_once_among_thousands() -> None:
    """Most connections are idle. Looking at all of them for each new connection took 4 s of CPU
    time."""
    connections, num_broken = OpenConnections(8192), 0

    class Connection:
        def break_off(self) -> None:
            nonlocal num_broken
            num_broken += 1
            connections.leave(self)  # type: ignore[arg-type]

    def enter() -> None:
        connections.make_room()
        connections.enter(Connection(), _State.IDLE)  # type: ignore[arg-type]

    for _ in range(8192):
        enter()
    began = time.thread_time()
    for _ in range(8192):
        enter()
    assert time.thread_time() - began < 0.5
    assert (num_broken, len(connections)) == (8192, 8192)


@pytest.mark.usefixtures("few")
async def test_a_burst_takes_few_descriptors_beyond_its_places() -> None:
    """The server accepts few connections before it counts them."""
    async with serving(access=ACCESS) as port:
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


async def test_headers_that_do_not_come_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, encryption: Any
) -> None:
    """The server closes the connection. The same holds for a TLS handshake, the rest of an unread
    body, and empty lines. An idle connection stays open."""
    monkeypatch.setattr("outrider.limits.HTTP_HEADERS_S", HEADERS_S)
    tls, context = encryption
    refused = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4000\r\n\r\n"
    async with serving(tls=tls, access=ACCESS) as port:
        async with connected(port) as pair:
            assert HEADERS_S * 0.9 < await closed_after(pair) < LATE_S
        async with connected(port, context) as pair:
            assert await closed_after(pair, lambda index: GET[index : index + 1]) < LATE_S
        for part in (lambda index: GET[index : index + 1], lambda _: b"\r\n"):
            async with connected(port, context) as pair:
                assert await status(pair) == 200
                await asyncio.sleep(2 * HEADERS_S)
                assert await status(pair) == 200
                assert await closed_after(pair, part) < LATE_S
        async with connected(port, context) as pair:
            assert await status(pair, refused) == 401
            assert await closed_after(pair, lambda _: b"{") < LATE_S


async def test_a_request_may_come_with_the_end_of_the_handshake(tmp_path: Path) -> None:
    """The server decrypts it before it notices that the handshake has ended."""
    own = Made(tmp_path, "own", "127.0.0.1")
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(own.file).wrap_bio(received, sent, server_hostname="127.0.0.1")
    async with (
        asyncio.timeout(WAIT_S),
        serving(tls=TlsFiles(own.file, own.key_file)) as port,
        connected(port) as (reader, writer),
    ):

        async def attempt(call: Callable[[], Any]) -> Any:
            while True:
                try:
                    return call()
                except ssl.SSLWantReadError:
                    writer.write(sent.read())
                    received.write(await reader.read(65_536))

        await attempt(client.do_handshake)
        client.write(GET)
        assert (await attempt(lambda: client.read(12))) == b"HTTP/1.1 200"


async def test_one_grpc_server_takes_the_port_over_from_another() -> None:
    """Neither a server without `takes_over` nor another deployment can use the port."""
    old = RpcServer([], ServerOptions(shares_port=True))
    port = await old.start()
    await old.set_serving(True)
    new = RpcServer([], ServerOptions(port=port, shares_port=True, takes_over=True))
    assert await new.start() == port
    await new.set_serving(True)

    async def is_served() -> bool:
        """The server gets new connections."""
        found = []
        for _ in range(20):
            async with Client(new.address) as client:
                found.append(await client.healthy())
        return all(found)

    assert await is_served()
    for shares in (False, True):  # Another deployment's coordinator would share its own port, too.
        with pytest.raises(ConfigError, match="the port is taken"):
            await RpcServer([], ServerOptions(port=port, shares_port=shares)).start()
    with pytest.raises(SettingError, match="cannot listen on"):
        check_ports(load_config({"engine": "emulated:", "grpc_port": port}, {}))
    await old.stop()
    assert await is_served()
    await new.stop()


async def test_clients_notice_nothing_of_several_hand_overs() -> None:
    server, port = await started(shares_port=True)
    for shares in (False, True):
        with pytest.raises(ConfigError, match=r"cannot listen on .*Address already in use"):
            await started(port=port, shares_port=shares)
    over = asyncio.Event()

    async def ask_all_the_time(*, keeps: bool) -> int:
        num_asked = 0
        limits = httpx.Limits(max_keepalive_connections=1 if keeps else 0)
        async with httpx.AsyncClient(limits=limits) as client:
            while not over.is_set():
                assert (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
                num_asked += 1
        return num_asked

    asking = [asyncio.create_task(ask_all_the_time(keeps=index % 2 == 0)) for index in range(8)]
    for _ in range(6):
        old = server
        server, _ = await started(port=port, shares_port=True, takes_over=True)
        await asyncio.sleep(0.1)
        await old.stop(1.0)
    over.set()
    assert min(await asyncio.gather(*asking)) > 6
    await server.stop()


@pytest.mark.parametrize("shares_port", [False, True])
async def test_a_server_that_stops_answers_on_open_connections(shares_port: bool) -> None:
    """Also on a connection that was queued or idle when the server began to stop. The answer has
    `Connection: close`. Running requests end."""
    go_on = asyncio.Event()
    server, port = await started(Service(1, go_on), shares_port=shares_port)
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    silent, begun, used, stream = pairs
    begun[1].write(GET[:20])
    assert await status(used) == 200
    stream[1].write(posted(STREAM))
    await stream[0].readuntil(b"data: ")
    stopping = asyncio.create_task(server.stop(30.0))
    await asyncio.sleep(0.3)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)
    for (_, writer), left in ((silent, GET), (begun, GET[20:]), (used, GET)):
        writer.write(left)
    async with asyncio.timeout(WAIT_S):
        for reader, writer in (silent, begun, used):
            last = await reader.read()
            assert b"HTTP/1.1 200 OK" in last
            assert b"connection: close" in last.lower()
            writer.close()
        await asyncio.sleep(HTTP_LAST_REQUEST_S)
        assert not stopping.done()
        go_on.set()
        assert b"data: [DONE]" in await stream[0].read()
        stream[1].close()
        await stopping


async def test_requests_that_outlast_the_grace_are_told_why_they_end() -> None:
    """Also a request whose body has not arrived."""
    service = Service(1, asyncio.Event())
    server, port = await started(service)
    async with connected(port) as stream, connected(port) as whole, connected(port) as sending:
        for pair, body in ((stream, STREAM), (whole, BODY)):
            pair[1].write(posted(body))
        sending[1].write(posted(BODY)[:-1])
        async with asyncio.timeout(WAIT_S):
            await stream[0].readuntil(b"data: ")
            while service.num_begun < 2:
                await asyncio.sleep(0.01)
            await server.stop(0.05)
            assert b"shutting down" in await stream[0].read()
            for reader in (whole[0], sending[0]):
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"shutting down" in answer
