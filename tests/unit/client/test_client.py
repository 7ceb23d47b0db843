"""The client: completions from events, and errors."""

import asyncio
from collections.abc import AsyncIterator, Generator
from inspect import signature
from pydoc import render_doc
from typing import Any

import pytest

from outrider.client import (
    ChatMessage,
    Client,
    Completion,
    CompletionBuilder,
    Event,
    GenerateRequest,
    RoundReport,
    SyncClient,
)
from outrider.errors import BadRequest, DataLoss, NotFound, Overloaded, Unavailable
from outrider.grammar.constraint import Constraint, ConstraintKind
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.transport.request_codec import request_from_proto
from outrider.transport.server import RpcServer
from tests.support.scripted_server import (
    FINISHED,
    FIRST,
    ID,
    SECOND,
    STARTED,
    ScriptedServicer,
    serve,
)

ROUND = RoundReport(1, (5, 9), 1, 1.0, 2.0, 3.0, 4.0, 5.0)
REQUEST = GenerateRequest("hi")


@pytest.fixture
def coordinator() -> ScriptedServicer:
    return ScriptedServicer()


@pytest.fixture
async def server(coordinator: ScriptedServicer) -> AsyncIterator[RpcServer]:
    server = await serve(coordinator)
    yield server
    await server.stop()


@pytest.fixture
async def client(server: RpcServer) -> AsyncIterator[Client]:
    async with Client(server.address) as client:
        yield client


async def test_a_completion_is_its_events(client: Client, coordinator: ScriptedServicer) -> None:
    coordinator.events = (STARTED, FIRST, ROUND, SECOND, FINISHED)
    assert [event async for event in client.generate(REQUEST)] == list(coordinator.events)
    completion = await client.complete(REQUEST)
    assert (completion.text, completion.token_ids) == ("hello", (5, 6, 7))
    assert completion.origins == (Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS)
    assert (completion.seed, completion.rounds) == (2**64 - 1, (ROUND,))
    assert completion.metrics == FINISHED.metrics
    assert request_from_proto(coordinator.requests[-1]) == REQUEST


async def test_an_error_arrives_as_raised(client: Client, coordinator: ScriptedServicer) -> None:
    for error in (BadRequest("sampling.top_p", "0 is wrong"), Overloaded("full", 250)):
        coordinator.events = (STARTED, error)
        with pytest.raises(type(error)) as caught:
            await client.complete(REQUEST)
        assert vars(caught.value) == vars(error)
    coordinator.events = (STARTED, FIRST)
    with pytest.raises(Unavailable):
        await client.complete(REQUEST)
    with pytest.raises(DataLoss):
        CompletionBuilder().add(SECOND)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_tokens", {"max_tokens": 2**31}),
        ("seed", {"seed": -1}),
        ("token_ids.ids[1]", {"prompt": (1, 2**31)}),
        ("stop[0]", {"stop": ("\ud800",)}),
        ("sampling.logit_bias", {"sampling": SamplingParams(logit_bias=((2**31, 1.0),))}),
        ("text", {"prompt": "half a pair: \ud800"}),
        ("chat.messages[0].content", {"prompt": (ChatMessage("user", "\udfff"),)}),
        ("regex", {"constraint": Constraint(ConstraintKind.REGEX, "\ud800")}),
        ("prompt", {"prompt": (1, ChatMessage("user", "hi"))}),
    ],
)
async def test_what_cannot_go_is_named(client: Client, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        await client.complete(GenerateRequest(**({"prompt": "hi"} | fields)))
    assert caught.value.field == field
    if field == "max_tokens":
        assert "must be from -2147483648 to 2147483647" in caught.value.message
    for timeout_s in (float("inf"), float("nan"), 0.0, 1e300):
        with pytest.raises(BadRequest, match="timeout_s"):
            await client.describe(timeout_s)
        with pytest.raises(BadRequest, match="timeout_s"):
            client.resume(ID, timeout_s=timeout_s)
    for call in (client.cancel, client.get_session):
        with pytest.raises(BadRequest, match="session_id"):
            await call("\ud800")


async def test_a_closed_client_says_so(server: RpcServer, coordinator: ScriptedServicer) -> None:
    coordinator.events = (STARTED, asyncio.Event())
    client = Client(server.address)
    reading = asyncio.create_task(client.complete(REQUEST))
    await coordinator.waits.wait()
    await client.close()
    for call in (reading, client.complete(REQUEST), client.get_session(ID)):
        with pytest.raises(Unavailable, match="closed"):
            await call


async def test_a_cancelled_reader_is_stopped(client: Client, coordinator: ScriptedServicer) -> None:
    coordinator.events = (STARTED, asyncio.Event())
    reading = asyncio.create_task(client.complete(REQUEST))
    await coordinator.waits.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with asyncio.timeout(10):
        await coordinator.left.wait()


async def test_the_blocking_client_has_all_calls(
    client: Client, server: RpcServer, coordinator: ScriptedServicer
) -> None:
    coordinator.events = (STARTED, FIRST, ROUND, SECOND, FINISHED)
    assert not await client.healthy()
    await server.set_serving(True)

    def use() -> None:
        with SyncClient(server.address) as client:

            async def begin() -> Generator[Event]:
                events = client.generate(REQUEST)
                assert next(events) == STARTED
                return events

            assert list(asyncio.run(begin())) == [FIRST, ROUND, SECOND, FINISHED]
            assert client.complete(REQUEST).text == "hello"
            assert list(client.resume(ID, 3))[-1] == FINISHED
            session = client.get_session(ID)
            assert (session.epoch, session.rule, session.token_ids) == (3, Rule.BLOCK, (1, 2))
            assert (session.state, session.finish_reason) == ("running", None)
            client.cancel(ID)
            assert client.describe().num_running == 2
            assert client.healthy()
            with pytest.raises(NotFound):
                client.get_session("cd" * 16)
            coordinator.events = (STARTED, Overloaded("full", 250))
            with pytest.raises(Overloaded, match="full"):
                client.complete(REQUEST)
        with pytest.raises(Unavailable, match="closed"):
            client.describe()
        with SyncClient("127.0.0.1:1") as unreachable:
            assert not unreachable.healthy()
            with pytest.raises(Unavailable):
                unreachable.complete(REQUEST)

    await asyncio.to_thread(use)
    assert (coordinator.cancelled, coordinator.resumed) == ([ID], [(ID, 3)])


async def test_an_http_port_is_told_from_a_grpc_port() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as http:
        host, port = http.sockets[0].getsockname()
        async with Client(f"{host}:{port}") as client:
            with pytest.raises(Unavailable, match=rf"{port} is not a gRPC port; .* 50051"):
                await client.describe()


@pytest.mark.parametrize(
    ("method", "returned"),
    [
        (SyncClient.generate, Generator[Event]),
        (SyncClient.resume, Generator[Event]),
        (SyncClient.complete, Completion),
        (SyncClient.cancel, None),
    ],
)
def test_blocking_methods_show_what_they_return(method: Any, returned: Any) -> None:
    assert signature(method).return_annotation == returned
    assert "AsyncGenerator" not in render_doc(method)


async def test_leaving_a_stream_cancels(server: RpcServer, coordinator: ScriptedServicer) -> None:
    coordinator.events = (STARTED, asyncio.Event())
    with SyncClient(server.address) as client:
        events = client.generate(REQUEST)
        assert await asyncio.to_thread(next, events) == STARTED
        events.close()
        async with asyncio.timeout(10):
            await coordinator.left.wait()
        coordinator.waits.clear()
        reading = asyncio.create_task(asyncio.to_thread(client.complete, REQUEST))
        await coordinator.waits.wait()
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            await reading
