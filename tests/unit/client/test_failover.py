"""Generations whose stream breaks: what a caller hears, and which coordinator is asked when."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from test_client import FINISHED, FIRST, ID, SECOND, STARTED, _Coordinator
from virtual_time import virtually

from outrider.client import Client, GenerateRequest, ResumeRequest, SyncClient, Transport
from outrider.client.failover import (
    AVOIDED_S,
    GONE_MAX,
    LOOK_S,
    EndpointPool,
    ResumingTransport,
    StreamProgress,
)
from outrider.clock import run_virtually
from outrider.errors import (
    BadRequest,
    DataLoss,
    NotFound,
    OutriderError,
    Overloaded,
    StreamBroken,
    Unavailable,
)
from outrider.limits import DEADLINE_MS_DEFAULT, LEASE_WAIT_SPREAD_MS
from outrider.request import Event
from outrider.tokens import TokenSequence
from outrider.transport.server import RpcServer, Service
from outrider.v1 import coordinator_pb2 as pb

BROKEN = StreamBroken("down")
REQUEST = GenerateRequest((1,))
WHOLE = (STARTED, FIRST, SECOND, FINISHED)


class Scripted:
    """A transport that answers each call with the next entry of a script."""

    def __init__(self, *script: Sequence[Event | OutriderError]) -> None:
        self.script = list(script)
        self.asked: list[ResumeRequest | None] = []
        self.address = "scripted"
        self.closed = False
        self.event_s = 0.0

    def events(self, request: Any, timeout_s: float) -> AsyncGenerator[Event]:
        return self._next(request if isinstance(request, ResumeRequest) else None)

    async def _next(self, request: ResumeRequest | None) -> AsyncGenerator[Event]:
        self.asked.append(request)
        for event in self.script.pop(0) if self.script else (BROKEN,):
            await asyncio.sleep(self.event_s)
            if isinstance(event, OutriderError):
                raise event
            yield event

    async def call(self, method: str, timeout_s: float, session_id: str = "") -> Any:
        if method == "healthy":
            return not self.script
        found = self.script.pop(0)[0]
        if isinstance(found, OutriderError):
            raise found
        return str(found)

    async def close(self) -> None:
        self.closed = True


def resuming(each: Any, *fields: Any, **named: Any) -> ResumingTransport:
    return ResumingTransport(each, *fields, **named)


async def heard_at(each: Sequence[Scripted], *fields: Any, **named: Any) -> list[Event]:
    """Of a request with all the time that it may take."""
    transport = resuming(each, *fields, **named)
    return [event async for event in transport.events(REQUEST, 600.0)]


def heard(*transports: Scripted, resume_timeout_s: float = 15.0) -> list[Event]:
    async def main() -> list[Event]:
        client = Client(resuming(transports, resume_timeout_s))
        return [event async for event in client.generate(REQUEST)]

    return run_virtually(main())


def test_a_broken_stream_goes_on_at_the_next_coordinator() -> None:
    first = Scripted((STARTED, FIRST, BROKEN))
    second = Scripted((STARTED, SECOND, FINISHED))
    assert heard(first, second) == [*WHOLE]
    [asked] = second.asked
    assert asked is not None
    assert (asked.session_id, asked.num_tokens, asked.num_characters) == (ID, 2, 2)
    assert asked.tokens_digest == TokenSequence(FIRST.token_ids).digest()
    assert 0 < DEADLINE_MS_DEFAULT - (asked.deadline_ms or 0) < 100  # It waited for a moment.


def test_a_connection_that_breaks_is_made_again_where_the_session_is() -> None:
    """Another coordinator would have to wait for the session's lease."""
    first, second = Scripted((STARTED, FIRST, BROKEN), (STARTED, SECOND, FINISHED)), Scripted()
    assert heard(first, second) == [*WHOLE]
    assert (len(first.asked), len(second.asked)) == (2, 0)


def test_of_several_that_break_at_once_all_go_on() -> None:
    """Every other one begins where nobody is soon; those that break must not send each other back
    there."""

    async def main() -> None:
        gone, there = Scripted(), Scripted()
        gone.event_s = there.event_s = 0.1
        whole = WHOLE
        gone.script = [(STARTED, FIRST, BROKEN)] * 2
        there.script = [whole, whole, (STARTED, SECOND, FINISHED), (STARTED, SECOND, FINISHED)]
        each = [gone, there]
        transport = resuming(each)

        async def one() -> list[Event]:
            return [event async for event in transport.events(REQUEST, 60.0)]

        assert await asyncio.gather(*(one() for _ in range(4))) == [[*WHOLE]] * 4
        gone.script, there.script = [], [whole] * 4
        transport = resuming(each)
        assert await asyncio.gather(*(one() for _ in range(4))) == [[*WHOLE]] * 4

    run_virtually(main())


@virtually
async def test_a_session_that_breaks_whoever_takes_it_is_given_up() -> None:
    one, other = Scripted(), Scripted()
    one.script = [(STARTED, BROKEN)] * 999
    other.script = [(STARTED, BROKEN)] * 999
    each = [one, other]
    with pytest.raises(StreamBroken):
        await heard_at(each)
    assert asyncio.get_running_loop().time() < 16.0
    assert len(one.asked) + len(other.asked) < 40


def test_it_goes_round_until_one_has_the_session() -> None:
    """The lease of the one that is gone must run out first."""
    leased = Unavailable("another coordinator has it", 2000)
    first = Scripted((STARTED, FIRST, BROKEN), (BROKEN,), (BROKEN,))
    second = Scripted((leased,), (leased,), (STARTED, SECOND, BROKEN), (FINISHED,))
    third = Scripted()
    assert heard(first, second, third) == [*WHOLE]
    assert {request.num_tokens for request in second.asked if request} == {2, 3}


@virtually
async def test_it_is_given_up_in_time() -> None:
    only = Scripted((STARTED, FIRST, BROKEN))
    each = [only]
    client = Client(resuming(each, 5.0))
    with pytest.raises(StreamBroken, match="down"):
        async for _ in client.generate(REQUEST):
            pass
    assert 3.0 < asyncio.get_running_loop().time() <= 5.0
    assert len(only.asked) > 5


def test_without_time_to_resume_the_first_break_is_the_end() -> None:
    """Also where the same coordinator would go on."""
    first, second = Scripted((STARTED, FIRST, BROKEN), (STARTED, SECOND, FINISHED)), Scripted()
    with pytest.raises(StreamBroken):
        heard(first, second, resume_timeout_s=0.0)
    assert (len(first.asked), len(second.asked)) == (1, 0)


def test_nothing_told_yet_is_asked_anew_of_each_once() -> None:
    first, second = Scripted((BROKEN,)), Scripted(WHOLE)
    assert heard(first, second) == [*WHOLE]
    assert second.asked == [None]
    first, second = Scripted((BROKEN,)), Scripted((BROKEN,))
    with pytest.raises(StreamBroken):
        heard(first, second)
    assert len(first.asked) == len(second.asked) == 1


@pytest.mark.parametrize(
    "script",
    [
        (Overloaded("full"),),
        (NotFound("no"),),
        (STARTED, FIRST, Overloaded("full")),
        (STARTED, FIRST, Unavailable("no target")),
    ],
)
def test_what_a_coordinator_answers_stands(script: tuple[Event | OutriderError, ...]) -> None:
    other, error = Scripted(), script[-1]
    assert isinstance(error, OutriderError)
    with pytest.raises(type(error), match=error.message):
        heard(Scripted(script), other)
    assert not other.asked


@virtually
async def test_what_cannot_begin_now_is_asked_for_again_when_the_coordinator_says() -> None:
    """The next one, which may reach what that one does not; and not for ever."""
    away, loop = Unavailable("no target", 1500), asyncio.get_running_loop()
    one, other = Scripted((away,), WHOLE), Scripted((away,))
    each = [one, other]
    found = await heard_at(each, random=lambda: 0.0)
    assert found == [*WHOLE]
    assert loop.time() == pytest.approx(1.5)
    assert len(other.asked) == 1
    each = [Scripted(*[(away,)] * 99)]
    with pytest.raises(Unavailable, match="no target"):
        await heard_at(each, 5.0, random=lambda: 0.0)
    assert loop.time() <= 1.5 + 5.0
    assert len(each[0].asked) == 4


@virtually
async def test_of_those_that_take_long_to_say_no_each_is_asked_once() -> None:
    """A coordinator waits itself for a target to come."""
    each = [Scripted(*[(Unavailable("no target"),)] * 9) for _ in range(2)]
    for one in each:
        one.event_s = 60.0
    with pytest.raises(Unavailable, match="no target"):
        await heard_at(each)
    assert [len(one.asked) for one in each] == [1, 1]


@virtually
async def test_calls_pass_over_a_coordinator_that_cannot_now() -> None:
    """Neither do those wait that find it so, nor do others begin there until it said."""
    whole = WHOLE
    away = Scripted(*[(Unavailable("no target", 60_000),)] * 9)
    each = [away, Scripted(*[whole] * 9)]
    transport = resuming(each)
    for _ in range(6):
        assert len([event async for event in transport.events(REQUEST, 600.0)]) == 4
    assert asyncio.get_running_loop().time() == 0.0
    assert len(away.asked) == 1


@virtually
async def test_one_that_is_gone_does_not_keep_others_from_being_asked_again() -> None:
    soon = Unavailable("no target", 1000)
    gone = Scripted(*[(BROKEN,)] * 9)
    each = [gone, Scripted((soon,), (soon,), WHOLE)]
    found = await heard_at(each)
    assert found == [*WHOLE]


@virtually
async def test_a_session_that_has_an_owner_is_asked_for_when_that_ones_lease_is_over() -> None:
    leased = Unavailable("another coordinator has it", 1700)
    gone, other = (
        Scripted((STARTED, FIRST, BROKEN)),
        Scripted((leased,), (STARTED, SECOND, FINISHED)),
    )
    each = [gone, other]
    found = await heard_at(each)
    assert found == [*WHOLE]
    # The first question is put a moment after the stream broke.
    assert 1.7 <= asyncio.get_running_loop().time() < 1.8 + LEASE_WAIT_SPREAD_MS / 1e3
    assert len(gone.asked) == 2


def test_clients_that_wait_for_one_lease_do_not_wake_together() -> None:
    """Nor early, whenever in its last two seconds they were told of it."""
    drawn = random.Random(3)
    wakes = []
    for _ in range(500):
        told = StreamProgress(2, 60.0, random=drawn.random)
        told.note(STARTED)
        left_ms = drawn.randint(1, 2000)
        now = 2.0 - left_ms / 1e3
        told.wait_after(BROKEN, now, 1e9)
        wakes.append(now + told.wait_after(Unavailable("leased", left_ms), now, 1e9))
    assert min(wakes) >= 2.0 - 1e-9
    tenths = Counter(int((wake - 2.0) * 1e3 / LEASE_WAIT_SPREAD_MS * 10) for wake in wakes)
    assert len(tenths) >= 10
    assert max(tenths.values()) < 100


def test_nobody_stays_at_one_that_never_can() -> None:
    """Two of three coordinators close."""
    closing = Unavailable("it closes", 1000)
    first, second, third = (
        Scripted((STARTED, FIRST, BROKEN), *[(closing,)] * 20),
        Scripted(*[(closing,)] * 20),
        Scripted((SECOND, FINISHED)),
    )
    assert heard(first, second, third) == [*WHOLE]
    assert len(second.asked) == 2


def test_a_session_that_is_lost_ends_the_stream() -> None:
    with pytest.raises(DataLoss):
        heard(Scripted((STARTED, FIRST, BROKEN)), Scripted((DataLoss("gone"),)))


def test_waits_grow_and_begin_anew_with_what_comes() -> None:
    told = StreamProgress(2, 60.0, random=lambda: 1.0)
    assert told.remainder(9.0) is None
    assert told.note(STARTED)
    waits = [told.wait_after(BROKEN, now, 1e9) for now in range(8)]
    assert waits == sorted(waits)
    assert waits[-1] == 1.0
    assert not told.note(STARTED)
    assert told.wait_after(BROKEN, 8.0, 1e9) == waits[-1]
    assert told.note(FIRST)
    assert told.wait_after(BROKEN, 100.0, 1e9) == waits[0]
    with pytest.raises(StreamBroken):
        told.wait_after(BROKEN, 100.0, 100.0)


@virtually
async def test_other_calls_go_to_one_that_answers() -> None:
    each = [Scripted((BROKEN,), ("first",)), Scripted(("second",), (BROKEN,))]
    transport = resuming(each)
    assert await transport.call("describe", 1.0) == "second"
    assert await transport.call("describe", 1.0) == "first"
    assert await transport.call("healthy", 1.0)
    assert transport.address == "scripted,scripted"
    await transport.close()
    assert all(one.closed for one in each)


@pytest.mark.parametrize("server", ["", "127.0.0.1:1,", ",127.0.0.1:1"])
def test_an_address_that_is_none_is_refused(server: str) -> None:
    for kind in (Client, SyncClient):
        with pytest.raises(BadRequest, match="HOST:PORT"):
            kind(server)


class Falling(_Coordinator):
    """Ends its server in the middle of its first stream."""

    server: RpcServer

    async def generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateEvent]:
        async for event in super().generate(request, context):
            yield event
        await self.server.stop(0)


async def serve(coordinator: _Coordinator) -> RpcServer:
    descriptor = pb.DESCRIPTOR.services_by_name["Coordinator"]
    server = RpcServer([Service(descriptor, coordinator)])
    await server.start()
    await server.set_serving(True)
    return server


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_server_that_ends_within_a_stream_is_replaced_by_the_other(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda _: 0)
    falling, other = Falling(), _Coordinator()
    falling.events, other.events = (STARTED, FIRST), (STARTED, SECOND, FINISHED)
    falling.server, server = await serve(falling), await serve(other)
    addresses = f"{falling.server.address}, {server.address}"

    def block() -> list[Event]:
        with SyncClient(addresses) as client:
            found = list(client.generate(REQUEST))
            assert client.healthy()
            assert client.describe().model == "demo"
            assert list(client.resume(ID, 2)) == [STARTED, SECOND, FINISHED]
            return found

    if blocking:
        found = await asyncio.to_thread(block)
    else:
        async with Client(addresses) as client:
            found = [event async for event in client.generate(REQUEST)]
            assert [event async for event in client.resume(ID, 2)] == [STARTED, SECOND, FINISHED]
    assert found == [*WHOLE]
    assert other.resumed == [(ID, 2)] * 2
    await server.stop()


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


def known(names: Callable[[], str], now: list[float]) -> EndpointPool[str]:
    return EndpointPool(names, str.upper, lambda: now[0])


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


def heard_of(names: Names, each: dict[str, Scripted]) -> list[Event]:
    """Of a request, 1 s after the names were asked for."""

    async def main() -> list[Event]:
        loop, connect = asyncio.get_running_loop(), each.__getitem__
        found: EndpointPool[Transport] = EndpointPool(names, connect, loop.time)  # type: ignore[arg-type]
        transport = ResumingTransport(found)
        await asyncio.sleep(1.0)
        try:
            return [event async for event in transport.events(REQUEST, 60.0)]
        finally:
            await transport.close()
            assert all(one.closed for one in each.values())

    return run_virtually(main())


def test_a_stream_goes_on_at_one_that_came_later() -> None:
    """The only one that was known is gone for good."""
    gone, new = Scripted((STARTED, FIRST, BROKEN)), Scripted((STARTED, SECOND, FINISHED))
    names = Names("gone", "gone", "new")
    assert heard_of(names, {"gone": gone, "new": new}) == [*WHOLE]
    [asked] = new.asked
    assert asked is not None
    assert asked.num_tokens == 2


def test_a_request_begins_at_one_that_came_later() -> None:
    gone, new = Scripted(), Scripted(WHOLE)
    assert heard_of(Names("gone", "new"), {"gone": gone, "new": new}) == [*WHOLE]
    assert len(gone.asked) == 1
    first, second, new = Scripted(), Scripted(), Scripted(WHOLE)
    each = {"first": first, "second": second, "new": new}
    assert heard_of(Names("first,second", "second,new"), each) == [*WHOLE]
    gone, new = Scripted(), Scripted(WHOLE)
    assert heard_of(Names(*["gone"] * 5, "new"), {"gone": gone, "new": new}) == [*WHOLE]
    with pytest.raises(StreamBroken):
        heard_of(Names("a", "b"), {"a": Scripted(), "b": Scripted()})


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("first", ["", "127.0.0.1:1"])
async def test_calls_wait_while_no_coordinator_answers(
    blocking: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function names none yet, or only one that has gone: generations and other calls ask
    again until it names one that answers. A client that does not ask again says what is missing."""
    monkeypatch.setattr("outrider.client.failover.LOOK_S", 0.0)
    there = _Coordinator()
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


def pool(number: int, now: list[float], first: int = 0) -> EndpointPool[int]:
    names = ",".join(map(str, range(number)))
    return EndpointPool(names, int, lambda: now[0], first)


def test_calls_begin_with_each_in_turn() -> None:
    turns = pool(3, [0.0], first=2)
    assert [turns.begin() for _ in range(5)] == [2, 0, 1, 2, 0]


def test_one_that_does_not_answer_is_passed_over_for_a_while() -> None:
    """Or for as long as it says; what another call says of its session ends no wait."""
    now = [0.0]
    turns = pool(3, now)
    assert turns.after(turns.begin()) == 1
    turns.after(0, 0.0)
    assert [turns.begin() for _ in range(4)] == [1, 2, 1, 2]
    now[0] = AVOIDED_S
    assert [turns.begin() for _ in range(3)] == [0, 1, 2]
    turns = pool(2, now)
    assert turns.after(turns.begin(), 0.5) == 1
    assert [turns.begin() for _ in range(2)] == [1, 1]
    now[0] += 0.5
    assert [turns.begin() for _ in range(2)] == [0, 1]


def test_where_none_answers_all_are_called() -> None:
    turns = pool(2, [0.0])
    for tried in range(2):
        turns.after(tried)
    assert [turns.begin() for _ in range(3)] == [0, 1, 0]


def test_clients_begin_with_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda number: number - 1)
    addresses = "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"
    assert EndpointPool(addresses, str).begin() == "127.0.0.1:3"
