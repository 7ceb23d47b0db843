"""Clients that ask a function where the coordinators are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from test_client import FINISHED, FIRST, SECOND, STARTED
from test_client import _Coordinator as Answering
from test_failover import BROKEN, REQUEST, Scripted, serve

from outrider.client import Client, ResumingTransport, SyncClient
from outrider.client.failover import GONE_MAX, LOOK_S, Found
from outrider.client.results import Transport
from outrider.clock import run_virtually
from outrider.errors import BadRequest, StreamBroken
from outrider.request import Event
from outrider.transport.server import RpcServer

WHOLE = (STARTED, FIRST, SECOND, FINISHED)


class Names:
    """Where they are, as a function says, and what it was asked."""

    def __init__(self, *each: str) -> None:
        self.each: list[str | Exception] = list(each)
        """One after the other; the last one stays."""
        self.num_asked = 0

    def __call__(self) -> str:
        self.num_asked += 1
        found = self.each.pop(0) if len(self.each) > 1 else self.each[0]
        if isinstance(found, Exception):
            raise found
        return found


def known(names: Callable[[], str], now: list[float]) -> Found[str]:
    return Found(names, str.upper, lambda: now[0])


def test_others_are_known_once_they_are_named() -> None:
    now, names = [0.0], Names("a,b", "b,c", "c,b")
    found = known(names, now)
    assert found.each == ["A", "B"]
    assert (found.renew(), names.num_asked) == (None, 1)  # It was asked just now.
    now[0] = LOOK_S
    assert found.renew() == []
    assert found.each == ["B", "C"]
    assert found.all == ["A", "B", "C"]
    now[0] += LOOK_S
    assert found.renew() is None  # The same in another order.


def test_connections_that_nobody_names_any_more_are_few() -> None:
    now = [0.0]
    found = known(lambda: f"n{now[0]:.0f}", now)
    closed: list[str] = []
    for number in range(GONE_MAX + 4):
        now[0] = float(number)
        closed += found.renew() or []
    assert closed == ["N0", "N1", "N2"]
    assert len(found.all) == 1 + GONE_MAX
    assert found.each == [f"N{GONE_MAX + 3}"]


@pytest.mark.parametrize("trouble", [OSError("no such file"), ""])
def test_a_function_that_names_none_changes_nothing(
    trouble: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once that it fails; that there is none for a moment is no news."""
    now, names = [0.0], Names("a", trouble, trouble, "b")
    found = known(names, now)
    for now[0] in (1.0, 2.0):
        assert found.renew() is None
        assert found.each == ["A"]
    assert len(caplog.records) == bool(trouble)
    now[0] = 3.0
    assert found.renew() == []
    assert found.each == ["B"]


@pytest.mark.parametrize("said", [",", None, ["127.0.0.1:1"]])
def test_what_it_says_at_first_must_be_addresses(said: Any) -> None:
    for kind in (Client, SyncClient):
        with pytest.raises(BadRequest, match="HOST:PORT"):
            kind(lambda: said)


def heard(names: Names, each: dict[str, Scripted]) -> list[Event]:
    """Of a request, 1 s after the names were asked for."""

    async def main() -> list[Event]:
        loop, connect = asyncio.get_running_loop(), each.__getitem__
        found: Found[Transport] = Found(names, connect, loop.time)  # type: ignore[arg-type]
        transport = ResumingTransport(found)
        await asyncio.sleep(1.0)
        try:
            return [event async for event in transport.generate(REQUEST, 60.0)]
        finally:
            await transport.close()
            assert all(one.closed for one in each.values())

    return run_virtually(main())


def test_a_stream_goes_on_at_one_that_came_later() -> None:
    """The only one that was known is gone for good."""
    gone, new = Scripted((STARTED, FIRST, BROKEN)), Scripted((STARTED, SECOND, FINISHED))
    names = Names("gone", "gone", "new")
    assert heard(names, {"gone": gone, "new": new}) == [*WHOLE]
    [asked] = new.asked
    assert asked is not None
    assert asked.num_tokens == 2


def test_a_request_begins_at_one_that_came_later() -> None:
    gone, new = Scripted(), Scripted(WHOLE)
    assert heard(Names("gone", "new"), {"gone": gone, "new": new}) == [*WHOLE]
    assert len(gone.asked) == 1
    first, second, new = Scripted(), Scripted(), Scripted(WHOLE)
    each = {"first": first, "second": second, "new": new}
    assert heard(Names("first,second", "second,new"), each) == [*WHOLE]
    gone, new = Scripted(), Scripted(WHOLE)
    assert heard(Names(*["gone"] * 5, "new"), {"gone": gone, "new": new}) == [*WHOLE]
    with pytest.raises(StreamBroken):
        heard(Names("a", "b"), {"a": Scripted(), "b": Scripted()})


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("first", ["", "127.0.0.1:1"])
async def test_calls_wait_while_no_coordinator_answers(
    blocking: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function names none yet, or only one that has gone: generations and other calls ask
    again until it names one that answers. A client that does not ask again says what is missing."""
    monkeypatch.setattr("outrider.client.endpoints.LOOK_S", 0.0)
    there = Answering()
    there.events = WHOLE
    server = await serve(there)

    def names() -> Names:
        return Names(*[first] * 3, server.address)

    def block() -> None:
        with SyncClient(names()) as client:
            assert client.describe().model == "demo"
        with SyncClient(names()) as client:
            assert list(client.generate(REQUEST)) == [*WHOLE]
        with SyncClient(lambda: "", resume_timeout_s=0) as client:
            with pytest.raises(StreamBroken, match="no coordinator is named yet"):
                client.describe()
            with pytest.raises(StreamBroken, match="no coordinator is named yet"):
                list(client.generate(REQUEST))

    if blocking:
        await asyncio.to_thread(block)
    else:
        async with Client(names()) as client:
            assert (await client.describe()).model == "demo"
        async with Client(names()) as client:
            assert [event async for event in client.generate(REQUEST)] == [*WHOLE]
        async with Client(lambda: "", resume_timeout_s=0) as client:
            assert not await client.healthy()
            with pytest.raises(StreamBroken, match="no coordinator is named yet"):
                await client.describe()
            with pytest.raises(StreamBroken, match="no coordinator is named yet"):
                await client.complete(REQUEST)
    await server.stop(0)


@pytest.mark.parametrize("blocking", [False, True])
async def test_calls_by_grpc_find_it_too(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a stream and others, one after the other."""
    monkeypatch.setattr("outrider.client.endpoints.LOOK_S", 0.0)
    there, later = Answering(), Answering()
    there.events = later.events = WHOLE
    server, other = await serve(there), await serve(later)
    names = Names("127.0.0.1:1", server.address, server.address, other.address)

    def block() -> None:
        with SyncClient(names) as client:
            assert client.describe().model == "demo"
            stop(server)
            assert list(client.generate(REQUEST)) == [*WHOLE]
            assert client.address == other.address

    loop = asyncio.get_running_loop()

    def stop(one: RpcServer) -> None:
        asyncio.run_coroutine_threadsafe(one.stop(0), loop).result()

    if blocking:
        await asyncio.to_thread(block)
    else:
        async with Client(names) as client:
            assert (await client.describe()).model == "demo"
            await server.stop(0)
            assert [event async for event in client.generate(REQUEST)] == [*WHOLE]
            assert client.address == other.address
    await other.stop(0)
