"""Places that tenants take turns in."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.requests.grammar_check import FairQueue
from outrider.errors import Overloaded


class Work:
    """What has begun, in order; each goes on until it is told to end."""

    def __init__(self, turns: FairQueue) -> None:
        self._turns = turns
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def start(self, name: str) -> asyncio.Task[None]:
        """The tenant is the first letter."""

        async def work() -> None:
            await self._turns.take(name[0])
            self.begun.append(name)
            await self.ends[name].wait()
            self._turns.give_back(name[0])

        self.ends[name] = asyncio.Event()
        return asyncio.create_task(work())

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_with_much_work_holds_up_no_other() -> None:
    """All places are one's as long as it is alone; then others go first."""
    work = Work(FairQueue(2, 100, 10, "jobs"))
    tasks = [work.start(f"a{index}") for index in range(6)]
    await settle()
    assert work.begun == ["a0", "a1"]
    tasks += [work.start(name) for name in ("b0", "b1", "c0")]
    await settle()
    for index in range(9):  # The one that began first ends first.
        await work.end(work.begun[index])
    assert work.begun == ["a0", "a1", "b0", "a2", "c0", "b1", "a3", "a4", "a5"]
    await asyncio.gather(*tasks)


async def test_no_more_wait_than_may() -> None:
    """Neither of one tenant, nor in all."""
    work = Work(FairQueue(1, 5, 3, "jobs"))
    waiting = [work.start(f"a{index}") for index in range(4)]
    await settle()
    with pytest.raises(Overloaded, match=r"^3 jobs of yours wait already"):
        await work.start("a9")
    waiting += [work.start(f"b{index}") for index in range(2)]
    await settle()
    with pytest.raises(Overloaded, match=r"^5 jobs wait already"):
        await work.start("c0")
    for end in work.ends.values():
        end.set()
    await asyncio.gather(*waiting)
    assert sorted(work.begun) == ["a0", "a1", "a2", "a3", "b0", "b1"]


async def test_one_that_is_cancelled_takes_no_place() -> None:
    """While it waits, or in the moment in which it is given one."""
    work = Work(FairQueue(1, 9, 9, "jobs"))
    first, second, third, fourth = (work.start(f"a{index}") for index in range(4))
    await settle()
    second.cancel()
    await settle()
    work.ends["a0"].set()
    while not first.done():
        await asyncio.sleep(0)
    assert "a2" not in work.begun
    third.cancel()  # It has been given a place, and has not run since.
    await settle()
    assert work.begun == ["a0", "a3"]
    await work.end("a3")
    await fourth
    assert third.cancelled()
