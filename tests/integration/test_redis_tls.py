"""The Redis store over TLS, with a TLS end of ours before a real server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import free_port
from session_model import new_session

from outrider.errors import ConfigError
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_store import RedisStore

pytestmark = pytest.mark.xdist_group("redis")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a self-signed certificate for localhost, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: there is no certificate to test TLS with")
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(path), "-out", str(path.with_suffix(".crt"))],
        check=True, capture_output=True,
    )  # fmt: skip
    with path.open("a") as both:
        both.write(path.with_suffix(".crt").read_text())
    return path


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def test_tls_is_checked_against_the_given_authority(
    server: EmbeddedRedis, certificate: Path
) -> None:
    """A TLS end before the real server: with its authority it works, without it is refused."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    path = server.url.removeprefix("unix://")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, back_writer), pump(back_reader, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as proxy:
        url = f"rediss://localhost:{proxy.sockets[0].getsockname()[1]}/0"
        store = await RedisStore.connect(url, ca_file=str(certificate.with_suffix(".crt")))
        await store.open(new_session("e" * 32))
        await store.close()
        with pytest.raises(ConfigError, match="cannot be reached"):
            await RedisStore.connect(url)
        with pytest.raises(ConfigError, match="cannot be reached"):
            await RedisStore.connect(
                url.replace("localhost", "127.0.0.1"),
                ca_file=str(certificate.with_suffix(".crt")),
            )


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def watched(certificate: Path, tmp_path: Path) -> Iterator[str]:
    """The Sentinel's port of a server and a Sentinel that speak nothing but TLS."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: the bundled one has no TLS")
    ports = free_port(), free_port()
    secure = (
        f"port 0\ntls-cert-file {certificate}\ntls-key-file {certificate}\ntls-auth-clients no\n"
        f"tls-ca-cert-file {certificate.with_suffix('.crt')}\ntls-replication yes\n"
    )
    configs = (
        f"{secure}tls-port {ports[0]}\nmaxmemory-policy noeviction\n",
        f"{secure}tls-port {ports[1]}\nsentinel resolve-hostnames yes\n"
        f"sentinel announce-hostnames yes\nsentinel monitor chat localhost {ports[0]} 1\n",
    )
    running = []
    try:
        for name, config, *words in (("a", configs[0]), ("b", configs[1], "--sentinel")):
            (tmp_path / name).write_text(config)
            command = [program, str(tmp_path / name), *words]
            running.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL))
        for one, port in zip(running, ports, strict=True):
            while not _listens(port):
                if one.poll() is not None:
                    pytest.skip("redis-server is built without TLS")
                time.sleep(0.02)
        yield f"localhost:{ports[1]}"
    finally:
        for one in running:
            one.kill()
            one.wait()


async def test_sentinels_and_servers_are_reached_by_tls(watched: str, certificate: Path) -> None:
    """Both with the same authority, which is asked for."""
    url = f"rediss+sentinel://{watched}/chat"
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + 10
    while True:  # Until they answer, and Sentinel has heard of the server.
        try:
            store = await RedisStore.connect(url, ca_file=str(certificate.with_suffix(".crt")))
            break
        except ConfigError:
            if loop.time() > give_up_at:
                raise
            await asyncio.sleep(0.1)
    await store.open(new_session("e" * 32))
    await store.close()
    with pytest.raises(ConfigError, match="no Sentinel names a primary"):
        await RedisStore.connect(url)
