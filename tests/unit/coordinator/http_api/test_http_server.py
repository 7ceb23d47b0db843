"""The server on real connections, with a coordinator that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from made_certificates import Made
from told_coordinator import FINISHED, STARTED, ToldCoordinator

from coordinator.auth.access_control import access_control_of
from coordinator.http_api.server import HttpOptions, HttpServer, TlsFiles
from outrider.api_keys import Caller, add_key
from outrider.request import Event, Tokens
from outrider.speculation.accept_reject import Origin

PIECE = "a" * 4096
WAIT_S = 20.0


class Service(ToldCoordinator):
    """It has as many pieces of text as it is told."""

    def __init__(self, num_pieces: int = 0) -> None:
        super().__init__()
        self.num_pieces = num_pieces
        self.num_told = 0
        self.closed = asyncio.Event()

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Event]:
        try:
            yield STARTED
            for index in range(self.num_pieces):
                await asyncio.sleep(0)  # As one that waits for its target.
                self.num_told = index + 1
                yield Tokens(index, (7,), PIECE, (Origin.BONUS,), ())
            yield FINISHED
        finally:
            self.closed.set()


@asynccontextmanager
async def serving(
    service: Service, tls: TlsFiles | None = None, **options: Any
) -> AsyncIterator[int]:
    """The port."""
    server = HttpServer(service, HttpOptions(tls=tls, **options))  # type: ignore[arg-type]
    await server.start()
    try:
        yield int(server.address.rpartition(":")[2])
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


@asynccontextmanager
async def streaming(
    port: int, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client with little room, which has asked for a stream and not read on."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(
        sock=client, limit=8192, ssl=context, server_hostname="127.0.0.1" if context else None
    )
    try:
        body = json.dumps({"prompt": [1], "stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no dual-stack IPv6 is here")
async def test_all_addresses_of_ipv6_are_those_of_ipv4_as_well() -> None:
    async with serving(Service(), host="::") as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_client_that_stops_reading_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """Its session ends, and its connection is broken off; that of one that reads slowly is not."""
    monkeypatch.setattr("coordinator.http_api.server.HTTP_STUCK_WRITE_S", 0.5)
    tls = context = None
    if encrypted:
        own = Made(tmp_path, "own", "127.0.0.1")
        tls, context = TlsFiles(own.file, own.key_file), trusting(own.file)
    num_pieces = 20_000  # More than the kernel has room for.
    service = Service(num_pieces)
    async with serving(service, tls) as port, streaming(port, context) as (reader, _):
        async with asyncio.timeout(WAIT_S):
            await service.closed.wait()
        assert 0 < service.num_told < num_pieces
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(num_pieces * len(PIECE))
    service = Service(1000)
    async with serving(service, tls) as port, streaming(port, context) as (reader, _):
        read = b""
        async with asyncio.timeout(WAIT_S):
            while b"data: [DONE]" not in read[-64:]:
                if len(read) % 7 == 0:
                    await asyncio.sleep(0.02)
                read += await reader.read(65_536)
        assert service.num_told == 1000


def put(source: Made, files: TlsFiles, authority: Made) -> None:
    """Replaces all files."""
    assert files.authority is not None
    for new, old in (
        (source.file, files.certificate),
        (source.key_file, files.key),
        (authority.file, files.authority),
    ):
        part = old.with_suffix(".part")
        shutil.copy(new, part)
        part.replace(old)


async def answered(port: int, context: ssl.SSLContext) -> bool:
    """Whether a new connection is served. Raises `SSLCertVerificationError` where the server shows
    what is not trusted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return (await reader.read()).startswith(b"HTTP/1.1 200 ")
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        writer.transport.abort()


async def test_a_new_certificate_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To whoever connects from then on, and callers are asked for one by the new authority; files
    that do not fit each other change nothing, and a connection that is there goes on."""
    monkeypatch.setattr("outrider.files.KEY_FILE_LOOK_MS", 0)
    old, new = (Made(tmp_path, f"{age} authority") for age in ("old", "new"))
    first, second = (
        Made(tmp_path, f"{age} server", "127.0.0.1", by=by)
        for age, by in (("old", old), ("new", new))
    )
    alice, bob = (Made(tmp_path, f"{name}", by=by) for name, by in (("alice", old), ("bob", new)))
    files = TlsFiles(tmp_path / "tls.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    put(first, files, old)
    async with serving(Service(), files) as port:
        assert await answered(port, trusting(old.file, shows=alice))
        assert not await answered(port, trusting(old.file, shows=bob))
        assert not await answered(port, trusting(old.file))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting(old.file, shows=alice)
        )
        shutil.copy(second.file, files.certificate)  # Its key is not there yet.
        assert await answered(port, trusting(old.file, shows=alice))
        assert "stays what it was" in caplog.text
        put(second, files, new)
        assert await answered(port, trusting(new.file, shows=bob))
        with pytest.raises(ssl.SSLCertVerificationError):
            await answered(port, trusting(old.file, shows=alice))
        assert not await answered(port, trusting(new.file, shows=alice))
        assert not await answered(port, trusting(new.file))
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()


async def statuses(port: int, *hosts: str) -> list[int]:
    """Of calls that name these hosts."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        return [
            (await http.get(path, headers={"host": host})).status_code
            for host in hosts
            for path in ("/version", "/")
        ]


async def test_a_web_page_whose_name_leads_here_is_refused(tmp_path: Path) -> None:
    """Without keys, on loopback, whatever it asks for; by its own names, on any port, a server is
    called as ever. With keys, or on an address that others reach, so it is by all names."""
    own = ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]")
    others = ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.2", "1", "::1")
    async with serving(Service()) as port:
        assert set(await statuses(port, *own)) == {200}
        assert set(await statuses(port, *others)) == {403}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            refused = await http.post("/v1/completions", headers={"host": "evil.example"})
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "permission_denied")
    async with serving(Service(), host="127.0.0.2") as port, httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.2:{port}/version")).status_code == 200
    add_key(tmp_path / "keys", Caller("alice", "alice"))
    locked = access_control_of("", str(tmp_path / "keys"))
    async with serving(Service(), access=locked) as port:
        assert await statuses(port, "evil.example") == [401, 200]
    async with serving(Service(), host="0.0.0.0") as port:  # noqa: S104
        assert await statuses(port, "evil.example") == [200, 200]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
async def test_a_name_with_an_address_of_ipv6_only_can_be_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = socket.getaddrinfo

    def lookup(host: Any, *others: Any, **more: Any) -> Any:
        return known("::1" if host == "only-ipv6.example" else host, *others, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    async with serving(Service(), host="only-ipv6.example") as port:
        _, writer = await asyncio.open_connection("::1", port)
        writer.close()
