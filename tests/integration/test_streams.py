"""A target behind a gRPC server: broken links, what travels once, bulky items, bad messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from outrider.errors import LinkLost, Unavailable
from outrider.grammar.constraint import Constraint
from outrider.interfaces.messages import Refused, Resync, VerdictReply, VerifyItem
from outrider.limits import BULK_ITEM_BYTES, GRPC_MESSAGE_BYTES_MAX
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.channel import open_channel
from outrider.transport.codec import VERIFY
from outrider.transport.grpc_link import GrpcLink
from outrider.transport.server import RpcServer, ServerOptions
from outrider.transport.stream_server import ReplicaServicer
from outrider.v1 import target_pb2
from tests.support.pages import check_service
from tests.support.rounds import (
    PATIENCE_S,
    Listener,
    Replica,
    ask,
    item_message,
    make_head,
    session_name,
)
from tests.support.toy_engine import ToyEngine

PROMPT = (1, 2, 3)
VERIFY_PATH = "/outrider.v1.Target/Verify"


class Target:
    async def start(self, port: int = 0) -> None:
        self.service: Any = Replica("target", ToyEngine()).service
        api = ReplicaServicer(self.service, VERIFY).grpc_service
        self.server = RpcServer([api], ServerOptions(port=port))
        await self.server.start()
        await self.server.set_serving(True)
        self.address = self.server.address

    async def stop(self) -> None:
        await self.server.stop()
        await self.service.close()
        check_service(self.service)


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    made = Target()
    await made.start()
    yield made
    await made.stop()


async def test_a_link_breaks_and_is_opened_anew(target: Target) -> None:
    """While there is no server, `send` fails fast. After a restart, the next item opens the stream
    again, and the new target answers that it holds nothing."""
    link = GrpcLink(VERIFY, target.address)
    heard = Listener(link)
    assert isinstance(await ask(link, heard, VerifyItem(make_head(PROMPT))), VerdictReply)
    await target.stop()
    await heard.wait(num_lost=1)
    assert isinstance(heard.lost[0], LinkLost)
    with pytest.raises(LinkLost):
        link.send(VerifyItem(make_head(PROMPT, round_index=1)))
    with pytest.raises(Unavailable):
        await link.describe(1.0)

    await target.start(int(target.address.rpartition(":")[2]))
    item = VerifyItem(make_head((*PROMPT, 4), 3, round_index=1))
    answers_before = len(heard.answers)
    async with asyncio.timeout(PATIENCE_S):
        while len(heard.answers) == answers_before:
            lost_before = len(heard.lost)
            try:
                link.send(item)
            except LinkLost as error:
                await asyncio.sleep(error.retry_after_ms / 1000)
                continue
            while (len(heard.answers), len(heard.lost)) == (answers_before, lost_before):
                await asyncio.sleep(0.01)
    assert isinstance(heard.answers[-1], Resync)
    full = await ask(link, heard, VerifyItem(make_head((*PROMPT, 4), round_index=1)))
    assert isinstance(full, VerdictReply)
    await link.close()
    with pytest.raises(LinkLost):
        link.send(item)


def sent_head(stream: Any, item: VerifyItem) -> Any:
    return target_pb2.VerifyRequest.FromString(stream.encode(item)).items[0].head


async def test_sampling_parameters_travel_once(target: Target) -> None:
    link = GrpcLink(VERIFY, target.address)
    heard = Listener(link)
    sampling = SamplingParams(temperature=1, top_k=3, logit_bias=((5, 2), (1, -1)))
    first = VerifyItem(make_head(PROMPT, rule=Rule.TOKEN, sampling=sampling))
    await ask(link, heard, first)
    stream = link._streams["normal"]
    head = make_head((*PROMPT, 4), 3, rule=Rule.TOKEN, sampling=sampling, round_index=1)
    assert sent_head(stream, VerifyItem(head)).WhichOneof("sampling") == "sampling_hash"
    reply = await ask(link, heard, VerifyItem(head))
    assert isinstance(reply, VerdictReply)
    again = make_head((*PROMPT, 4, 5), 4, rule=Rule.TOKEN, sampling=sampling, round_index=2)
    again = replace(again, sampling_hash=12345)
    stream._sent[session_name(1)] = again.given_hashes
    resync = await ask(link, heard, VerifyItem(again))
    assert isinstance(resync, Resync)
    assert resync.cached_length == 0
    assert sent_head(stream, VerifyItem(again)).WhichOneof("sampling") == "sampling_params"
    assert isinstance(await ask(link, heard, VerifyItem(again)), VerdictReply)
    await link.close()


async def test_a_constraint_travels_once(target: Target) -> None:
    heard_heads = []

    def noting(item: Any, outlet: Any) -> None:
        heard_heads.append(item.head)
        outlet.send([Refused(item.head.key, 9, "only for inspection")])

    target.service.take = noting
    link = GrpcLink(VERIFY, target.address)
    heard = Listener(link)
    small = Constraint.of_regex("[ab]+")
    large = Constraint.of_schema({"title": "x" * BULK_ITEM_BYTES})
    for session, constraint in ((1, small), (2, large), (3, None)):
        for index in range(2):
            head = make_head(PROMPT, session=session, round_index=index, constraint=constraint)
            await ask(link, heard, VerifyItem(head))
            assert heard_heads[-1].constraint == constraint
            assert heard_heads[-1].constraint_hash == head.constraint_hash
        stream = link._streams["bulk" if constraint is large else "normal"]
        form = sent_head(stream, VerifyItem(head)).WhichOneof("completion")
        assert form == ("constraint_hash" if constraint else None)
    other = make_head(PROMPT, session=1, round_index=2, constraint=Constraint.any_object())
    await ask(link, heard, VerifyItem(other))
    assert heard_heads[-1].constraint == Constraint.any_object()
    await link.close()


@pytest.mark.parametrize(("first", "name"), [(None, "normal"), (82, "normal"), (0, "bulk")])
async def test_many_features_come_by_the_stream_of_bulky_items(
    target: Target, first: int | None, name: str
) -> None:
    link = GrpcLink(VERIFY, target.address)
    text = [index % 7 for index in range(100)]
    await ask(link, Listener(link), VerifyItem(make_head(text), features_from=first))
    used = [name for name, stream in link._streams.items() if stream._sent]
    await link.close()
    assert used == [name]


@asynccontextmanager
async def sent_raw(address: str, data: bytes) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        call = channel.stream_stream(VERIFY_PATH, None, None)(None)
        await call.write(data)
        yield call
        call.cancel()


async def test_what_cannot_be_decoded_is_the_callers_fault(target: Target) -> None:
    """The status is INVALID_ARGUMENT, not INTERNAL. Each item of a frame, good or bad, gets its own
    answer. A message above the size limit is not read."""
    address = target.address
    async with sent_raw(address, b"\xff\xff\xff") as call:
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        told = "message: these 3 bytes are not a outrider.v1.VerifyRequest"
        assert await call.details() == told
    good = item_message(VERIFY, VerifyItem(make_head(PROMPT)))
    bad = item_message(VERIFY, VerifyItem(make_head(PROMPT, session=2)))
    bad.head.session_id = "XYZ"
    unknown = item_message(VERIFY, VerifyItem(make_head(PROMPT, session=3)), hashed=True)
    frame = target_pb2.VerifyRequest(items=[good, bad, unknown]).SerializeToString()
    replies = list[Any]()
    async with sent_raw(address, frame) as call:
        while len(replies) < 3:
            replies += target_pb2.VerifyReply.FromString(await call.read()).items
    kinds = {reply.session_id: reply.WhichOneof("answer") for reply in replies}
    assert kinds == {session_name(1): "verdict", "XYZ": "refused", session_name(3): "resync"}
    refused = next(reply.refused for reply in replies if reply.session_id == "XYZ")
    assert refused.code == 3
    assert refused.message.startswith("head.session_id: ")
    bare: Any
    async with grpc.aio.insecure_channel(address) as bare:
        large = bare.stream_stream(VERIFY_PATH)(iter([bytes(GRPC_MESSAGE_BYTES_MAX + 1)]))
        assert await large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
