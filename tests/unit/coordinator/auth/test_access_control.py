"""Access control: API keys, and how a generation holds its slot."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from unittest.mock import AsyncMock

import pytest

from coordinator.auth.access_control import (
    OPEN,
    AccessControl,
    RateExceeded,
    RedisSlots,
    watch_keys,
)
from outrider.errors import (
    Overloaded,
    SessionNotFound,
    StoreUnavailable,
    Unauthenticated,
    Unavailable,
)
from outrider.foundation.api_keys import ANYBODY, Caller, given_keys, key_hash
from outrider.interfaces.request import Event, Finished, Started, Tokens
from outrider.redis.address import RedisAddress
from outrider.speculation.sampling_params import Rule
from tests.support.script_store import ScriptStore
from tests.support.told_coordinator import FINISHED, TOKENS, MemorySlots

KEY = "a-key-of-16-characters"
LIMITED = Caller("alice", "alice", concurrency=1)
SESSION = "5" * 32


def knowing(key: str) -> AccessControl:
    return AccessControl(watch_keys(None, given_keys(key)))


async def generation(
    access: AccessControl, caller: Caller = LIMITED, resumes: str = "", session_id: str = SESSION
) -> AsyncGenerator[Event]:
    """A generation that takes its slot as the gRPC API does."""
    async with access.admit(caller, [resumes] if resumes else []) as grant:
        for event in (Started(session_id, "model", 1, Rule.TOKEN), TOKENS, FINISHED):
            await grant.note(event)
            yield event


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [KEY],
        [f"Basic {KEY}"],
        [f"Bearer {KEY}x"],
        [f"Bearer x {KEY}"],
        ["Bearer " + "a" * 600],
        ["Bearer schlüssel-mit-umlaut"],
        [f"Bearer {KEY}", f"Bearer {KEY}"],
    ],
)
def test_a_call_without_a_key_is_refused(shown: list[str]) -> None:
    with pytest.raises(Unauthenticated, match=r"^authorization: ") as caught:
        knowing(KEY).identify(shown)
    assert KEY not in caught.value.message


def test_no_key_is_none_even_if_its_hash_is_configured() -> None:
    """`sha256sum` of an unset variable gives this hash."""
    for shown in ("Bearer", "Bearer "):
        with pytest.raises(Unauthenticated):
            knowing(key_hash("")).identify([shown])


def test_a_caller_is_known_by_its_key() -> None:
    """The scheme may have any case. If no keys are configured, all callers are the same."""
    for shown in (f"Bearer {KEY}", f"bearer  {KEY} ", f"BEARER {KEY}"):
        assert knowing(KEY).identify([shown]).tenant.startswith("key-")
    assert OPEN.identify([f"Bearer {KEY}"]) is OPEN.identify([]) is ANYBODY
    with pytest.raises(Unauthenticated, match="got 2 values"):
        OPEN.identify(["Bearer a", "Bearer b"])


async def test_a_generation_has_a_slot_until_its_last_event() -> None:
    slots = MemorySlots()
    access = AccessControl(None, slots)
    async with aclosing(generation(access)) as running:
        await anext(running)
        assert len(slots.taken) == 1
        with pytest.raises(Overloaded):
            await anext(generation(access, resumes="6" * 32, session_id="6" * 32))
        await anext(running)
        assert await anext(running) is FINISHED
        assert slots.taken == set()
        second = generation(access)
        await anext(second)
        await second.aclose()
    await access.close()
    assert slots.taken == set()


async def test_a_resumption_uses_the_slot_of_its_session() -> None:
    """Also while the broken stream still holds it. It is free when both are closed."""
    slots = MemorySlots()
    access = AccessControl(None, slots)
    old, new = (generation(access, resumes=SESSION) for _ in range(2))
    await anext(old)
    await anext(new)
    assert slots.taken == {SESSION}
    assert slots.depths == [2, 2]
    await old.aclose()
    slots.taken.clear()
    await access._update_store({"alice": ()})
    assert slots.taken == {SESSION}  # The lease was renewed.
    await new.aclose()
    await access.close()
    assert slots.taken == set()


async def test_a_resumption_that_fails_frees_no_slot() -> None:
    """Else a caller could free the slot of a session that runs at another coordinator."""
    slots = MemorySlots()
    here, there = AccessControl(None, slots), AccessControl(None, slots)
    running = generation(here)
    await anext(running)
    while slots.taken != {SESSION}:
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        async with there.admit(LIMITED, [SESSION]):
            raise Unavailable("the session has an owner")
    await there.close()
    assert slots.taken == {SESSION}
    await running.aclose()
    await here.close()
    assert slots.taken == set()


async def test_a_resumption_of_no_session_keeps_no_slot() -> None:
    slots = MemorySlots()
    access = AccessControl(None, slots)
    with pytest.raises(SessionNotFound):
        async with access.admit(LIMITED, [SESSION]):
            raise SessionNotFound("it has expired")
    await access.close()
    assert slots.taken == set()


async def test_a_store_that_is_away_at_the_end_costs_no_events() -> None:
    slots = MemorySlots()
    access = AccessControl(None, slots)
    seen = []
    async for event in generation(access):
        slots.away = True
        seen.append(type(event))
    assert seen == [Started, Tokens, Finished]
    await access.close()


@pytest.mark.parametrize("error", [None, StoreUnavailable("no answer came")])
async def test_a_slot_whose_grant_was_lost_is_freed(error: Exception | None) -> None:
    """The slot of a resumed session is not freed, as another stream may use it."""
    slots: Any = MemorySlots()
    take = slots.take

    async def take_late(*arguments: Any) -> None:
        """Takes slots, and then fails or never answers."""
        await take(*arguments)
        if error is not None:
            raise error
        await asyncio.Event().wait()

    slots.take = take_late
    access = AccessControl(None, slots)
    for resumes in ([], [SESSION]):
        admitting = asyncio.create_task(access.admit(LIMITED, resumes).__aenter__())
        await asyncio.sleep(0)
        assert len(slots.taken) == 1
        admitting.cancel()
        await asyncio.gather(admitting, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert slots.taken == set(resumes)
    await access.close()


@pytest.mark.virtual
async def test_a_request_without_a_free_slot_counts_if_its_body_was_read() -> None:
    """Otherwise a caller without a free slot could have any number of bodies parsed."""
    loop = asyncio.get_running_loop()
    slots = RedisSlots(RedisAddress(url="redis://unused"))
    slots._scripts = ScriptStore(lambda: loop.time() * 1e3)  # type: ignore[assignment]
    access = AccessControl(None, slots)
    caller = Caller("alice", "alice", requests_per_minute=3, concurrency=1)
    resumes = AsyncMock(return_value=False)
    async with access.admit(caller):
        for _ in range(10):  # These do not count.
            with pytest.raises(Overloaded, match="at a time"):
                async with access.admit(caller):
                    pass
        for _ in range(2):
            await access.count(caller, resumes)
            with pytest.raises(Overloaded) as refused:
                async with access.admit(caller, is_counted=True):
                    pass
            assert refused.value.limit == "concurrency"
        with pytest.raises(RateExceeded):
            await access.count(caller, resumes)
    await access.close()
