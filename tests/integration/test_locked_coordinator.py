"""Coordinators that require API keys: all methods, tenants, and limits that they share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.auth.access_control import AccessControl, RedisSlots, watch_keys
from coordinator.http_api.server import HttpOptions
from outrider.client import Client, Finished, GenerateRequest, SamplingParams, Started
from outrider.config.emulated_spec import EmulatedSpec
from outrider.errors import NotFound, Overloaded, Unauthenticated, Unavailable
from outrider.foundation.api_keys import Caller, add_key
from outrider.limits import SLOT_RETRY_MS
from outrider.redis.address import RedisAddress
from outrider.speculation.sampling_params import Rule
from outrider.transport.channel import PLAIN, open_channel
from outrider.transport.server import ServerOptions
from outrider.v1 import coordinator_pb2 as pb
from tests.support.bare_http2 import bare_connection
from tests.support.rpc_codes import code_of
from tests.support.stack import Stack, coordinator_api, emulated_stack, http_front, serve

SPEC = EmulatedSpec(vocab_size=64, support=8, max_model_len=4096, verify_ms=10.0)
GREEDY = SamplingParams(temperature=0.0)
SHORT = GenerateRequest((1, 2, 3), max_tokens=4, sampling=GREEDY)
LONG = GenerateRequest((1, 2, 3), max_tokens=4000, sampling=GREEDY)
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
LONG_BODY: dict[str, Any] = {**BODY, "max_tokens": 4000}
WAIT_S = 20.0


class Locked:
    """Two gRPC and two HTTP servers of one coordinator, whose access controls share only Redis."""

    def __init__(self, stack: Stack, file: Path) -> None:
        self.stack, self.file = stack, file
        self.redis = RedisAddress(url=stack.redis.url, key_prefix="outrider:")
        callers = (
            Caller("alice", "team"),
            Caller("bob", "team"),
            Caller("eve", "eve"),
            Caller("root", "root", admin=True),
            Caller("two", "two", concurrency=2),
            Caller("three", "two", concurrency=3),
            Caller("slow", "slow", requests_per_minute=3),
        )
        self.keys = {caller.name: add_key(file, caller) for caller in callers}
        self.addresses: list[str] = []
        self.urls: list[str] = []

    def access(self, exits: AsyncExitStack) -> AccessControl:
        access = AccessControl(watch_keys(self.file), RedisSlots(self.redis))
        exits.push_async_callback(access.close)
        return access

    def client(self, name: str, server: int = 0) -> Client:
        return Client(self.addresses[server], api_key=self.keys[name], resume_timeout_s=0)

    def http(self, name: str, server: int = 0) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        return httpx.AsyncClient(base_url=self.urls[server], headers=headers, timeout=WAIT_S)


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Locked]:
    async with (
        emulated_stack(tmp_path / "redis", SPEC, resume_grace_ms=5_000) as stack,
        AsyncExitStack() as exits,
    ):
        found = Locked(stack, tmp_path / "keys")
        for _ in range(2):
            access = found.access(exits)
            api = coordinator_api(stack.coordinator, access)
            server = await serve(exits, api, ServerOptions(guard=access.check_call))
            found.addresses.append(server.address)
            front = http_front(stack, HttpOptions(access=found.access(exits)))
            found.urls.append(await exits.enter_async_context(front))
        yield found


async def methods_of(channel: Any, key: str) -> list[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask(**fields: str) -> Any:
        call = stub.ServerReflectionInfo(metadata=(("authorization", f"Bearer {key}"),))
        await call.write(reflection_pb2.ServerReflectionRequest(**fields))
        await call.done_writing()
        return await call.read()

    found = []
    for service in (await ask(list_services="")).list_services_response.service:
        answer = await ask(file_containing_symbol=service.name)
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(data)
            for one in file.service:
                if f"{file.package}.{one.name}" == service.name:
                    found += [f"/{service.name}/{method.name}" for method in one.method]
    return found


async def test_no_method_answers_without_a_key(locked: Locked) -> None:
    key, wrong = locked.keys["alice"], locked.keys["alice"][:-2] + "xx"
    refused: list[tuple[tuple[str, str], ...]] = [
        (),
        (("authorization", f"Bearer {wrong}"),),
        (("authorization", key),),
        (("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")),
    ]
    address, bearer = locked.addresses[0], (("authorization", f"Bearer {key}"),)
    async with open_channel(address) as channel:
        methods = await methods_of(channel, key)
    exempt = {path for path in methods if path.startswith(f"/{health.SERVICE_NAME}/")}
    assert len(methods) >= 8
    assert {path.rpartition("/")[2] for path in exempt} >= {"Check", "Watch"}
    for path in methods:
        for metadata in refused:
            code = await code_of(address, PLAIN, path, metadata)
            is_refused = code is grpc.StatusCode.UNAUTHENTICATED
            assert is_refused == (path not in exempt), (path, metadata)
        let_in = await code_of(address, PLAIN, path, bearer)
        assert let_in is not grpc.StatusCode.UNAUTHENTICATED, path
    for metadata, expected in (
        ((), grpc.StatusCode.UNAUTHENTICATED),
        (bearer, grpc.StatusCode.UNIMPLEMENTED),
    ):
        assert await code_of(address, PLAIN, "/outrider.v1.Other/Nothing", metadata) is expected
    assert locked.stack.coordinator.num_running == 0


async def test_another_tenants_session_is_not_found(locked: Locked) -> None:
    async with (
        locked.client("alice") as alice,
        locked.client("bob") as bob,
        locked.client("eve") as eve,
        locked.client("root") as root,
    ):
        async with aclosing(alice.generate(LONG)) as events:
            started = await anext(events)
            await anext(events)
            session_id = started.session_id
            for call in (eve.get_session, eve.cancel, lambda one: anext(eve.resume(one))):
                with pytest.raises(NotFound, match=f"there is no session {session_id}"):
                    await call(session_id)
            assert (await bob.get_session(session_id)).prompt_length == 3
            assert (await root.get_session(session_id)).prompt_length == 3
            with pytest.raises(NotFound):
                await anext(root.resume(session_id))
            await root.cancel(session_id)
            last = [event async for event in events][-1]
        assert last.finish_reason == "cancelled"
        done = await alice.complete(SHORT)
        view = await bob.get_session(done.session_id)
        assert view.token_ids == (1, 2, 3, *done.token_ids)
        assert (view.state, view.finish_reason) == ("finished", "length")
        with pytest.raises(NotFound):
            await anext(eve.resume(done.session_id))
        again = [event async for event in bob.resume(done.session_id)]
        assert isinstance(again[-1], Finished)
    # The stored tenant is that of the key.
    assert (await locked.stack.coordinator.streams.session(done.session_id, None)).tenant == "team"


async def post(http: httpx.AsyncClient, body: dict[str, Any], **more: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={**body, **more})


async def room(http: httpx.AsyncClient, n: int = 1) -> None:
    """Returns once the caller may run `n` more generations."""
    async with asyncio.timeout(WAIT_S):
        while (await post(http, BODY, n=n)).status_code == 429:
            await asyncio.sleep(0.02)


async def test_as_many_run_at_a_time_as_the_key_allows(locked: Locked) -> None:
    async with (
        locked.http("three", 0) as first,
        locked.http("three", 1) as second,
        locked.http("eve", 1) as other,
        locked.client("three") as grpc,
        locked.client("three", 1) as other_grpc,
    ):
        stream = first.stream("POST", "/v1/completions", json={**LONG_BODY, "n": 2, "stream": True})
        async with stream as response, aclosing(grpc.generate(LONG)) as events:
            assert response.status_code == 200
            left = response.aiter_lines()
            await anext(left)
            await anext(events)
            for http in (first, second):
                found = await post(http, BODY)
                assert found.status_code == 429
                assert found.headers["retry-after"] == str(SLOT_RETRY_MS // 1000)
                message = found.json()["error"]["message"]
                assert message.endswith("3 generations at a time; there is no room for 1 more now")
            for client in (grpc, other_grpc):
                with pytest.raises(Overloaded, match="'three' may run 3 generations") as caught:
                    await client.complete(SHORT)
                assert caught.value.retry_after_ms == SLOT_RETRY_MS
            assert (await post(other, BODY)).status_code == 200
            await response.aclose()
            await room(second)
            found = await post(second, BODY, n=3)  # One generation still runs by gRPC.
            assert found.status_code == 429
            assert found.json()["error"]["message"].endswith("no room for 3 more now")
            assert (await post(second, BODY, n=2)).status_code == 200
        await room(first, 3)  # The gRPC client has left its stream.
        for _ in range(10):  # Without a pause between requests, each finds free slots.
            assert (await post(first, BODY, n=3)).status_code == 200
            assert (await post(second, BODY, stream=True)).status_code == 200
            await grpc.complete(SHORT)


async def test_the_slots_of_a_dead_coordinator_are_free_again(
    locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living coordinator renews its slots. A resumed session uses the slot that it had."""
    monkeypatch.setattr("outrider.limits.SLOT_LEASE_MS", 2000)
    monkeypatch.setattr("outrider.limits.SLOT_RENEWAL_MS", 200)
    caller = Caller("three", "t", concurrency=2)
    async with AsyncExitStack() as exits:
        living, dead = (AccessControl(None, RedisSlots(locked.redis)) for _ in range(2))
        exits.push_async_callback(living.close)
        exits.push_async_callback(dead.close)
        grant = await exits.enter_async_context(living.admit(caller))
        await grant.note(Started("5" * 32, "model", 1, Rule.GREEDY))
        await exits.enter_async_context(dead.admit(caller))
        dead._renewing.cancel()
        with pytest.raises(Overloaded):
            async with living.admit(caller):
                pass
        async with dead.admit(caller, resumes=["5" * 32]):
            dead._renewing.cancel()
        await asyncio.sleep(3.0)
        async with living.admit(caller):
            with pytest.raises(Overloaded):  # The living coordinator has renewed its own slot.
                async with living.admit(caller):
                    pass


async def test_as_many_begin_in_a_minute_as_the_key_allows(locked: Locked) -> None:
    async with (
        locked.http("slow", 0) as first,
        locked.http("slow", 1) as second,
        locked.client("slow") as grpc,
    ):
        assert (await post(first, BODY, n=4)).status_code == 200
        assert (await post(second, BODY, stream=True)).status_code == 200
        session_id = (await grpc.complete(SHORT)).session_id
        for http in (first, second):
            found = await post(http, BODY)
            assert found.status_code == 429
            assert 15 <= int(found.headers["retry-after"]) <= 20
        for call in (grpc.complete(SHORT), grpc.get_session(session_id)):
            with pytest.raises(Overloaded, match="'slow' may make 3 requests a minute") as caught:
                await call
            assert 15_000 < caught.value.retry_after_ms <= 20_000
        for _ in range(3):
            assert [event async for event in grpc.resume(session_id)]
        with pytest.raises(Overloaded, match="3 requests a minute"):
            await anext(grpc.resume(session_id))


async def test_a_caller_reads_few_sessions_at_a_time(
    locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.grpc_api.RECORD_READS_MAX", 2)
    coordinator = locked.stack.coordinator
    read, go_on, num_reading = coordinator.streams.session, asyncio.Event(), 0

    async def read_slowly(session_id: str, tenant: str | None = "") -> Any:
        nonlocal num_reading
        num_reading += 1
        if tenant == "team":
            await go_on.wait()
        return await read(session_id, tenant)

    async with locked.client("alice") as alice, locked.client("eve") as eve:
        session_id = (await alice.complete(SHORT)).session_id
        other_id = (await eve.complete(SHORT)).session_id
        monkeypatch.setattr(coordinator.streams, "session", read_slowly)
        reading = [asyncio.create_task(alice.get_session(session_id)) for _ in range(2)]
        while num_reading < 2:
            await asyncio.sleep(0.01)
        for refused in (alice.get_session(session_id), alice.cancel(session_id)):
            with pytest.raises(Overloaded, match="already reads 2 stored sessions") as caught:
                await refused
            assert caught.value.retry_after_ms > 0
        assert (await eve.get_session(other_id)).prompt_length == 3
        go_on.set()
        assert {view.prompt_length for view in await asyncio.gather(*reading)} == {3}


async def test_the_time_to_try_again_is_right(locked: Locked) -> None:
    caller = Caller("quick", "q", requests_per_minute=120)
    slots = RedisSlots(locked.redis)
    client = redis.asyncio.Redis.from_url(locked.redis.url)
    seconds, micros = await client.time()
    empty_ms = seconds * 1000 + micros / 1000 + 60_000
    await client.set("outrider:limit:{quick}:bucket", f"{empty_ms:.3f}")
    with pytest.raises(Overloaded) as caught:
        await slots.take(caller, [], 1)
    assert 300 < caught.value.retry_after_ms <= 500
    await asyncio.sleep(caught.value.retry_after_ms / 1e3)
    await slots.take(caller, [], 1)
    with pytest.raises(Overloaded):
        await slots.take(caller, [], 1)
    await client.aclose()
    await slots.close()


async def test_a_full_server_keeps_slots(locked: Locked) -> None:
    """Otherwise the slots of running generations would expire, and others could take them."""
    caller, slots = Caller("one", "o", concurrency=1), RedisSlots(locked.redis)
    client = redis.asyncio.Redis.from_url(locked.redis.url)
    await slots.take(caller, ["a"], 1)
    before = await client.zscore("outrider:limit:{one}:slots", "a")
    await client.config_set("maxmemory", 1)
    try:
        await asyncio.sleep(0.01)
        await slots.update({"one": (["a"], [])})
    finally:
        await client.config_set("maxmemory", 0)
    after = await client.zscore("outrider:limit:{one}:slots", "a")
    assert before is not None
    assert after is not None
    assert after > before
    await client.aclose()
    await slots.close()


async def test_resumptions_are_counted_once_also_those_of_unknown_sessions(locked: Locked) -> None:
    """The bucket may go into debt by as many requests as it has room for."""
    path = "/v1/sessions/cmpl-{}/resume"
    async with locked.http("slow") as client:
        answer = await client.post("/v1/completions", json=BODY)
        session_id = answer.json()["id"].removeprefix("cmpl-")
        for _ in range(4):
            assert (await client.post(path.format(session_id))).status_code == 200
        assert (await client.post(path.format("0" * 32))).status_code == 404
        refused = await client.post(path.format("1" * 32))
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)


async def test_without_redis_no_generation_begins(locked: Locked) -> None:
    async with locked.client("two") as client, locked.client("alice") as unlimited:
        await client.complete(SHORT)
        locked.stack.redis.stop()
        try:
            for one in (client, unlimited):
                with pytest.raises(Unavailable) as caught:
                    await one.complete(SHORT)
                assert caught.value.retry_after_ms > 0
            async with Client(locked.addresses[0], api_key="wrong-key-123456") as stranger:
                with pytest.raises(Unauthenticated):
                    await stranger.describe()
        finally:
            locked.stack.redis.start()
        await client.complete(SHORT)


async def test_calls_without_a_key_take_no_room_from_others(
    locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.limits.STRANGER_CALLS_PER_ADDRESS_MAX", 2)
    async with open_channel(locked.addresses[0]) as channel, locked.client("alice") as alice:
        watch = channel.unary_stream(f"/{health.SERVICE_NAME}/Watch", None, None)
        calls = [watch(b"") for _ in range(2)]
        for call in calls:
            await call.read()

        async def is_let_in(**metadata: str) -> bool:
            call = watch(b"", metadata=tuple(metadata.items()))
            with suppress(grpc.aio.AioRpcError):
                await call.read()
                return True
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False

        assert not await is_let_in()
        assert not await is_let_in(authorization="Bearer wrong")
        assert await is_let_in(authorization=f"Bearer {locked.keys['alice']}")
        assert (await alice.complete(SHORT)).token_ids
        calls[0].cancel()
        async with asyncio.timeout(5):
            while not await is_let_in():
                await asyncio.sleep(0.02)


async def test_a_session_ends_at_its_deadline_though_its_client_takes_no_data(
    locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.grpc_api.SLOW_CLIENT_S", 0.1)
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), max_tokens=4000, ignore_eos=True, deadline_ms=3000
    )
    coordinator = locked.stack.coordinator
    async with bare_connection(locked.addresses[0], window=0) as bare, asyncio.timeout(WAIT_S):
        stream = bare.call("/outrider.v1.Coordinator/Generate", locked.keys["alice"])
        bare.send(stream, asked.SerializeToString())
        while not coordinator.num_running:
            await asyncio.sleep(0.01)
        while coordinator.num_running:
            await asyncio.sleep(0.01)
