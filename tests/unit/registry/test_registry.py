"""What a replica says of itself, and the registry that keeps it in one process."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_registry import MemoryRegistry

from outrider.clock import run_virtually
from outrider.errors import StoreUnavailable
from outrider.limits import REPLICA_NUMBER_MAX
from outrider.registry.redis_registry import Lease
from outrider.registry.registry import (
    LEASE_S,
    RENEWAL_S,
    ROLES,
    ReplicaRecord,
    Role,
)

LEAST = {"role": "draft", "name": "draft-3", "address": "127.0.0.1:7001", "host": "h", "pid": 7}
RECORD = ReplicaRecord(
    role="draft", name="draft-3", address="127.0.0.1:7001", host="h", pid=7
)  # fmt: skip

RECORDS = st.builds(
    ReplicaRecord,
    role=st.sampled_from(ROLES),
    name=st.text(),
    address=st.text(),
    host=st.text(),
    pid=st.integers(0, REPLICA_NUMBER_MAX),
    model=st.text(),
    weights=st.text(),
    device=st.text(),
    leaving=st.booleans(),
    load=st.integers(0, REPLICA_NUMBER_MAX),
)


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record: ReplicaRecord) -> None:
    line = record.to_json()
    assert "\n" not in line
    assert ReplicaRecord.from_json(line) == record
    assert ReplicaRecord.from_json(line.encode()) == record


def test_of_other_versions_what_is_known_is_read() -> None:
    """A later one says more, an earlier one less."""
    assert ReplicaRecord.from_json(json.dumps(LEAST)) == RECORD
    assert ReplicaRecord.from_json(json.dumps(LEAST | {"mood": "good"})) == RECORD


def test_what_is_no_record_is_refused_with_what_is_wrong() -> None:
    """Values are taken as they are: a count that is text is none."""
    rest = {name: value for name, value in LEAST.items() if name != "host"}
    for text, wrong in (
        (json.dumps(rest), "host"), (json.dumps(LEAST | {"pid": "7"}), "pid"), ("{", ""), ("7", ""),
        (json.dumps(LEAST | {"role": "boss"}), "role"), (b"\xff\xff", ""),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"not a record: .*{wrong}"):
            ReplicaRecord.from_json(text)


TARGET = ReplicaRecord(role="target", name="target-0", address="127.0.0.1:1", host="h", pid=7)


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
        self.record = TARGET
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


def test_a_lease_is_renewed_before_it_ends_and_says_what_has_changed() -> None:
    """With the next renewal, or at once where asked."""
    leaving = replace(TARGET, leaving=True)

    async def scene(replica: Replica) -> None:
        await replica.announcer.start()
        await asyncio.sleep(3 * LEASE_S + 0.5)
        assert replica.registry.times == [n * RENEWAL_S for n in range(10)]
        assert await replica.heard() == [TARGET]
        replica.record = replace(TARGET, load=4)
        await asyncio.sleep(RENEWAL_S)
        assert await replica.heard() == [replica.record]
        replica.record = leaving
        replica.announcer.say_again()
        await asyncio.sleep(0.1)
        assert await replica.heard() == [leaving]
        await asyncio.sleep(RENEWAL_S)
        assert replica.registry.times[-3:] == pytest.approx([10, 10.5, 11.5])

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
            assert await replica.heard() == [TARGET]

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


@pytest.mark.parametrize("is_away", [False, True])
def test_one_that_is_closed_while_it_is_announced_is_withdrawn(is_away: bool) -> None:
    """Nothing of the announcement comes after it. Closing needs no registry."""

    async def main() -> None:
        replica = Replica()
        await replica.announcer.start()
        replica.registry.takes_s = 0.5
        await asyncio.sleep(RENEWAL_S + 0.1)
        replica.registry.failure = StoreUnavailable("away") if is_away else None
        await replica.announcer.close()
        replica.registry.failure = None
        assert replica.registry.is_closed
        times = replica.registry.times
        assert is_away or await replica.heard() == []
        await asyncio.sleep(2 * RENEWAL_S)
        assert is_away or await replica.heard() == []
        assert replica.registry.times == times

    run_virtually(main())
