"""The gate: who shows what, and how a generation holds its slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from told_coordinator import MemorySlots

from coordinator.auth.access_control import OPEN, AccessControl, access_control_of
from coordinator.auth.rate_limits import Limiter
from outrider.api_keys import ANYBODY, Caller
from outrider.errors import Overloaded, StoreUnavailable, Unauthenticated
from outrider.request import Event, Finished, Metrics, Started, Tokens, Usage
from outrider.sessions.store import Counters, FinishReason
from outrider.speculation.sampling_params import Rule

KEY = "a-key-of-16-characters"
LIMITED = Caller("alice", "alice", concurrency=1)
SESSION = "5" * 32


async def events(log: list[str], session_id: str = SESSION) -> AsyncGenerator[Event]:
    try:
        log.append("begun")
        yield Started(session_id, "model", 1, Rule.TOKEN)
        yield Tokens(0, (1,), "a", (), ())
        metrics = Metrics.of(Counters(), time_to_first_token_ms=0.0, tokens_per_second=0.0)
        yield Finished(FinishReason.STOP, Usage(1, 1), metrics)
    finally:
        log.append("closed")


async def generation(
    gate: AccessControl, caller: Caller, running: AsyncGenerator[Event], resumes: str = ""
) -> AsyncGenerator[Event]:
    """As the gRPC API counts it."""
    async with aclosing(running), gate.admit(caller, resumes) as grant:
        async for event in running:
            await grant.note(event)
            yield event


@pytest.mark.parametrize(
    "shown",
    [[], [""], ["Bearer"], ["Bearer "], [KEY], [f"Basic {KEY}"], [f"Bearer {KEY}x"],
     [f"Bearer x {KEY}"], ["Bearer " + "a" * 600], ["Bearer schlüssel-mit-umlaut"],
     [f"Bearer {KEY}", f"Bearer {KEY}"]],
)  # fmt: skip
def test_who_shows_no_key_is_refused(shown: list[str]) -> None:
    """In words that say what to send, and do not repeat what was sent."""
    with pytest.raises(Unauthenticated, match=r"^authorization: ") as caught:
        access_control_of(KEY, "").identify(shown)
    assert KEY not in caught.value.message


def test_who_shows_a_key_is_known() -> None:
    """However the scheme is written."""
    for shown in (f"Bearer {KEY}", f"bearer  {KEY} ", f"BEARER {KEY}"):
        assert access_control_of(KEY, "").identify([shown]).tenant.startswith("key-")


def test_without_keys_everybody_is_anybody() -> None:
    """Whatever is shown, once."""
    assert access_control_of("", "") is OPEN
    assert not OPEN.asks_for_keys
    assert OPEN.identify([f"Bearer {KEY}"]) is OPEN.identify([]) is ANYBODY
    with pytest.raises(Unauthenticated, match="there are several"):
        OPEN.identify(["Bearer a", "Bearer b"])


async def test_a_generation_has_a_slot_until_its_last_event() -> None:
    """Named after its session with the first renewal; free when the last event is there, so that
    who asks for the next one then has room."""
    slots, log = MemorySlots(), []
    gate = AccessControl(None, Limiter(slots, lambda: "new"))
    async with aclosing(generation(gate, LIMITED, events(log))) as running:
        assert isinstance(await anext(running), Started)
        assert slots.taken == {"new"}
        with pytest.raises(Overloaded):
            await anext(generation(gate, LIMITED, events([], "6" * 32), resumes="6" * 32))
        await anext(running)
        assert isinstance(await anext(running), Finished)
        assert slots.taken == set()
        second = generation(gate, LIMITED, events(log))
        await anext(second)
        await second.aclose()
    assert log == ["begun", "begun", "closed", "closed"]
    await gate.close()
    assert slots.taken == set()


async def test_a_resumption_goes_on_in_the_slot_of_its_session() -> None:
    """Beside the stream that has broken and is not closed yet; the slot is free when both are."""
    slots = MemorySlots()
    gate = AccessControl(None, Limiter(slots))
    old = generation(gate, LIMITED, events([]), resumes=SESSION)
    await anext(old)
    new = generation(gate, LIMITED, events([]), resumes=SESSION)
    await anext(new)
    assert slots.taken == {SESSION}
    assert slots.depths == [2, 2]
    await old.aclose()
    slots.taken.clear()
    await gate._limiter._tell(["alice"])  # type: ignore[union-attr]
    assert slots.taken == {SESSION}  # Said again: it is held.
    await new.aclose()
    await gate.close()
    assert slots.taken == set()


async def test_a_store_that_is_away_at_the_end_takes_no_answer_away() -> None:
    """The lease runs out by itself."""
    slots = MemorySlots()
    gate = AccessControl(None, Limiter(slots))
    seen = []
    async with aclosing(generation(gate, LIMITED, events([]))) as running:
        async for event in running:
            slots.away = True
            seen.append(type(event))
    assert seen == [Started, Tokens, Finished]
    await gate.close()


async def test_a_request_has_a_slot_for_each_generation() -> None:
    """All or none; they are free together."""
    slots = MemorySlots()
    gate = AccessControl(None, Limiter(slots))
    caller = Caller("carol", "carol", concurrency=4)
    async with gate.admit(caller, num_generations=3) as grant:
        assert len(slots.taken) == 3
        with pytest.raises(Overloaded):
            async with gate.admit(caller, num_generations=2):
                pass
        async with gate.admit(caller):
            assert len(slots.taken) == 4
        await gate._limiter._tell(["carol"])  # type: ignore[union-attr]
        assert len(slots.taken) == 3
        await grant.release()
        assert slots.taken == set()
    await gate.close()


class LateSlots(MemorySlots):
    """Takes slots, and says so late or never."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    async def take(self, caller: Caller, slots: Sequence[str], depth: int) -> None:
        await super().take(caller, slots, depth)
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize("error", [None, StoreUnavailable("no answer came")])
async def test_a_slot_that_nobody_heard_of_is_given_back(error: Exception | None) -> None:
    """Where its caller went before the store's answer came, or none came; but not that of a session
    that is resumed, which may be another stream's."""
    slots = LateSlots(error)
    gate = AccessControl(None, Limiter(slots))
    for resumes in ("", SESSION):
        admitting = asyncio.create_task(gate.admit(LIMITED, resumes).__aenter__())
        await asyncio.sleep(0)
        assert len(slots.taken) == 1
        admitting.cancel()
        await asyncio.gather(admitting, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert slots.taken == ({SESSION} if resumes else set())
    await gate.close()
