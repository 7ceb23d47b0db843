"""TLS between users and a coordinator: which side checks which certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.auth.access_control import AccessControl, watch_keys
from coordinator.grpc_api import CoordinatorServicer
from outrider.client import Client, SyncClient, Trust, caller_trust
from outrider.errors import ConfigError, Unavailable
from outrider.foundation.api_keys import Caller, add_key
from outrider.transport.channel import PLAIN
from outrider.transport.server import ServerOptions
from outrider.transport.tls import pinned_trust, server_credentials
from outrider.v1 import coordinator_pb2 as pb
from tests.support.made_certificates import Made
from tests.support.stack import serve


class Described(CoordinatorServicer):
    """Tells only the model."""

    def __init__(self) -> None:
        pass

    async def describe(self, request: Any, context: Any) -> pb.CoordinatorDescription:
        return pb.CoordinatorDescription(model="model")


@asynccontextmanager
async def serving(credentials: Any, gate: AccessControl) -> AsyncIterator[str]:
    options = ServerOptions(credentials=credentials, guard=gate.check_call)
    async with AsyncExitStack() as exits:
        yield (await serve(exits, Described().grpc_service, options)).address


async def answers(address: str, trust: Trust, key: str) -> bool:
    """Whether a call is answered, checked with both kinds of client."""

    def blocking() -> str:
        with SyncClient(address, api_key=key, trust=trust) as client:
            return client.describe().model

    found = []
    async with Client(address, api_key=key, trust=trust) as client:
        for call in (client.describe, lambda: asyncio.to_thread(blocking)):
            try:
                found.append(bool(await call()))
            except Unavailable:
                found.append(False)
    assert found[0] == found[1]
    return found[0]


async def test_a_server_is_known_by_its_authority_and_its_host(tmp_path: Path) -> None:
    """A client that trusts another authority, or uses plain text, sends no key. Commands on the
    server's machine trust exactly its certificate, whatever host it names."""
    authority, stranger = Made(tmp_path, "authority"), Made(tmp_path, "stranger", "127.0.0.1")
    good = Made(tmp_path, "good", "127.0.0.1", by=authority)
    elsewhere = Made(tmp_path, "elsewhere", "*.example.org", "10.0.0.1", by=authority)
    key = add_key(tmp_path / "keys", Caller("a", "a"))
    keys = watch_keys(tmp_path / "keys")
    shown = server_credentials(good.file, good.key_file)
    async with serving(shown, AccessControl(keys)) as address:
        assert await answers(address, caller_trust(authority.file), key)
        assert await answers(address, pinned_trust(good.file), key)
        assert not await answers(address, caller_trust(stranger.file), key)
        assert not await answers(address, caller_trust(), key)
        assert not await answers(address, PLAIN, key)
    shown = server_credentials(elsewhere.file, elsewhere.key_file)
    async with serving(shown, AccessControl(keys)) as address:
        assert not await answers(address, caller_trust(authority.file), key)
        named = caller_trust(authority.file, server_name="a.example.org")
        assert await answers(address, named, key)
        assert await answers(address, pinned_trust(elsewhere.file), key)
        assert not await answers(address, pinned_trust(good.file), key)


async def test_a_server_may_ask_for_certificates_too(tmp_path: Path) -> None:
    own = Made(tmp_path, "own", "127.0.0.1")
    callers = Made(tmp_path, "callers")
    alice = Made(tmp_path, "alice", by=callers)
    mallory = Made(tmp_path, "mallory")
    credentials = server_credentials(own.file, own.key_file, callers.file)
    async with serving(credentials, AccessControl()) as address:
        assert await answers(address, caller_trust(own.file, alice.file, alice.key_file), "")
        assert not await answers(address, caller_trust(own.file), "")
        unknown = caller_trust(own.file, mallory.file, mallory.key_file)
        assert not await answers(address, unknown, "")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    one, two = Made(tmp_path, "one", "a"), Made(tmp_path, "two")
    with pytest.raises(ConfigError, match=r"key\.pem: holds no certificate"):
        caller_trust(one.key_file)
    with pytest.raises(ConfigError, match=r"two\.pem: names no host"):
        pinned_trust(two.file)
