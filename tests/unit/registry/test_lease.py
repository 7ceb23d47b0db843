"""How long a replica's lease is kept, and what is said while that changes. On a virtual clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from outrider.clock import run_virtually
from outrider.errors import StoreUnavailable
from outrider.registry.registry import (
    LEASE_S,
    RENEWAL_S,
    Lease,
    MemoryRegistry,
    ReplicaRecord,
    Role,
)

RECORD = ReplicaRecord(role="target", name="target-0", address="127.0.0.1:1", host="h", pid=7)


class Listening(MemoryRegistry):
    """Knows what it was told, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, ReplicaRecord]] = []
        self.takes_s = 0.0
        """How long an announcement takes."""
        self.is_closed = False

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.told]

    async def announce(self, record: ReplicaRecord) -> None:
        self.told.append((asyncio.get_running_loop().time(), record))
        await asyncio.sleep(self.takes_s)
        await super().announce(record)

    async def withdraw(self, role: Role, name: str) -> None:
        assert not self.is_closed
        await super().withdraw(role, name)

    async def close(self) -> None:
        self.is_closed = True


class Replica:
    """One that is announced, and what it says of itself now."""

    def __init__(self) -> None:
        self.registry = Listening()
        self.record = RECORD
        self.announcer = Lease(self.registry, lambda: self.record)

    async def heard(self) -> list[ReplicaRecord]:
        return await self.registry.records("target")


def play(scene: Callable[[Replica], Awaitable[None]]) -> None:
    async def main() -> None:
        replica = Replica()
        try:
            await scene(replica)
        finally:
            await replica.announcer.close()

    run_virtually(main())


def test_a_lease_is_renewed_before_it_ends() -> None:
    async def scene(replica: Replica) -> None:
        await replica.announcer.start()
        assert replica.registry.times == [0.0]
        await asyncio.sleep(3 * LEASE_S + 0.5)
        assert replica.registry.times == [n * RENEWAL_S for n in range(10)]
        assert await replica.heard() == [RECORD]

    play(scene)


def test_what_changes_is_said_with_the_next_renewal_or_at_once_where_asked() -> None:
    leaving = replace(RECORD, leaving=True)

    async def scene(replica: Replica) -> None:
        await replica.announcer.start()
        replica.record = replace(RECORD, load=4)
        await asyncio.sleep(RENEWAL_S + 0.1)
        assert await replica.heard() == [replica.record]
        replica.record = leaving
        replica.announcer.say_again()
        await asyncio.sleep(0.1)
        assert await replica.heard() == [leaving]
        await asyncio.sleep(RENEWAL_S)
        assert replica.registry.times == pytest.approx([0, 1, 1.1, 2.1])

    play(scene)


def test_what_changes_while_it_is_said_is_said_after_it() -> None:
    leaving = replace(RECORD, leaving=True)

    async def scene(replica: Replica) -> None:
        await replica.announcer.start()
        replica.registry.takes_s = 0.5
        await asyncio.sleep(RENEWAL_S + 0.2)
        replica.record = leaving
        replica.announcer.say_again()
        await asyncio.sleep(0.9)
        assert replica.registry.told[1:] == [(1.0, RECORD), (1.5, leaving)]
        assert await replica.heard() == [leaving]

    play(scene)


def test_while_the_registry_is_away_a_replica_goes_on_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once for each time that it goes away."""

    async def scene(replica: Replica) -> None:
        await replica.announcer.start()
        for _ in range(2):
            replica.registry.failure = StoreUnavailable("away")
            await asyncio.sleep(2 * LEASE_S)
            replica.registry.failure = None
            assert await replica.heard() == []
            await asyncio.sleep(RENEWAL_S)
            assert await replica.heard() == [RECORD]

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert [entry.getMessage() for entry in caplog.records] == [
        "this replica cannot be announced: away"
    ] * 2


def test_one_that_cannot_be_announced_at_first_is_not_announced_later() -> None:
    """Who starts it hears of it, and closes it."""

    async def scene(replica: Replica) -> None:
        replica.registry.failure = StoreUnavailable("away")
        with pytest.raises(StoreUnavailable, match="away"):
            await replica.announcer.start()
        replica.registry.failure = None
        await asyncio.sleep(2 * RENEWAL_S)
        assert replica.registry.times == [0.0]
        await replica.announcer.close()
        assert replica.registry.is_closed

    play(scene)


def test_one_that_is_closed_is_announced_no_more() -> None:
    async def scene(replica: Replica) -> None:
        await replica.announcer.start()
        await asyncio.sleep(0.1)
        await replica.announcer.close()
        assert await replica.heard() == []
        assert replica.registry.is_closed
        await asyncio.sleep(2 * RENEWAL_S)
        assert replica.registry.times == [0.0]

    async def main() -> None:
        await scene(Replica())

    run_virtually(main())


def test_one_that_is_closed_while_it_is_announced_is_withdrawn() -> None:
    """Nothing of the announcement comes after it."""

    async def main() -> None:
        replica = Replica()
        await replica.announcer.start()
        replica.registry.takes_s = 0.5
        await asyncio.sleep(RENEWAL_S + 0.1)
        await replica.announcer.close()
        assert await replica.heard() == []
        await asyncio.sleep(RENEWAL_S)
        assert await replica.heard() == []

    run_virtually(main())


def test_closing_needs_no_registry() -> None:
    async def main() -> None:
        replica = Replica()
        await replica.announcer.start()
        replica.registry.failure = StoreUnavailable("away")
        await replica.announcer.close()
        assert replica.registry.is_closed

    run_virtually(main())
