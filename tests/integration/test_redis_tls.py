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
from made_certificates import Made
from redis_servers import free_port
from session_model import new_session

from outrider.errors import ConfigError
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_store import RedisStore

pytestmark = pytest.mark.xdist_group("redis")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """For localhost, signed by itself."""
    return Made(tmp_path_factory.mktemp("tls"), "localhost", "localhost")


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
    server: EmbeddedRedis, made: Made
) -> None:
    """A TLS end before the real server: with its authority it works, without it is refused."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.file, made.key_file)
    path = server.url.removeprefix("unix://")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, back_writer), pump(back_reader, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as proxy:
        url = f"rediss://localhost:{proxy.sockets[0].getsockname()[1]}/0"
        store = await RedisStore.connect(url, ca_file=str(made.file))
        await store.open(new_session("e" * 32))
        await store.close()
        with pytest.raises(ConfigError, match="cannot be reached"):
            await RedisStore.connect(url)
        with pytest.raises(ConfigError, match="cannot be reached"):
            await RedisStore.connect(
                url.replace("localhost", "127.0.0.1"),
                ca_file=str(made.file),
            )


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def watched(made: Made, tmp_path: Path) -> Iterator[str]:
    """The Sentinel's port of a server and a Sentinel that speak nothing but TLS."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: the bundled one has no TLS")
    ports = free_port(), free_port()
    secure = (
        f"port 0\ntls-cert-file {made.file}\ntls-key-file {made.key_file}\ntls-auth-clients no\n"
        f"tls-ca-cert-file {made.file}\ntls-replication yes\n"
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


async def test_sentinels_and_servers_are_reached_by_tls(watched: str, made: Made) -> None:
    """Both with the same authority, which is asked for."""
    url = f"rediss+sentinel://{watched}/chat"
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + 10
    while True:  # Until they answer, and Sentinel has heard of the server.
        try:
            store = await RedisStore.connect(url, ca_file=str(made.file))
            break
        except ConfigError:
            if loop.time() > give_up_at:
                raise
            await asyncio.sleep(0.1)
    await store.open(new_session("e" * 32))
    await store.close()
    with pytest.raises(ConfigError, match="no Sentinel names a primary"):
        await RedisStore.connect(url)
