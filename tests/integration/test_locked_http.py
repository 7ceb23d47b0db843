"""Coordinators that ask for keys, by HTTP: limits that they share with each other and with gRPC,
and TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_front import http_front
from made_certificates import Made
from stack import Stack, running_stack

from coordinator.auth.access_control import AccessControl, KeyFile, KeyInterceptor
from coordinator.auth.rate_limits import Limiter, RedisSlots
from coordinator.grpc_api import CoordinatorServicer
from coordinator.http_api.server import HttpOptions, TlsFiles
from outrider.api_keys import Caller, add_key
from outrider.client import Client, GenerateRequest, SamplingParams
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.errors import NotFound, Overloaded
from outrider.limits import SLOT_RETRY_MS
from outrider.sessions.redis_address import RedisAddress
from outrider.transport.server import RpcServer, ServerOptions, Service
from outrider.v1 import coordinator_pb2

SPEC = EmulatedSpec(vocab_size=64, support=8, max_model_len=4096, verify_ms=10.0)
SHORT: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 4000}
BY_GRPC = GenerateRequest((1, 2, 3), max_tokens=4, sampling=SamplingParams(temperature=0.0))
LONG_BY_GRPC = GenerateRequest((1, 2, 3), max_tokens=4000, sampling=SamplingParams(temperature=0.0))
WAIT_S = 20.0


class Locked:
    """Two HTTP servers and a gRPC server of one coordinator, each behind a gate of its own: what
    they share is Redis."""

    def __init__(self, stack: Stack, file: Path) -> None:
        self.stack, self.file = stack, file
        self.keys = {
            name: add_key(file, caller)
            for name, caller in {
                "eve": Caller("eve", "eve"),
                "two": Caller("two", "two", concurrency=2),
                "three": Caller("three", "two", concurrency=3),
                "slow": Caller("slow", "slow", requests_per_minute=3),
            }.items()
        }
        self.urls: list[str] = []
        self.grpc_address = ""

    def gate(self, exits: AsyncExitStack) -> AccessControl:
        slots = RedisSlots(RedisAddress(url=self.stack.redis.url, key_prefix="outrider:"))
        gate = AccessControl(KeyFile(self.file, (), lambda: 0.0), Limiter(slots))
        exits.push_async_callback(gate.close)
        return gate

    def http(self, name: str, server: int = 0) -> httpx.AsyncClient:
        shown = {"authorization": f"Bearer {self.keys[name]}"}
        return httpx.AsyncClient(base_url=self.urls[server], headers=shown, timeout=WAIT_S)

    def grpc(self, name: str) -> Client:
        return Client(self.grpc_address, api_key=self.keys[name], resume_timeout_s=0)


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Locked]:
    target, draft = EmulatedEngine(SPEC, "target"), EmulatedEngine(SPEC, "draft")
    async with (
        running_stack(target, draft, tmp_path / "redis", resume_grace_s=5.0) as stack,
        AsyncExitStack() as exits,
    ):
        found = Locked(stack, tmp_path / "keys")
        for _ in range(2):
            options = HttpOptions(access=found.gate(exits))
            found.urls.append(await exits.enter_async_context(http_front(stack, options)))
        gate = found.gate(exits)
        descriptor: Any = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
        server = RpcServer(
            [Service(descriptor, CoordinatorServicer(stack.coordinator, gate))],
            ServerOptions(guards=(KeyInterceptor(gate),)),
        )
        await server.start()
        exits.push_async_callback(server.stop)
        await server.set_serving(True)
        found.grpc_address = server.address
        yield found


async def post(http: httpx.AsyncClient, body: dict[str, Any], **more: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={**body, **more})


async def room(http: httpx.AsyncClient, n: int = 1) -> None:
    """Returns once the caller may run `n` more."""
    async with asyncio.timeout(WAIT_S):
        while (await post(http, SHORT, n=n)).status_code == 429:
            await asyncio.sleep(0.02)


async def test_as_many_run_at_a_time_as_the_key_allows(locked: Locked) -> None:
    """At both servers and by gRPC together, each text of a request for several; a stream that its
    client leaves makes room, and so does one that ends."""
    async with (
        locked.http("three", 0) as first, locked.http("three", 1) as second,
        locked.http("eve", 1) as other, locked.grpc("three") as grpc,
    ):  # fmt: skip
        stream = first.stream("POST", "/v1/completions", json={**LONG, "n": 2, "stream": True})
        async with stream as response, aclosing(grpc.generate(LONG_BY_GRPC)) as events:
            assert response.status_code == 200
            left = response.aiter_lines()
            await anext(left)
            await anext(events)
            for http in (first, second):
                found = await post(http, SHORT)
                assert found.status_code == 429
                assert found.headers["retry-after"] == str(SLOT_RETRY_MS // 1000)
                message = found.json()["error"]["message"]
                assert message == "the key 'three' may run 3 generations at a time, and does"
            with pytest.raises(Overloaded, match="'three' may run 3 generations at a time"):
                await grpc.complete(BY_GRPC)
            assert (await post(other, SHORT)).status_code == 200
            await response.aclose()
            await room(second)
            found = await post(second, SHORT, n=3)  # By gRPC there runs one.
            assert found.status_code == 429
            assert found.json()["error"]["message"].endswith("and has no room for 3 more")
            assert (await post(second, SHORT, n=2)).status_code == 200
            async with asyncio.timeout(WAIT_S):
                while locked.stack.coordinator.num_running > 1:
                    await asyncio.sleep(0.02)
        await room(first, 3)  # The stream by gRPC has been left.
        for _ in range(10):  # One after the other, without a pause: each finds the place free.
            assert (await post(first, SHORT, n=3)).status_code == 200
            assert (await post(second, SHORT, stream=True)).status_code == 200
        errors = await asyncio.gather(*(post(first, SHORT, deadline_ms=1) for _ in range(3)))
        assert {found.status_code for found in errors} == {504}
        await asyncio.gather(room(first), room(second))


async def test_as_many_begin_in_a_minute_as_the_key_allows(locked: Locked) -> None:
    """By both servers and by gRPC together; several texts are one request."""
    async with (
        locked.http("slow", 0) as first, locked.http("slow", 1) as second,
        locked.grpc("slow") as grpc,
    ):  # fmt: skip
        assert (await post(first, SHORT, n=4)).status_code == 200
        assert (await post(second, SHORT, stream=True)).status_code == 200
        await grpc.complete(BY_GRPC)
        for http in (first, second):
            found = await post(http, SHORT)
            assert found.status_code == 429
            assert 15 <= int(found.headers["retry-after"]) <= 20
        with pytest.raises(Overloaded, match="3 requests a minute"):
            await grpc.complete(BY_GRPC)
        assert (await first.get("/v1/models")).status_code == 200  # That is not counted.


async def test_a_session_by_http_is_its_tenants_alone(locked: Locked) -> None:
    """Who knows its id from elsewhere can neither read nor cancel nor resume it by gRPC."""
    async with (
        locked.http("two") as http, locked.grpc("two") as own, locked.grpc("eve") as eve,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):  # fmt: skip
        read = response.aiter_lines()
        await anext(read)
        (session_id,) = locked.stack.coordinator._runs.session_ids
        for call in (eve.get_session, eve.cancel):
            with pytest.raises(NotFound, match="there is no session"):
                await call(session_id)
        with pytest.raises(NotFound, match="there is no session"):
            await anext(eve.resume(session_id))
        assert (await own.get_session(session_id)).prompt_length == 3
        await own.cancel(session_id)
        lines = [line async for line in read if line]
    assert '"stop_reason":"cancelled"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


async def test_a_server_with_a_certificate(locked: Locked, tmp_path: Path) -> None:
    """Who trusts its authority gets an answer, with the key inside; who trusts another, or calls in
    plain text, says nothing to it. One that asks callers for certificates takes no others."""
    authority, stranger = Made(tmp_path, "authority"), Made(tmp_path, "stranger")
    own = Made(tmp_path, "own", "127.0.0.1", by=authority)
    alice = Made(tmp_path, "alice", by=authority)
    mallory = Made(tmp_path, "mallory", by=stranger)
    shown = {"authorization": f"Bearer {locked.keys['eve']}"}

    async def answer(url: str, *trusted: Made, shows: Made | None = None) -> int:
        context = ssl.create_default_context(cafile=str(trusted[0].file)) if trusted else True
        if shows is not None and isinstance(context, ssl.SSLContext):
            context.load_cert_chain(shows.file, shows.key_file)
        async with httpx.AsyncClient(base_url=url, verify=context, headers=shown) as http:
            return (await post(http, SHORT)).status_code

    async with AsyncExitStack() as exits:
        for callers, good, bad in ((None, None, None), (authority.file, alice, mallory)):
            tls = TlsFiles(own.file, own.key_file, callers)
            options = HttpOptions(access=locked.gate(exits), tls=tls)
            plain = await exits.enter_async_context(http_front(locked.stack, options))
            url = plain.replace("http:", "https:")
            assert await answer(url, authority, shows=good) == 200
            for trusted in ((stranger,), ()):
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await answer(url, *trusted, shows=good)
            with pytest.raises(httpx.TransportError):
                await answer(plain)
            if bad is not None:
                for shows in (bad, None):
                    with pytest.raises(httpx.TransportError):
                        await answer(url, authority, shows=shows)
