"""The Redis store over TLS, with a TLS end of ours before a real server."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
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
