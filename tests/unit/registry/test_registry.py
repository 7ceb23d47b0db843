"""What a replica announces of itself, and for how long it is valid."""

import asyncio
import json
import math
from dataclasses import replace

import pytest

from outrider.errors import StoreUnavailable
from outrider.registry.redis_registry import Contents, Lease
from outrider.registry.registry import (
    LEASE_S,
    RENEWAL_S,
    STARTS_LEASE_S,
    ReplicaRecord,
    Role,
    Starts,
)
from tests.support.memory_registry import MemoryRegistry

pytestmark = pytest.mark.virtual

LEAST = {"role": "target", "name": "target-0", "address": "127.0.0.1:1", "host": "h", "pid": 7}
TARGET = ReplicaRecord(role="target", name="target-0", address="127.0.0.1:1", host="h", pid=7)


def test_of_other_versions_what_is_known_is_read() -> None:
    assert ReplicaRecord.from_json(TARGET.to_json()) == TARGET
    assert ReplicaRecord.from_json(json.dumps(LEAST)) == TARGET
    assert ReplicaRecord.from_json(json.dumps(LEAST | {"mood": "good"})) == TARGET


def test_what_is_no_record_is_refused_with_what_is_wrong() -> None:
    """Else an invalid record would mislead the autoscaler and coordinators."""
    for changes in (
        {"pid": "7"},
        {"role": "boss"},
        {"load": -1},
        {"load": 10**13},
        {"pid": 10**400},
        {"address": "h" * 5000},
        {"figures": {"busy": math.nan}},
        {"figures": {"queue_steps": math.inf}},
        {"figures": {"queue_steps": -1.0}},
        {"figures": {"tokens_per_second": 1e13}},
        {"figures": {"fill": "much"}},
    ):
        with pytest.raises(ValueError, match=next(iter(changes))):
            ReplicaRecord.from_json(json.dumps(LEAST | changes))
    for text in ("{", "7", b"\xff\xff"):
        with pytest.raises(ValueError, match="ReplicaRecord"):
            ReplicaRecord.from_json(text)


class Replica(MemoryRegistry):
    """An announced replica, and a registry that records when."""

    def __init__(self) -> None:
        super().__init__()
        self.record = TARGET
        self.announcer = Lease(self, lambda: self.record)
        self.times: list[float] = []
        self.takes_s = 0.0
        """Duration of an announcement."""

    async def announce(self, record: ReplicaRecord) -> None:
        self.times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes_s)
        await super().announce(record)

    async def heard(self) -> list[ReplicaRecord]:
        return await self.records("target")


async def test_a_lease_is_renewed_before_it_ends_and_says_what_has_changed() -> None:
    replica, leaving = Replica(), replace(TARGET, leaving=True)
    await replica.announcer.start()
    await asyncio.sleep(3 * LEASE_S + 0.5 * RENEWAL_S)
    assert replica.times == [n * RENEWAL_S for n in range(1 + round(3 * LEASE_S / RENEWAL_S))]
    assert await replica.heard() == [TARGET]
    replica.record = replace(TARGET, load=4)
    await asyncio.sleep(RENEWAL_S)
    assert await replica.heard() == [replica.record]
    replica.record = leaving
    replica.announcer.announce_now()
    await asyncio.sleep(0.1)
    assert await replica.heard() == [leaving]
    await asyncio.sleep(RENEWAL_S)
    last_s = 3 * LEASE_S + RENEWAL_S
    said_s = 3 * LEASE_S + 1.5 * RENEWAL_S
    assert replica.times[-3:] == pytest.approx([last_s, said_s, said_s + RENEWAL_S])
    await replica.announcer.withdraw()


async def test_while_the_registry_is_away_a_replica_goes_on_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = Replica()
    await replica.announcer.start()
    for _ in range(2):
        replica.failure = StoreUnavailable("away")
        await asyncio.sleep(2 * LEASE_S)
        replica.failure = None
        assert await replica.heard() == []
        await asyncio.sleep(RENEWAL_S)
        assert await replica.heard() == [TARGET]
    await replica.announcer.withdraw()
    assert caplog.messages == ["this replica cannot be announced: away"] * 2


async def test_one_that_cannot_be_announced_at_first_is_not_announced_later() -> None:
    replica = Replica()
    replica.failure = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable, match="away"):
        await replica.announcer.start()
    replica.failure = None
    await asyncio.sleep(2 * RENEWAL_S)
    assert replica.times == [0.0]
    await replica.announcer.withdraw()


@pytest.mark.parametrize("is_away", [False, True])
async def test_one_that_is_closed_while_it_is_announced_is_withdrawn(is_away: bool) -> None:
    replica = Replica()
    await replica.announcer.start()
    replica.takes_s = 0.5
    await asyncio.sleep(RENEWAL_S + 0.1)
    replica.failure = StoreUnavailable("away") if is_away else None
    await replica.announcer.withdraw()
    replica.failure = None
    times = list(replica.times)
    await asyncio.sleep(2 * RENEWAL_S)
    assert is_away or await replica.heard() == []
    assert replica.times == times


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        (Starts("target"), "no start of a target is announced"),
        (Starts("target", ("target-3",), expected=True), "target-3 is starting"),
        (
            Starts("draft", ("draft-3", "draft-4"), True, 1, 30.6),
            "draft-3 and draft-4 are starting, last start took 31 s",
        ),
        (
            Starts("target", (), True, 2, 3.0),
            "a target will be started again, after 2 failures in a row, last start took 3 s",
        ),
    ],
)
def test_starts_are_put_into_words(starts: Starts, text: str) -> None:
    assert str(starts) == text


def test_no_start_is_expected_once_all_that_were_being_started_serve() -> None:
    starts = Starts("target", ("target-3", "target-4"), expected=True)
    one = starts.without({"target-3"})
    assert (one.names, one.expected) == (("target-4",), True)
    both = starts.without({"target-3", "target-4"})
    assert (both.names, both.expected) == ((), False)
    assert Starts("target", (), expected=True).without({"target-3"}).expected


async def test_starts_are_announced_for_the_time_of_a_restart() -> None:
    registry = MemoryRegistry()
    assert await registry.starts() == {}
    first = Starts("target", ("target-3",), expected=True, num_failures=1, last_s=31.2)
    await registry.announce_starts([Starts("coordinator"), first])
    await asyncio.sleep(STARTS_LEASE_S - 0.1)
    assert await registry.starts() == {"coordinator": Starts("coordinator"), "target": first}
    await asyncio.sleep(0.2)
    assert await registry.starts() == {}


async def test_all_contents_are_read_in_two_requests() -> None:
    registry = MemoryRegistry()
    for record in (TARGET, replace(TARGET, role="draft")):
        await registry.announce(record)
    await registry.want({"target": 2})
    await registry.announce_starts([Starts("target", ("target-3",), expected=True)])
    each = Contents(await registry.fleet(), await registry.wanted(), await registry.starts())
    registry.requests.clear()
    assert await registry.contents() == each
    assert all((each.records["draft"], each.wanted, each.starts))
    assert len(registry.requests) == 2


async def test_replicas_that_have_a_lease_are_found_in_one_request() -> None:
    """Also without replicas, a request shows that Redis answers."""
    registry, asked = MemoryRegistry(), list[tuple[Role, str]]()
    assert await registry.leased(asked) == set()
    await registry.announce(TARGET)
    asked += [("target", "target-0"), ("target", "target-1")]
    assert await registry.leased(asked) == {"target-0"}
    await asyncio.sleep(LEASE_S)
    assert await registry.leased(asked) == set()
    assert len(registry.requests) == 3 + 1
    registry.failure = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await registry.leased([])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "7",
        "{}",
        '[{"role": "boss"}]',
        '[{"role": "target", "last_s": -1}]',
        '[{"role": "target", "names": [7]}]',
        '[{"role": "target", "expected": 1}]',
        json.dumps([{"role": "target"}] * 4),
    ],
)
async def test_invalid_starts_are_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    registry = MemoryRegistry()
    await registry._run(("SET", registry._starts, text, "PX", 9_000))
    assert await registry.starts() == {}
    assert "an invalid announcement of starts is ignored" in caplog.text
    await registry._run(("SET", registry._starts, '[{"role": "draft", "mood": "good"}]', "PX", 9))
    assert await registry.starts() == {"draft": Starts("draft")}
