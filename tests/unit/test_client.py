"""The client: what it makes of events, and how it reports what goes wrong."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from outrider.client import (
    Client,
    CompletionBuilder,
    Event,
    Finished,
    GenerateRequest,
    Metrics,
    RoundReport,
    Started,
    Tokens,
    Usage,
)
from outrider.errors import BadRequest, DataLoss, NotFound, Overloaded, Unavailable
from outrider.sessions.store import (
    CacheState,
    Counters,
    FinishReason,
    SessionRecord,
    SessionState,
)
from outrider.speculation.decision import Origin
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.v1 import coordinator_pb2 as pb
from outrider.wire.generation import event_to_proto, request_from_proto, session_to_proto
from outrider.wire.server import RpcServer, Service

ID = "ab" * 16
STARTED = Started(ID, "demo", 2**64 - 1, Rule.TOKEN)
FIRST = Tokens(0, (5, 6), "he", (Origin.ACCEPTED, Origin.CORRECTION), ())
SECOND = Tokens(2, (7,), "llo", (Origin.BONUS,), ())
ROUND = RoundReport(1, (5, 9), 1, 1.0, 2.0, 3.0, 4.0, 5.0)
FINISHED = Finished(FinishReason.LENGTH, Usage(4, 3), Metrics(2, 3, 1, 1.5, 10.0, 30.0))


class _Coordinator:
    """Answers with what a test puts into it."""

    def __init__(self) -> None:
        self.events: Sequence[Event | Exception] = ()
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled: list[str] = []

    async def generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateEvent]:
        self.requests.append(request)
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event_to_proto(event)

    async def cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelReply:
        self.cancelled.append(request.session_id)
        return pb.CancelReply()

    async def get_session(self, request: pb.GetSessionRequest, context: Any) -> pb.Session:
        if request.session_id != ID:
            raise NotFound(f"session_id: there is no session {request.session_id}")
        nothing = CacheState()
        return session_to_proto(
            SessionRecord(
                session_id=ID, tenant="", epoch=3, owner="x", state=SessionState.RUNNING,
                seed=1, rule=Rule.BLOCK, parameters="", prompt_length=1, token_ids=(1, 2),
                prefix_digest=0, draft=nothing, target=nothing, counters=Counters(), logprobs="",
                finish_reason=None,
            )
        )  # fmt: skip


@pytest.fixture
def coordinator() -> _Coordinator:
    return _Coordinator()


@pytest_asyncio.fixture
async def server(coordinator: _Coordinator) -> AsyncIterator[RpcServer]:
    descriptor = pb.DESCRIPTOR.services_by_name["Coordinator"]
    server = RpcServer([Service(descriptor, coordinator)])
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def client(server: RpcServer) -> AsyncIterator[Client]:
    async with Client(server.address) as client:
        yield client


async def test_a_completion_is_its_events(client: Client, coordinator: _Coordinator) -> None:
    """Every field of every event arrives, in order."""
    coordinator.events = (STARTED, FIRST, ROUND, SECOND, FINISHED)
    events = [event async for event in client.generate(GenerateRequest("hi"))]
    assert events == list(coordinator.events)
    completion = await client.complete(GenerateRequest("hi"))
    assert (completion.text, completion.token_ids) == ("hello", (5, 6, 7))
    assert completion.origins == (Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS)
    assert completion.seed == 2**64 - 1
    assert completion.rounds == (ROUND,)
    assert completion.metrics == FINISHED.metrics


async def test_a_request_arrives_as_it_was_made(client: Client, coordinator: _Coordinator) -> None:
    """What is None stays unset, so that the coordinator's default holds."""
    coordinator.events = (STARTED, FINISHED)
    full = GenerateRequest(
        prompt=(1, 2), model="m", sampling=SamplingParams(temperature=0.5, logit_bias=((3, 1.0),)),
        max_tokens=7, stop=("a",), ignore_eos=True, seed=0, rule=Rule.BLOCK, num_draft_tokens=0,
        deadline_ms=1000, logprobs=0, include_rounds=True,
    )  # fmt: skip
    for request in (full, GenerateRequest("hi")):
        await client.complete(request)
        assert request_from_proto(coordinator.requests[-1]) == request


@pytest.mark.parametrize(
    "error",
    [BadRequest("sampling.top_p", "0 is wrong"), NotFound("model: no"), Overloaded("full", 250)],
)
async def test_an_error_arrives_as_it_was_raised(
    client: Client, coordinator: _Coordinator, error: Exception
) -> None:
    """With its kind, its field and its time to try again."""
    coordinator.events = (STARTED, error)
    with pytest.raises(type(error)) as caught:
        await client.complete(GenerateRequest("hi"))
    assert vars(caught.value) == vars(error)


async def test_a_stream_that_breaks_off_is_no_completion(
    client: Client, coordinator: _Coordinator
) -> None:
    """Neither without its last event nor with tokens missing."""
    coordinator.events = (STARTED, FIRST)
    with pytest.raises(Unavailable):
        await client.complete(GenerateRequest("hi"))
    builder = CompletionBuilder()
    builder.add(STARTED)
    with pytest.raises(DataLoss):
        builder.add(SECOND)


async def test_a_session_is_read_and_cancelled(client: Client, coordinator: _Coordinator) -> None:
    """By its id; an unknown one is `NotFound`."""
    session = await client.get_session(ID)
    assert (session.epoch, session.rule, session.token_ids) == (3, Rule.BLOCK, (1, 2))
    assert (session.state, session.finish_reason) == ("running", None)
    with pytest.raises(NotFound):
        await client.get_session("cd" * 16)
    await client.cancel(ID)
    assert coordinator.cancelled == [ID]


async def test_health_is_what_the_server_says(client: Client, server: RpcServer) -> None:
    """Not serving, serving, and nobody there."""
    assert not await client.healthy()
    await server.set_serving(True)
    assert await client.healthy()
    async with Client("127.0.0.1:1") as nobody:
        assert not await nobody.healthy()
        with pytest.raises(Unavailable):
            await nobody.complete(GenerateRequest("hi"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 2**31), ("num_draft_tokens", -(2**31) - 1), ("deadline_ms", 2**31),
     ("logprobs", 2**31), ("seed", -1), ("seed", 2**64)],
)  # fmt: skip
async def test_a_number_that_cannot_be_sent_is_named(client: Client, name: str, value: int) -> None:
    """By the field's name, like one that the coordinator refuses."""
    with pytest.raises(BadRequest) as caught:
        await client.complete(GenerateRequest("hi", **{name: value}))  # type: ignore[arg-type]
    assert caught.value.field == name
