"""A link to replicas that break the protocol, and a stream whose caller breaks it."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

import grpc
import pytest

from outrider import limits
from outrider.errors import LinkLost, Overloaded, Unavailable
from outrider.interfaces.messages import Refused, VerdictReply, VerifyAnswer, VerifyItem
from outrider.limits import LINK_BACKOFF_MS_MIN, STREAM_QUEUE_ITEMS_MAX
from outrider.speculation.accept_reject import Verdict
from outrider.transport.channel import open_channel
from outrider.transport.codec import VERIFY
from outrider.transport.grpc_link import GrpcLink
from outrider.transport.server import Service
from outrider.transport.stream_server import ReplicaServicer
from outrider.v1 import target_pb2, types_pb2
from tests.chaos.proxy import FaultProxy
from tests.support.rounds import PATIENCE_S, Listener, make_head
from tests.support.stack import serve

KEY = make_head((1,)).key
GOOD = VerdictReply(KEY, Verdict((), (1,)), 1)


class Impostor(ReplicaServicer[VerifyItem, VerifyAnswer]):
    """Sends a prepared frame for each frame that it gets, or then raises an error."""

    def __init__(self, frame: target_pb2.VerifyReply, then: Exception | None = None) -> None:
        self._codec = VERIFY
        self._frame = frame
        self._then = then

    async def stream(self, frames: AsyncIterator[Any], context: Any) -> AsyncGenerator[bytes]:
        async for _ in frames:
            yield self._frame.SerializeToString()
            if self._then is not None:
                raise self._then

    async def describe(self, request: Any, context: Any) -> Any:
        return types_pb2.ReplicaDescription(eos_token_ids=[2**31])

    release = describe


@pytest.fixture
async def exits() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def linked(exits: AsyncExitStack, service: Service) -> tuple[GrpcLink, Listener]:
    link = GrpcLink(VERIFY, (await serve(exits, service)).address)
    exits.push_async_callback(link.close)
    return link, Listener(link)


async def test_an_answer_that_does_not_fit_breaks_the_link(exits: AsyncExitStack) -> None:
    """Earlier answers are delivered first. The loss names the wrong field."""
    frame = VERIFY.answer_frame(GOOD)
    [good] = target_pb2.VerifyReply.FromString(frame).items
    [bad] = target_pb2.VerifyReply.FromString(frame).items
    bad.verdict.correction.append(1)
    impostor = Impostor(target_pb2.VerifyReply(items=[good, bad, good]))
    link, heard = await linked(exits, impostor.grpc_service)
    link.send(VerifyItem(make_head((1,))))
    await heard.wait(num_lost=1)
    assert heard.answers == [GOOD]
    assert "verdict" in str(heard.lost[0])
    with pytest.raises(Unavailable, match="eos_token_ids"):
        await link.describe(PATIENCE_S)


async def test_the_rest_between_attempts_doubles_and_a_good_answer_ends_it(
    exits: AsyncExitStack,
) -> None:
    """After each break the delay is between half and all of 50, 100 and 200 ms."""
    impostor = Impostor(target_pb2.VerifyReply(), then=Unavailable("going down"))
    link, heard = await linked(exits, impostor.grpc_service)
    for attempt in range(3):
        link.send(VerifyItem(make_head((1,))))
        await heard.wait(num_lost=attempt + 1)
        lost = heard.lost[-1]
        assert isinstance(lost, LinkLost)
        assert "going down" in lost.message
        whole = LINK_BACKOFF_MS_MIN * 2**attempt
        assert whole // 2 <= lost.retry_after_ms <= whole
        with pytest.raises(LinkLost) as caught:
            link.send(VerifyItem(make_head((1,))))
        assert 0 < caught.value.retry_after_ms <= lost.retry_after_ms + 1
        await asyncio.sleep(caught.value.retry_after_ms / 1000)


async def test_a_link_to_a_replica_that_hangs_breaks_soon(exits: AsyncExitStack) -> None:
    """A held connection takes all data and answers nothing, like one to a stopped process."""
    service, proxy = Silent(), FaultProxy()
    server = await serve(exits, ReplicaServicer(service, VERIFY).grpc_service)
    exits.callback(proxy.close)
    address = await proxy.forward(server.address)
    link = GrpcLink(VERIFY, address)
    exits.push_async_callback(link.close)
    heard = Listener(link)
    link.send(VerifyItem(make_head((1,))))
    async with asyncio.timeout(PATIENCE_S):
        await service.news.wait()
    await asyncio.sleep(1.5 * (limits.LINK_KEEPALIVE_MS + limits.LINK_KEEPALIVE_TIMEOUT_MS) / 1e3)
    assert not heard.lost, "an idle replica answers pings"
    proxy.hold(address)
    began = time.monotonic()
    await heard.wait(num_lost=1)
    assert (
        time.monotonic() - began
        < 2 * (limits.LINK_KEEPALIVE_MS + limits.LINK_KEEPALIVE_TIMEOUT_MS) / 1e3
    )
    proxy.release(address)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(LinkLost):
                link.send(VerifyItem(make_head((1,), round_index=1)))
                break
            await asyncio.sleep(0.05)
        while 1 not in service.rounds:
            await asyncio.sleep(0.05)


async def test_a_full_outbox_refuses_and_loses_nothing_it_took(exits: AsyncExitStack) -> None:
    service = Silent()
    link, _ = await linked(exits, ReplicaServicer(service, VERIFY).grpc_service)
    for round_index in range(STREAM_QUEUE_ITEMS_MAX):
        link.send(VerifyItem(make_head((1,), round_index=round_index)))
    with pytest.raises(Overloaded):
        link.send(VerifyItem(make_head((1,), round_index=STREAM_QUEUE_ITEMS_MAX)))
    async with asyncio.timeout(PATIENCE_S):
        while len(service.rounds) < STREAM_QUEUE_ITEMS_MAX:
            service.news.clear()
            await service.news.wait()
    assert service.rounds == list(range(STREAM_QUEUE_ITEMS_MAX))


class Silent:
    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.news = asyncio.Event()
        self.closed = asyncio.Event()

    def connect(self, send: Callable[[Sequence[VerifyAnswer]], None]) -> Self:
        self.send = send
        return self

    def receive(self, items: Sequence[VerifyItem]) -> None:
        self.rounds.extend(item.head.round for item in items)
        assert all(item.head.sampling is not None for item in items)
        self.news.set()

    def close(self) -> None:
        self.closed.set()


async def test_more_answers_than_may_wait_end_the_stream(exits: AsyncExitStack) -> None:
    service = Silent()
    call = await ask_raw(exits, service)
    heard = 0
    async with asyncio.timeout(PATIENCE_S):
        await service.news.wait()
        service.send([GOOD] * (STREAM_QUEUE_ITEMS_MAX + 1))
        await service.closed.wait()
        while heard < STREAM_QUEUE_ITEMS_MAX:
            heard += len(target_pb2.VerifyReply.FromString(await call.read()).items)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_caller_that_never_reads_is_cut_off(exits: AsyncExitStack) -> None:
    """A write hangs. Once the queue is full as well, the call is cancelled."""
    service = Silent()
    call = await ask_raw(exits, service)
    bulky = Refused(KEY, 13, "x" * 1000)
    async with asyncio.timeout(PATIENCE_S):
        await service.news.wait()
        while not service.closed.is_set():
            service.send([bulky] * (STREAM_QUEUE_ITEMS_MAX // 2))
            await asyncio.sleep(0)
    call.cancel()


async def ask_raw(exits: AsyncExitStack, service: Silent) -> Any:
    """A stream on which one item was written and nothing is read."""
    server = await serve(exits, ReplicaServicer(service, VERIFY).grpc_service)
    channel = await exits.enter_async_context(open_channel(server.address))
    call: Any = channel.stream_stream(VERIFY.path("Verify"), None, None)(None)
    await call.write(VERIFY.item_frame(VerifyItem(make_head((1,)))))
    return call
