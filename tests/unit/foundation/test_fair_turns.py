"""Turns of tenants at scarce places."""

import asyncio
import threading
from typing import Any

import pytest

from outrider.errors import Overloaded
from outrider.foundation.fair_turns import FairQueue, FairThreads, WaitingLimits, WaitingWork

THINGS = WaitingLimits(3, 5, "things wait", "things")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def take(queue: FairQueue[Any], begun: list[str], name: str) -> asyncio.Task[None]:
    """Waits for a place, and adds the name to `begun`. The tenant is the name's first letter."""

    async def wait() -> None:
        await queue.acquire(name[0])
        begun.append(name)

    return asyncio.create_task(wait())


async def test_a_tenant_with_much_work_holds_up_no_other() -> None:
    places = ["c1", "c2"]
    queue, begun = FairQueue(places), list[str]()
    tasks = [take(queue, begun, f"a{index}") for index in range(6)]
    await settle()
    assert begun == ["a0", "a1"]
    tasks += [take(queue, begun, name) for name in ("b0", "b1", "c0")]
    await settle()
    for _ in range(7):
        queue.release(places[0])
        await settle()
    assert begun == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "a4", "a5"]


async def test_places_that_are_given_back_together_are_taken_together() -> None:
    queue, begun = FairQueue(range(8)), list[str]()
    for _ in range(8):
        await queue.acquire("a")
    tasks = [take(queue, begun, f"{'ab'[index % 2]}{index}") for index in range(16)]
    await settle()
    assert not begun
    for place in range(8):
        queue.release(place)
    await asyncio.sleep(0)
    assert begun == [f"{'ab'[index % 2]}{index}" for index in range(8)]
    for place in range(8):
        queue.release(place)
    await asyncio.gather(*tasks)


async def test_work_without_a_size_takes_turns_and_gives_its_place_back() -> None:
    """As an empty prompt."""
    queue, done = FairQueue(["c"], WaitingWork(THINGS)), 0

    async def work() -> None:
        nonlocal done
        place = await queue.acquire("a", 0)
        await asyncio.sleep(0)
        queue.release(place)
        done += 1

    async with asyncio.timeout(5):
        await asyncio.gather(*(work() for _ in range(8)))
        assert await queue.acquire("b") == "c"
    assert done == 8


async def test_what_waits_is_limited() -> None:
    queue, begun = FairQueue(["c"], WaitingWork(THINGS)), list[str]()
    waiting = [take(queue, begun, f"a{index}") for index in range(4)]
    await settle()
    with pytest.raises(Overloaded, match=r"^3 things wait for your tenant; allowed: 3; try"):
        await queue.acquire("a")
    waiting += [take(queue, begun, f"b{index}") for index in range(2)]
    await settle()
    with pytest.raises(Overloaded, match=r"^5 things wait for all tenants; allowed: 5; try"):
        await queue.acquire("c")
    waiting[1].cancel()
    await settle()
    waiting.append(take(queue, begun, "c0"))
    queue.release("c")
    waiting[4].cancel()  # The task has been given the place, but has not run since.
    for _ in range(3):
        await settle()
        queue.release("c")
    await settle()
    assert sorted(begun) == ["a0", "a2", "a3", "b1", "c0"]


async def test_cancelled_work_costs_its_tenant_no_turn() -> None:
    queue, begun = FairQueue[int]([]), list[str]()
    left, *_ = (take(queue, begun, name) for name in ("a0", "a1", "b0", "c0"))
    only = take(queue, begun, "d0")
    await settle()
    left.cancel()
    only.cancel()
    await settle()
    assert sum(map(len, queue._waiting.values())) == 3
    for _ in range(3):
        queue.release(0)
        await settle()
    assert begun == ["a1", "b0", "c0"]


async def test_sizes_are_limited_but_something_may_always_wait() -> None:
    queue, begun = FairQueue[str]([], WaitingWork(THINGS)), list[str]()
    waiting = asyncio.create_task(queue.acquire("a", 100))
    await settle()
    with pytest.raises(Overloaded) as refused:
        await queue.acquire("a", 1)
    assert (refused.value.limit, refused.value.of_server) == ("tenant_things", False)
    with pytest.raises(Overloaded) as refused:
        await queue.acquire("b", 1)
    assert (refused.value.limit, refused.value.of_server) == ("things", True)
    waiting.cancel()
    await settle()
    take(queue, begun, "b").cancel()


async def test_a_call_that_nobody_awaits_keeps_its_thread_until_it_ends() -> None:
    threads, goes_on, called = FairThreads(1, "test"), threading.Event(), list[str]()
    left = asyncio.create_task(threads.run("a", goes_on.wait))
    await settle()
    left.cancel()
    others = [
        asyncio.create_task(threads.run(name[0], lambda name=name: called.append(name)))
        for name in ("a1", "a2", "b1")
    ]
    await asyncio.sleep(0.05)
    assert called == []
    goes_on.set()
    await asyncio.gather(*others)
    assert called == ["a1", "b1", "a2"]
    threads.close()
