"""How a replica stops: it answers queued items, but only within a grace period."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.config.deployment import TargetConfig
from outrider.errors import EngineLost, LinkLost
from outrider.interfaces.messages import VerdictReply, VerifyItem
from outrider.replica.drivers import InlineDriver
from outrider.transport.codec import VERIFY
from outrider.transport.grpc_link import GrpcLink
from target_service.actor import TargetActor
from target_service.service import TargetService
from tests.support.rounds import PATIENCE_S, Listener, make_head, session_name
from tests.support.toy_engine import ToyEngine

Serving = health_pb2.HealthCheckResponse.ServingStatus


class GatedDriver(InlineDriver):
    """Runs each step only after the test has opened the gate for it."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.gate = asyncio.Semaphore(0)

    async def run(self, *step: Any) -> None:
        await self.gate.acquire()
        await super().run(*step)


class Hosted:
    """A target on a server that runs one item in each step, and a link to it."""

    def __init__(self) -> None:
        self.engine = ToyEngine()
        self.driver = GatedDriver()
        self.host = TargetActor()

    async def start(self) -> None:
        service = TargetService(self.engine, self.driver, max_num_seqs=1)
        self.address = await self.host.serve(service, TargetConfig())
        self.link = GrpcLink(VERIFY, self.address)
        self.heard = Listener(self.link)

    def send(self, session: int) -> None:
        self.link.send(VerifyItem(make_head((1, 2, 3), session=session)))

    async def received(self, num_items: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.host.traffic() < num_items:
                await asyncio.sleep(0.001)


async def test_what_waits_is_answered_and_then_the_stream_ends() -> None:
    """An item that arrives after the stop is not run. The stop takes only as long as the steps, far
    less than the grace period."""
    hosted = Hosted()
    await hosted.start()
    for session in (1, 2, 3):
        hosted.send(session)
    await hosted.received(3)
    stopping = asyncio.create_task(hosted.host.stop(10 * PATIENCE_S))
    await asyncio.sleep(0)
    hosted.send(4)
    for num_answers in (1, 2, 3):
        hosted.driver.gate.release()
        await hosted.heard.wait(num_answers)
    async with asyncio.timeout(PATIENCE_S):
        await stopping
    await hosted.heard.wait(num_lost=1)
    answers = hosted.heard.answers
    assert [answer.key.session_id for answer in answers] == [session_name(n) for n in (1, 2, 3)]
    assert all(isinstance(answer, VerdictReply) for answer in answers)
    assert [type(error) for error in hosted.heard.lost] == [LinkLost]
    assert "this replica is stopping" in str(hosted.heard.lost[0])
    assert hosted.engine.batches == [[session_name(n)] for n in (1, 2, 3)]
    await hosted.link.close()


async def test_a_replica_whose_engine_is_lost_ends_by_itself() -> None:
    hosted = Hosted()
    await hosted.start()
    hosted.engine.crash = EngineLost("rank 1 is gone")
    hosted.send(1)
    hosted.send(2)
    await hosted.received(2)
    async with grpc.aio.insecure_channel(hosted.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert (await stub.Check(request)).status == Serving.SERVING
        hosted.driver.gate.release()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineLost, match="rank 1 is gone"):
                await hosted.host.wait()
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Check(request)
            await hosted.host.stop(PATIENCE_S)
    answers = (await hosted.heard.wait(2, num_lost=1))[:2]
    assert [(answer.code, answer.message) for answer in answers] == [(14, "rank 1 is gone")] * 2
    assert "this replica is stopping" in str(hosted.heard.lost[0])
    await hosted.link.close()


async def test_steps_that_take_longer_than_the_grace_are_not_waited_for() -> None:
    hosted = Hosted()
    await hosted.start()
    hosted.send(1)
    hosted.send(2)
    await hosted.received(2)
    stopping = asyncio.create_task(hosted.host.stop(0.05))
    await hosted.heard.wait(num_lost=1)
    assert not stopping.done()
    hosted.driver.gate.release()
    async with asyncio.timeout(PATIENCE_S):
        await stopping
    assert hosted.heard.answers == []
    assert hosted.engine.batches == [[session_name(1)]]
    await hosted.link.close()
