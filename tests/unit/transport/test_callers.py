"""What a caller can make a gRPC server hold."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.grpc_api import CoordinatorServicer
from outrider import limits
from outrider.errors import Overloaded, Unauthenticated
from outrider.foundation.clock import run_virtually
from outrider.foundation.refusals import REFUSALS
from outrider.transport.callers import OpenCalls, source
from outrider.transport.channel import open_channel
from outrider.transport.server import (
    HEALTH_PATH,
    Context,
    RpcServer,
    ServerOptions,
    Serving,
    set_write_deadline,
)
from outrider.v1 import coordinator_pb2 as pb
from tests.support.bare_http2 import bare_connection

CHECK, WATCH = f"{HEALTH_PATH}Check", f"{HEALTH_PATH}Watch"
DESCRIBE = "/outrider.v1.Coordinator/Describe"
GENERATE = "/outrider.v1.Coordinator/Generate"
COORDINATOR = pb.DESCRIPTOR.services_by_name["Coordinator"]
KEY = "alice"


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:10.0.0.7:5000", "10.0.0.7"),
        ("ipv6:[2001:db8::1:2:3:4]:5000", "2001:db8::/64"),
        ("ipv6:%5B2001:db8::9%5D:5000", "2001:db8::/64"),
        ("ipv6:[::ffff:10.0.0.7]:5000", "::ffff:10.0.0.7"),
        ("unix:/run/o.sock", "unix:/run/o.sock"),
    ],
)
def test_a_source_is_an_address_or_the_network_of_a_site(peer: str, expected: str) -> None:
    assert source(peer) == expected


def test_strangers_are_limited_by_address_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.limits.STRANGER_CALLS_PER_ADDRESS_MAX", 2)
    monkeypatch.setattr("outrider.limits.STRANGER_CALLS_MAX", 3)
    monkeypatch.setattr("outrider.limits.GRPC_CALLS_PER_CALLER_MAX", 1)
    calls = OpenCalls()
    with ExitStack() as counted:
        for address in ("a", "a", "b"):
            counted.enter_context(calls.of_stranger(address, stays=True))
        for address in ("a", "b", "c"):
            with pytest.raises(Overloaded, match="at most 2 of an address, and 3 watches in all"):
                counted.enter_context(calls.of_stranger(address, stays=True))
        for address in ("a", "a", "b", "b", "c"):  # Watches keep no probe from its answer.
            counted.enter_context(calls.of_stranger(address))
        with pytest.raises(Overloaded, match="at most 2 of an address"):
            counted.enter_context(calls.of_stranger("a"))
        for name in ("alice", "bob"):
            counted.enter_context(calls.of_caller(name))
        with pytest.raises(Overloaded, match="has 1 calls open"):
            counted.enter_context(calls.of_caller("alice"))
    with calls.of_stranger("a"), calls.of_caller("alice"):
        pass


def test_few_messages_of_a_caller_arrive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait their turn, but no longer than a message may take. Other callers do not wait."""
    monkeypatch.setattr("outrider.limits.GRPC_MESSAGES_AWAITED_MAX", 2)
    begun: list[str] = []

    async def frames(name: str, seconds: float) -> AsyncIterator[bytes]:
        begun.append(name)
        await asyncio.sleep(seconds)
        yield name.encode()

    async def main() -> None:
        calls, loop = OpenCalls(), asyncio.get_running_loop()
        start = loop.time()
        slow = [
            asyncio.create_task(calls.message(frames(f"slow{index}", 50 + index), "mallory"))
            for index in range(2)
        ]
        third = asyncio.create_task(calls.message(frames("third", 1), "mallory"))
        late = asyncio.create_task(calls.message(frames("late", 99), "mallory"))
        await asyncio.sleep(0)
        assert await calls.message(frames("quick", 0), "alice") == b"quick"
        assert begun == ["slow0", "slow1", "quick"]
        assert await asyncio.gather(*slow, third) == [b"slow0", b"slow1", b"third"]
        with pytest.raises(Overloaded, match="did not arrive within 60 s"):
            await late
        assert loop.time() - start == 60

    run_virtually(main())


class Told(CoordinatorServicer):
    """A servicer whose generations tell an event every 10 ms until they are left."""

    pause_s = 0.01

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.num_running = 0

    async def describe(self, request: Any, context: Context) -> pb.CoordinatorDescription:
        return pb.CoordinatorDescription(model="toy")

    async def generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateEvent]:
        set_write_deadline(asyncio.get_running_loop().time() + self.seconds)
        self.num_running += 1
        try:
            while True:
                yield pb.GenerateEvent(started=pb.Started(model="toy"))
                await asyncio.sleep(self.pause_s)
        finally:
            self.num_running -= 1

    resume = cancel = get_session = describe


def guard(path: str, context: Context) -> str | None:
    shown = dict(context.invocation_metadata() or ()).get("authorization")
    if shown == f"Bearer {KEY}":
        return KEY
    if path.startswith(HEALTH_PATH):
        return None
    raise Unauthenticated("no key")


@pytest.fixture
async def told() -> Told:
    return Told()


@pytest.fixture
async def address(told: Told) -> AsyncIterator[str]:
    server = RpcServer([told.grpc_service], ServerOptions(guard=guard, reflection=False))
    await server.start()
    await server.set_serving(True)
    yield server.address
    await server.stop()


async def test_a_known_caller_beyond_its_rate_is_no_stranger(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.limits.STRANGER_CALLS_PER_ADDRESS_MAX", 0)

    def limited(path: str, context: Context) -> str | None:
        raise Overloaded("too many requests a minute")

    options = ServerOptions(guard=limited, reflection=False)
    server = RpcServer([told.grpc_service], options)
    await server.start()
    async with open_channel(server.address) as channel:
        describing = channel.unary_unary(DESCRIBE, None, None)(b"")
        assert await describing.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await describing.details() == "too many requests a minute"
    await server.stop()


async def test_a_strangers_message_is_not_awaited(address: str) -> None:
    """Health is told at once. With a key, the message counts, as for any other method."""
    async with bare_connection(address) as bare:
        incomplete = [bare.call(CHECK), bare.call(CHECK, "wrong"), bare.call(DESCRIBE)]
        for stream in incomplete:
            bare.send(stream, bytes(4096), claimed=2**23)
        empty = bare.call(CHECK)
        for stream in (*incomplete, empty):
            await bare.until_ended(stream)
        awaited = bare.call(CHECK, KEY)
        bare.send(awaited, bytes(4096), claimed=2**23)
        with pytest.raises(TimeoutError):
            await bare.until_ended(awaited, 0.2)
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="none")
        assert (await stub.Check(request)).status == Serving.SERVING
        unknown = stub.Check(request, metadata=(("authorization", f"Bearer {KEY}"),))
        assert await unknown.code() is grpc.StatusCode.NOT_FOUND


async def test_unfinished_messages_of_a_caller_delay_no_health_check(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.limits.GRPC_MESSAGES_AWAITED_MAX", 2)
    monkeypatch.setattr("outrider.limits.HEALTH_MESSAGE_S_MAX", 0.3)
    async with bare_connection(address) as bare:
        for method in (DESCRIBE, DESCRIBE, CHECK):
            stream = bare.call(method, KEY)
            bare.send(stream, bytes(4096), claimed=2**23)
        probe = bare.call(CHECK, KEY)
        bare.send(probe, b"")
        await bare.until_ended(probe, 1.0)
        await bare.until_ended(stream, 1.0)


async def test_little_of_a_message_is_buffered_unless_it_is_awaited(address: str) -> None:
    async with bare_connection(address) as bare:
        watches = [bare.call(WATCH) for _ in range(4)]
        for watch in watches * 2:
            assert await bare.fill(watch, 2**22, 0.1) < 2**17
        awaited = bare.call(DESCRIBE, KEY)
        assert await bare.fill(awaited, 2**22, 1.0) == 2**22 + 4


async def test_a_long_message_of_too_many_fields_is_not_decoded(address: str) -> None:
    known = (("authorization", f"Bearer {KEY}"),)
    before = REFUSALS["message_fields"]
    async with open_channel(address) as channel:
        generate = channel.unary_stream(GENERATE, None, None)
        stop = [""] * (limits.GRPC_FIELDS_MAX + 1)
        short = generate(pb.GenerateRequest(stop=stop).SerializeToString(), metadata=known)
        assert await short.read()
        text = "x" * limits.GRPC_INLINE_BYTES
        request = pb.GenerateRequest(stop=stop, text=text)
        long = generate(request.SerializeToString(), metadata=known)
        with pytest.raises(grpc.aio.AioRpcError, match=f"{limits.GRPC_FIELDS_MAX} fields"):
            await long.read()
        short.cancel()
    assert REFUSALS["message_fields"] == before + 1


async def test_a_stranger_who_takes_no_answers_keeps_nobody_out(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.limits.STRANGER_CALLS_PER_ADDRESS_MAX", 8)
    before = REFUSALS["stranger_calls"]
    async with bare_connection(address, window=0) as bare, open_channel(address) as channel:
        checks = [bare.call(CHECK) for _ in range(20)]
        async with asyncio.timeout(5):
            while len(bare.ended) < 12:
                await asyncio.sleep(0.01)
        assert not {*checks[:8]} & bare.ended
        assert REFUSALS["stranger_calls"] - before == 12
        stub = health_pb2_grpc.HealthStub(channel)
        refused = stub.Check(health_pb2.HealthCheckRequest())
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        known = (("authorization", f"Bearer {KEY}"),)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), metadata=known)).status
        describe = channel.unary_unary(DESCRIBE, None, None)
        assert pb.CoordinatorDescription.FromString(await describe(b"", metadata=known)).model
    async with open_channel(address) as channel:  # The stranger has gone.
        stub = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(5):
            while (
                await stub.Check(health_pb2.HealthCheckRequest()).code() is not grpc.StatusCode.OK
            ):
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("deadline_s", [0.3, 60.0])
async def test_a_client_that_takes_no_data_does_not_keep_its_generation(
    told: Told,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    window: int,
    deadline_s: float,
) -> None:
    """It ends after its deadline, or when the client has taken nothing for some time. A client that
    takes data again learns why."""
    if deadline_s > 1:
        monkeypatch.setattr("outrider.limits.GRPC_STUCK_WRITE_S", 0.2)
    told.seconds = deadline_s
    async with bare_connection(address, window) as bare, asyncio.timeout(5):
        stream = bare.call(GENERATE, KEY)
        bare.send(stream, b"")
        while not told.num_running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert told.num_running == 1
        while told.num_running:
            await asyncio.sleep(0.01)
        assert stream not in bare.ended
        bare.take(stream, 2**16)
        await bare.until_ended(stream)
    # gRPC may still report events to the closed event loop of an earlier test.
    told_here = (one for one in caplog.records if "PollerCompletionQueue" not in one.getMessage())
    assert not [*told_here]


@pytest.mark.parametrize("pause_s", [0.01, 0.2])
async def test_a_client_that_takes_its_data_keeps_its_generation(
    told: Told, address: str, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    monkeypatch.setattr("outrider.limits.GRPC_STUCK_WRITE_S", 0.05)
    told.pause_s = pause_s
    loop = asyncio.get_running_loop()
    async with open_channel(address) as channel:
        metadata = (("authorization", f"Bearer {KEY}"),)
        generating = channel.unary_stream(GENERATE, None, None)(b"", metadata=metadata)
        until = loop.time() + 0.5
        while loop.time() < until:
            assert await generating.read()
        generating.cancel()


async def test_watchers_without_a_key_hear_of_changes(address: str) -> None:
    async with open_channel(address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == Serving.SERVING
        watching.cancel()
