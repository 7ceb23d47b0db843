"""What a replica says of itself, and the registry that keeps it in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.clock import run_virtually
from outrider.errors import InvariantError, StoreUnavailable
from outrider.limits import REPLICA_NUMBER_MAX
from outrider.registry.registry import LEASE_S, ROLES, MemoryRegistry, ReplicaRecord

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


@pytest.mark.parametrize("missing", LEAST)
def test_a_record_without_what_it_must_say_is_none(missing: str) -> None:
    rest = {name: value for name, value in LEAST.items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        ReplicaRecord.from_json(json.dumps(rest))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("role", "boss"),
        ("role", ["draft"]),
        ("name", 3),
        ("address", None),
        ("pid", "7"),
        ("pid", True),
        ("pid", 7.0),
        ("leaving", 1),
        ("load", 1.5),
        ("weights", ["w"]),
    ],
)
def test_a_record_with_a_value_of_another_kind_is_none(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"not a record: .*{name}"):
        ReplicaRecord.from_json(json.dumps(LEAST | {name: value}))


@pytest.mark.parametrize("text", ["", "{", b"\xff\xff", "7", "null", '["role", "name"]'])
def test_what_is_no_object_is_no_record(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="not a record"):
        ReplicaRecord.from_json(text)


def test_leases_in_memory_run_on_the_clock_of_the_loop() -> None:
    async def main() -> None:
        registry = MemoryRegistry()
        await registry.announce(RECORD)
        await asyncio.sleep(LEASE_S - 0.01)
        assert await registry.records("draft") == [RECORD]
        await asyncio.sleep(0.01)
        assert await registry.records("draft") == []

    run_virtually(main())


@pytest.mark.parametrize(
    "call",
    [
        lambda registry: registry.announce(RECORD),
        lambda registry: registry.withdraw("draft", "draft-3"),
        lambda registry: registry.records("draft"),
        lambda registry: registry.want({"draft": 1}),
        lambda registry: registry.wanted(),
    ],
)
def test_a_registry_that_is_away_answers_nothing_and_takes_nothing(
    call: Callable[[MemoryRegistry], Awaitable[object]],
) -> None:
    async def main() -> None:
        registry = MemoryRegistry()
        await registry.announce(RECORD)
        registry.failure = StoreUnavailable("away")
        with pytest.raises(StoreUnavailable, match="away"):
            await call(registry)
        registry.failure = None
        assert await registry.records("draft") == [RECORD]
        assert await registry.wanted() == {}

    run_virtually(main())


def test_nothing_is_asked_of_what_is_no_role() -> None:
    async def main() -> None:
        role: str = "boss"
        with pytest.raises(InvariantError, match="boss is no role"):
            await MemoryRegistry().records(role)  # type: ignore[arg-type]

    run_virtually(main())


def test_a_registry_that_goes_back_has_what_it_had_as_long_as_leases_run() -> None:
    async def main() -> None:
        registry = MemoryRegistry()
        await registry.announce(RECORD)
        await registry.want({"draft": 1})
        then = registry.snapshot()
        await registry.withdraw(RECORD.role, RECORD.name)
        await registry.want({"draft": 2})
        registry.restore(then)
        assert await registry.records(RECORD.role) == [RECORD]
        assert await registry.wanted() == {"draft": 1}
        await asyncio.sleep(LEASE_S)
        registry.restore(then)
        assert await registry.records(RECORD.role) == []

    run_virtually(main())
