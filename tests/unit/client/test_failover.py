"""Generations whose stream breaks: what a caller hears, and which coordinator is asked when."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from test_client import FINISHED, FIRST, ID, SECOND, STARTED, _Coordinator

from outrider.client import Client, GenerateRequest, ResumeRequest, ResumingTransport, SyncClient
from outrider.client.failover import Told
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


class Scripted:
    """A transport that answers each call with the next entry of a script."""

    def __init__(self, *script: Sequence[Event | OutriderError]) -> None:
        self.script = list(script)
        self.asked: list[ResumeRequest | None] = []
        self.address = "scripted"
        self.closed = False
        self.event_s = 0.0

    def generate(self, request: GenerateRequest, timeout_s: float) -> AsyncGenerator[Event]:
        return self._next(None)

    def resume(self, request: ResumeRequest, timeout_s: float) -> AsyncGenerator[Event]:
        return self._next(request)

    async def _next(self, request: ResumeRequest | None) -> AsyncGenerator[Event]:
        self.asked.append(request)
        for event in self.script.pop(0) if self.script else (BROKEN,):
            await asyncio.sleep(self.event_s)
            if isinstance(event, OutriderError):
                raise event
            yield event

    async def describe(self, timeout_s: float) -> str:
        found = self.script.pop(0)[0]
        if isinstance(found, OutriderError):
            raise found
        return str(found)

    async def healthy(self, timeout_s: float) -> bool:
        return not self.script

    async def close(self) -> None:
        self.closed = True


def heard(*transports: Scripted, resume_timeout_s: float = 15.0) -> list[Event]:
    async def main() -> list[Event]:
        each: Any = transports
        client = Client(ResumingTransport(each, resume_timeout_s))
        return [event async for event in client.generate(REQUEST)]

    return run_virtually(main())


def test_a_broken_stream_goes_on_at_the_next_coordinator() -> None:
    first = Scripted((STARTED, FIRST, BROKEN))
    second = Scripted((STARTED, SECOND, FINISHED))
    assert heard(first, second) == [STARTED, FIRST, SECOND, FINISHED]
    [asked] = second.asked
    assert asked is not None
    assert (asked.session_id, asked.num_tokens, asked.num_characters) == (ID, 2, 2)
    assert asked.tokens_digest == TokenSequence(FIRST.token_ids).digest()
    assert 0 < DEADLINE_MS_DEFAULT - (asked.deadline_ms or 0) < 100  # It waited for a moment.


def test_a_connection_that_breaks_is_made_again_where_the_session_is() -> None:
    """Another coordinator would have to wait for the session's lease."""
    first, second = Scripted((STARTED, FIRST, BROKEN), (STARTED, SECOND, FINISHED)), Scripted()
    assert heard(first, second) == [STARTED, FIRST, SECOND, FINISHED]
    assert (len(first.asked), len(second.asked)) == (2, 0)


def test_of_several_that_break_at_once_all_go_on() -> None:
    """Every other one begins where nobody is soon; those that break must not send each other back
    there."""

    async def main() -> None:
        gone, there = Scripted(), Scripted()
        gone.event_s = there.event_s = 0.1
        whole = (STARTED, FIRST, SECOND, FINISHED)
        gone.script = [(STARTED, FIRST, BROKEN)] * 2
        there.script = [whole, whole, (STARTED, SECOND, FINISHED), (STARTED, SECOND, FINISHED)]
        each: Any = [gone, there]
        transport = ResumingTransport(each)

        async def one() -> list[Event]:
            return [event async for event in transport.generate(REQUEST, 60.0)]

        assert (
            await asyncio.gather(*(one() for _ in range(4)))
            == [[STARTED, FIRST, SECOND, FINISHED]] * 4
        )
        gone.script, there.script = [], [whole] * 4
        transport = ResumingTransport(each)
        assert (
            await asyncio.gather(*(one() for _ in range(4)))
            == [[STARTED, FIRST, SECOND, FINISHED]] * 4
        )

    run_virtually(main())


def test_a_session_that_breaks_whoever_takes_it_is_given_up() -> None:
    async def main() -> None:
        one, other = Scripted(), Scripted()
        one.script = [(STARTED, BROKEN)] * 999
        other.script = [(STARTED, BROKEN)] * 999
        each: Any = [one, other]
        with pytest.raises(StreamBroken):
            async for _ in ResumingTransport(each).generate(REQUEST, 600.0):
                pass
        assert asyncio.get_running_loop().time() < 16.0
        assert len(one.asked) + len(other.asked) < 40

    run_virtually(main())


def test_it_goes_round_until_one_has_the_session() -> None:
    """The lease of the one that is gone must run out first."""
    leased = Unavailable("another coordinator has it", 2000)
    first = Scripted((STARTED, FIRST, BROKEN), (BROKEN,), (BROKEN,))
    second = Scripted((leased,), (leased,), (STARTED, SECOND, BROKEN), (FINISHED,))
    third = Scripted()
    assert heard(first, second, third) == [STARTED, FIRST, SECOND, FINISHED]
    assert {request.num_tokens for request in second.asked if request} == {2, 3}


def test_with_one_coordinator_it_is_asked_again() -> None:
    """It may have been started anew."""
    only = Scripted((STARTED, BROKEN), (BROKEN,), (BROKEN,), (STARTED, FIRST, SECOND, FINISHED))
    assert heard(only) == [STARTED, FIRST, SECOND, FINISHED]


def test_it_is_given_up_in_time() -> None:
    async def main() -> None:
        only = Scripted((STARTED, FIRST, BROKEN))
        each: Any = [only]
        client = Client(ResumingTransport(each, 5.0))
        with pytest.raises(StreamBroken, match="down"):
            async for _ in client.generate(REQUEST):
                pass
        assert 3.0 < asyncio.get_running_loop().time() <= 5.0
        assert len(only.asked) > 5

    run_virtually(main())


def test_without_time_to_resume_the_first_break_is_the_end() -> None:
    """Also where the same coordinator would go on."""
    first, second = Scripted((STARTED, FIRST, BROKEN), (STARTED, SECOND, FINISHED)), Scripted()
    with pytest.raises(StreamBroken):
        heard(first, second, resume_timeout_s=0.0)
    assert (len(first.asked), len(second.asked)) == (1, 0)


def test_nothing_told_yet_is_asked_anew_of_each_once() -> None:
    first, second = Scripted((BROKEN,)), Scripted((STARTED, FIRST, SECOND, FINISHED))
    assert heard(first, second) == [STARTED, FIRST, SECOND, FINISHED]
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


def test_what_cannot_begin_now_is_asked_for_again_when_the_coordinator_says() -> None:
    """The next one, which may reach what that one does not; and not for ever."""

    async def main() -> None:
        away, loop = Unavailable("no target", 1500), asyncio.get_running_loop()
        one, other = Scripted((away,), (STARTED, FIRST, SECOND, FINISHED)), Scripted((away,))
        each: Any = [one, other]
        transport = ResumingTransport(each, random=lambda: 0.0)
        found = [event async for event in transport.generate(REQUEST, 600.0)]
        assert found == [STARTED, FIRST, SECOND, FINISHED]
        assert loop.time() == pytest.approx(1.5)
        assert len(other.asked) == 1
        each = [Scripted(*[(away,)] * 99)]
        with pytest.raises(Unavailable, match="no target"):
            transport = ResumingTransport(each, 5.0, random=lambda: 0.0)
            async for _ in transport.generate(REQUEST, 600.0):
                pass
        assert loop.time() <= 1.5 + 5.0
        assert len(each[0].asked) == 4

    run_virtually(main())


def test_of_those_that_take_long_to_say_no_each_is_asked_once() -> None:
    """A coordinator waits itself for a target to come."""

    async def main() -> None:
        each: Any = [Scripted(*[(Unavailable("no target"),)] * 9) for _ in range(2)]
        for one in each:
            one.event_s = 60.0
        with pytest.raises(Unavailable, match="no target"):
            async for _ in ResumingTransport(each).generate(REQUEST, 600.0):
                pass
        assert [len(one.asked) for one in each] == [1, 1]

    run_virtually(main())


def test_calls_pass_over_a_coordinator_that_cannot_now() -> None:
    """Neither do those wait that find it so, nor do others begin there until it said."""

    async def main() -> None:
        whole = (STARTED, FIRST, SECOND, FINISHED)
        away = Scripted(*[(Unavailable("no target", 60_000),)] * 9)
        each: Any = [away, Scripted(*[whole] * 9)]
        transport = ResumingTransport(each)
        for _ in range(6):
            assert len([event async for event in transport.generate(REQUEST, 600.0)]) == 4
        assert asyncio.get_running_loop().time() == 0.0
        assert len(away.asked) == 1

    run_virtually(main())


def test_one_that_is_gone_does_not_keep_others_from_being_asked_again() -> None:
    async def main() -> None:
        soon = Unavailable("no target", 1000)
        gone = Scripted(*[(BROKEN,)] * 9)
        each: Any = [gone, Scripted((soon,), (soon,), (STARTED, FIRST, SECOND, FINISHED))]
        found = [event async for event in ResumingTransport(each).generate(REQUEST, 600.0)]
        assert found == [STARTED, FIRST, SECOND, FINISHED]

    run_virtually(main())


def test_a_session_that_has_an_owner_is_asked_for_when_that_ones_lease_is_over() -> None:
    async def main() -> None:
        leased = Unavailable("another coordinator has it", 1700)
        gone, other = (
            Scripted((STARTED, FIRST, BROKEN)),
            Scripted((leased,), (STARTED, SECOND, FINISHED)),
        )
        each: Any = [gone, other]
        found = [event async for event in ResumingTransport(each).generate(REQUEST, 600.0)]
        assert found == [STARTED, FIRST, SECOND, FINISHED]
        # The first question is put a moment after the stream broke.
        assert 1.7 <= asyncio.get_running_loop().time() < 1.8 + LEASE_WAIT_SPREAD_MS / 1e3
        assert len(gone.asked) == 2

    run_virtually(main())


def test_clients_that_wait_for_one_lease_do_not_wake_together() -> None:
    """Nor early, whenever in its last two seconds they were told of it."""
    drawn = random.Random(3)
    wakes = []
    for _ in range(500):
        told = Told(2, 60.0, random=drawn.random)
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
    assert heard(first, second, third) == [STARTED, FIRST, SECOND, FINISHED]
    assert len(second.asked) == 2


def test_a_session_that_is_lost_ends_the_stream() -> None:
    with pytest.raises(DataLoss):
        heard(Scripted((STARTED, FIRST, BROKEN)), Scripted((DataLoss("gone"),)))


def test_waits_grow_and_begin_anew_with_what_comes() -> None:
    told = Told(2, 60.0, random=lambda: 1.0)
    assert told.rest(9.0) is None
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


def test_other_calls_go_to_one_that_answers() -> None:
    async def main() -> None:
        each: Any = [Scripted((BROKEN,), ("first",)), Scripted(("second",), (BROKEN,))]
        transport = ResumingTransport(each)
        assert await transport.describe(1.0) == "second"
        assert await transport.describe(1.0) == "first"
        assert await transport.healthy(1.0)
        assert transport.address == "scripted,scripted"
        await transport.close()
        assert all(one.closed for one in each)

    run_virtually(main())


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
    assert found == [STARTED, FIRST, SECOND, FINISHED]
    assert other.resumed == [(ID, 2)] * 2
    await server.stop()
