"""Generations whose stream breaks: what a caller receives, and which coordinator is called when."""

import asyncio
import random
import secrets
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from outrider import errors
from outrider.client import Client, GenerateRequest, ResumeRequest, SyncClient, failover
from outrider.foundation.tokens import TokenSequence
from outrider.interfaces.request import Event
from outrider.limits import DEADLINE_MS_DEFAULT, LEASE_WAIT_SPREAD_MS
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

pytestmark = pytest.mark.virtual

BROKEN = errors.StreamBroken("down")
REQUEST = GenerateRequest((1,))
WHOLE = (STARTED, FIRST, SECOND, FINISHED)


class Scripted:
    """Answers each call with the next entry of a script, and then not at all."""

    address = "scripted"

    def __init__(self, *script: Sequence[Event | errors.OutriderError]) -> None:
        self.script = list(script)
        self.asked: list[ResumeRequest | None] = []
        self.closed = False

    async def events(self, request: Any, timeout_s: float) -> AsyncGenerator[Event]:
        self.asked.append(request if isinstance(request, ResumeRequest) else None)
        for event in self.script.pop(0) if self.script else (BROKEN,):
            await asyncio.sleep(0)
            if isinstance(event, errors.OutriderError):
                raise event
            yield event

    async def call(self, method: str, timeout_s: float, session_id: str = "") -> Any:
        if method == "healthy":
            return not self.script
        found = self.script.pop(0)[0]
        if isinstance(found, errors.OutriderError):
            raise found
        return str(found)

    async def close(self) -> None:
        self.closed = True


def resuming(each: Sequence[Any], resume_timeout_s: float = 15.0) -> failover.ResumingTransport:
    names = ",".join(map(str, range(len(each))))
    clock = asyncio.get_running_loop().time
    pool = failover.EndpointPool(names, lambda name: each[int(name)], clock, first=0)
    return failover.ResumingTransport(pool, resume_timeout_s, random=lambda: 0.5)


async def heard(*each: Scripted, resume_timeout_s: float = 15.0) -> tuple[list[Event], float]:
    """The events of a request, and the seconds that they took."""
    client, clock = Client(resuming(each, resume_timeout_s)), asyncio.get_running_loop().time
    began = clock()
    return [event async for event in client.generate(REQUEST)], clock() - began


async def test_a_broken_stream_goes_on_at_the_next_coordinator() -> None:
    first, second = Scripted((STARTED, FIRST, BROKEN)), Scripted((STARTED, SECOND, FINISHED))
    assert (await heard(first, second))[0] == [*WHOLE]
    [asked] = second.asked
    assert (asked.session_id, asked.num_tokens, asked.num_characters) == (ID, 2, 2)
    assert asked.tokens_digest == TokenSequence(FIRST.token_ids).digest()
    assert 0 < DEADLINE_MS_DEFAULT - (asked.deadline_ms or 0) < 100  # It waited for a moment.


async def test_a_connection_that_breaks_is_made_again_where_the_session_is() -> None:
    """Another coordinator would have to wait for the session's lease."""
    first, second = Scripted((STARTED, FIRST, BROKEN), (STARTED, SECOND, FINISHED)), Scripted()
    assert (await heard(first, second))[0] == [*WHOLE]
    assert (len(first.asked), len(second.asked)) == (2, 0)


@pytest.mark.parametrize(
    "script", [[(STARTED, FIRST, BROKEN)], [(STARTED, BROKEN)] * 99], ids=["gone", "breaks again"]
)
async def test_it_is_given_up_in_time(script: Any) -> None:
    only = Scripted(*script)
    with pytest.raises(errors.StreamBroken, match="down"):
        await Client(resuming([only], 5.0)).complete(REQUEST)
    assert 3.0 < asyncio.get_running_loop().time() <= 5.0
    assert 5 < len(only.asked) < 40


async def test_without_time_to_resume_the_first_break_is_the_end() -> None:
    first, second = Scripted((STARTED, FIRST, BROKEN), (STARTED, SECOND, FINISHED)), Scripted()
    with pytest.raises(errors.StreamBroken):
        await heard(first, second, resume_timeout_s=0.0)
    assert (len(first.asked), len(second.asked)) == (1, 0)


async def test_a_request_that_did_not_begin_is_sent_to_each_once() -> None:
    first, second = Scripted(), Scripted(WHOLE)
    assert (await heard(first, second))[0] == [*WHOLE]
    assert second.asked == [None]
    first, second = Scripted(), Scripted()
    with pytest.raises(errors.StreamBroken):
        await heard(first, second)
    assert len(first.asked) == len(second.asked) == 1


@pytest.mark.parametrize(
    "scripts",
    [
        [(errors.Overloaded("full"),)],
        [(errors.NotFound("no"),)],
        [(STARTED, FIRST, errors.Overloaded("full"))],
        [(STARTED, FIRST, errors.Unavailable("no target"))],
        [(STARTED, FIRST, BROKEN), (errors.DataLoss("gone"),)],
    ],
)
async def test_what_a_coordinator_answers_stands(scripts: Any) -> None:
    other, error = Scripted(), scripts[-1][-1]
    with pytest.raises(type(error), match=error.message):
        await heard(Scripted(*scripts), other)
    assert not other.asked


async def test_a_request_is_sent_again_when_the_coordinator_says() -> None:
    away = errors.Unavailable("no target", 1500)
    one, other = Scripted((away,), WHOLE), Scripted((away,))
    events, time_s = await heard(one, other)
    assert (events, len(other.asked)) == ([*WHOLE], 1)
    assert 1.5 <= time_s < 1.5 + LEASE_WAIT_SPREAD_MS / 1e3
    one = Scripted(*[(away,)] * 99)
    with pytest.raises(errors.Unavailable, match="no target"):
        await heard(one, resume_timeout_s=5.0)
    assert 2 <= len(one.asked) <= 4
    soon = errors.Unavailable("no target", 1000)
    assert (await heard(Scripted(), Scripted((soon,), (soon,), WHOLE)))[0] == [*WHOLE]


async def test_calls_pass_over_a_coordinator_that_cannot_now() -> None:
    away = Scripted(*[(errors.Unavailable("no target", 60_000),)] * 9)
    transport = resuming([away, Scripted(*[WHOLE] * 9)])
    for _ in range(6):
        assert len([event async for event in transport.events(REQUEST, 600.0)]) == 4
    assert asyncio.get_running_loop().time() == 0.0
    assert len(away.asked) == 1


async def test_it_goes_round_until_one_has_the_session() -> None:
    leased = errors.Unavailable("another coordinator has it", 1700)
    gone = Scripted((STARTED, FIRST, BROKEN))
    events, time_s = await heard(gone, Scripted((leased,), (STARTED, SECOND, FINISHED)))
    assert events == [*WHOLE]
    assert 1.7 <= time_s < 1.8 + LEASE_WAIT_SPREAD_MS / 1e3
    assert len(gone.asked) == 2
    first = Scripted((STARTED, FIRST, BROKEN))
    second = Scripted((leased,), (leased,), (STARTED, SECOND, BROKEN), (FINISHED,))
    assert (await heard(first, second, Scripted()))[0] == [*WHOLE]
    assert {request.num_tokens for request in second.asked if request} == {2, 3}
    closing = errors.Unavailable("it closes", 1000)
    first = Scripted((STARTED, FIRST, BROKEN), *[(closing,)] * 20)
    second = Scripted(*[(closing,)] * 20)
    assert (await heard(first, second, Scripted((SECOND, FINISHED))))[0] == [*WHOLE]
    assert len(second.asked) == 2


async def test_other_calls_go_to_one_that_answers() -> None:
    each = [Scripted((BROKEN,), ("first",)), Scripted(("second",), (BROKEN,))]
    transport = resuming(each)
    assert await transport.call("describe", 1.0) == "second"
    assert await transport.call("describe", 1.0) == "first"
    assert await transport.call("healthy", 1.0)
    assert transport.address == "scripted,scripted"
    await transport.close()
    assert all(one.closed for one in each)


@pytest.mark.parametrize(
    "server", ["", ",127.0.0.1:1", lambda: ",", lambda: None, lambda: ["127.0.0.1:1"]]
)
def test_an_address_that_is_none_is_refused(server: Any) -> None:
    for kind in (Client, SyncClient):
        with pytest.raises(errors.BadRequest, match="HOST:PORT"):
            kind(server)


class Names:
    """A function that returns these texts one after the other, the last one repeatedly."""

    def __init__(self, *each: str | Exception) -> None:
        self.each = list(each)

    def __call__(self) -> str:
        found = self.each.pop(0) if len(self.each) > 1 else self.each[0]
        if isinstance(found, Exception):
            raise found
        return found


def pool(names: Any, now: list[float], first: int | None = 0) -> Any:
    """Endpoints are addresses in capitals instead of connections."""
    return failover.EndpointPool(names, str.upper, lambda: now[0], first)


def test_clients_that_wait_for_one_lease_do_not_wake_together() -> None:
    drawn, now, wakes = random.Random(3), [0.0], list[float]()
    for _ in range(500):
        left_ms = drawn.randint(1, 2000)
        now[0] = 2.0 - left_ms / 1e3
        tries = failover.Tries(pool("a", now), 60.0, drawn.random)
        tries.note(STARTED)
        tries.after(None, BROKEN, 1e9)
        _, wait_s = tries.after(None, errors.Unavailable("leased", left_ms), 1e9)
        wakes.append(now[0] + wait_s)
    assert min(wakes) >= 2.0 - 1e-9
    tenths = Counter(int((wake - 2.0) * 1e3 / LEASE_WAIT_SPREAD_MS * 10) for wake in wakes)
    assert len(tenths) >= 10
    assert max(tenths.values()) < 100


def test_coordinators_are_known_once_they_are_named(caplog: pytest.LogCaptureFixture) -> None:
    now, names = [0.0], Names("a,b", "b,c", OSError("no such file"), "", "c")
    found = pool(names, now)
    assert found.each == ["A", "B"]
    assert found.renew() == []  # It was called just now.
    for each in (["B", "C"], ["B", "C"], ["B", "C"], ["C"]):
        now[0] += failover.REREAD_PERIOD_S
        found.renew()
        assert found.each == each
    assert found.all == ["A", "B", "C"]
    assert len(caplog.records) == 1
    closed: list[str] = []
    found = pool(lambda: f"n{now[0]:.0f}", now)
    for _ in range(failover.GONE_MAX + 3):
        now[0] += 1
        closed += found.renew()
    assert (len(closed), len(found.all)) == (3, 1 + failover.GONE_MAX)


def test_calls_begin_with_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    turns = pool("a,b,c", now, first=2)
    assert [turns.begin() for _ in range(5)] == ["C", "A", "B", "C", "A"]
    assert turns.after("B") == "C"
    turns.after("A", 0.5)
    assert [turns.begin() for _ in range(2)] == ["C", "C"]
    now[0] = 0.5
    assert {turns.begin() for _ in range(4)} == {"A", "C"}
    now[0] = failover.AVOIDED_S
    assert {turns.begin() for _ in range(3)} == {"A", "B", "C"}
    for tried in "ABC":
        turns.after(tried)
    assert {turns.begin() for _ in range(3)} == {"A", "B", "C"}
    monkeypatch.setattr(secrets, "randbelow", lambda number: number - 1)
    assert pool("a,b,c", now, first=None).begin() == "C"  # Clients begin with different ones.


@pytest.mark.parametrize(
    ("named", "each"),
    [
        (["gone", "gone", "new"], {"gone": [(STARTED, FIRST, BROKEN)]}),
        (["gone", "new"], {"gone": []}),
        (["first,gone", "gone,new"], {"first": [], "gone": []}),
        ([*["gone"] * 5, "new"], {"gone": []}),
    ],
)
async def test_a_request_goes_on_at_a_coordinator_that_came_later(named: Any, each: Any) -> None:
    """1 s after the names were read. The only known ones are gone for good."""
    begun = any(script for script in each.values())
    new = Scripted((STARTED, SECOND, FINISHED) if begun else WHOLE)
    found = {name: Scripted(*script) for name, script in each.items()} | {"new": new}
    transport = failover.ResumingTransport(
        failover.EndpointPool(Names(*named), found.__getitem__, asyncio.get_running_loop().time)
    )
    await asyncio.sleep(1.0)
    assert [event async for event in transport.events(REQUEST, 60.0)] == [*WHOLE]
    await transport.close()
    assert all(one.closed for one in found.values())


@pytest.mark.parametrize("num_coordinators", [1, 8])
async def test_waits_begin_short_however_many_coordinators_there_are(num_coordinators: int) -> None:
    each = [Scripted((BROKEN,), (BROKEN,), WHOLE) for _ in range(num_coordinators)]
    clock, names = asyncio.get_running_loop().time, ",".join(map(str, range(num_coordinators)))
    endpoints = failover.EndpointPool(lambda: names, lambda name: each[int(name)], clock)
    transport = failover.ResumingTransport(endpoints, random=lambda: 0.0)
    assert [event async for event in transport.events(REQUEST, 60.0)] == [*WHOLE]
    assert clock() == pytest.approx(0.025 + 0.05)


class Falling(ScriptedServicer):
    """Its server stops after its events."""

    server: RpcServer

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        async for event in super().generate(request, context):
            yield event
        await self.server.stop(0)


@pytest.mark.virtual(False)
async def test_a_blocking_stream_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda _: 0)
    falling, other = Falling(STARTED, FIRST), ScriptedServicer(STARTED, SECOND, FINISHED)
    falling.server, server = await serve(falling), await serve(other)

    def use() -> list[Event]:
        with SyncClient(f"{falling.server.address}, {server.address}") as client:
            return list(client.generate(REQUEST))

    assert await asyncio.to_thread(use) == [*WHOLE]
    assert other.resumed == [(ID, 2)]
    await server.stop(0)


@pytest.mark.virtual(False)
@pytest.mark.parametrize("first", ["", "127.0.0.1:1"])
async def test_calls_wait_while_no_coordinator_answers(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.client.failover.REREAD_PERIOD_S", 0.0)
    server = await serve(ScriptedServicer(*WHOLE))

    def names() -> Names:
        return Names(*[first] * 3, server.address)

    def use() -> None:
        with SyncClient(names()) as client:
            assert client.describe().model == "demo"
        with SyncClient(names()) as client:
            assert list(client.generate(REQUEST)) == [*WHOLE]

    await asyncio.to_thread(use)
    async with Client(names()) as client:
        assert (await client.describe()).model == "demo"
    async with Client(lambda: "", resume_timeout_s=0) as client:
        assert not await client.healthy()
        for call in (client.describe(), client.complete(REQUEST)):
            with pytest.raises(errors.StreamBroken, match="no coordinator is known yet"):
                await call
    await server.stop(0)


@pytest.mark.virtual(False)
def test_threads_may_read_a_pool_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.client.failover.REREAD_PERIOD_S", 0.0)
    numbers = iter(range(10**9))
    found = failover.EndpointPool(lambda: ",".join(f"{next(numbers)}" for _ in range(50)), str)
    raised = list[Exception]()

    def read() -> None:
        try:
            while not is_over.is_set():
                assert len(found.each) == 50
        except Exception as error:  # noqa: BLE001
            raised.append(error)

    interval, is_over = sys.getswitchinterval(), threading.Event()
    sys.setswitchinterval(1e-6)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(300):
        found.renew()
    is_over.set()
    for reader in readers:
        reader.join()
    sys.setswitchinterval(interval)
    assert not raised
