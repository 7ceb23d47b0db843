"""The registry against a real Redis server."""

from dataclasses import replace
from functools import partial

import pytest
import redis

from outrider.errors import StoreUnavailable
from outrider.redis.address import RedisAddress
from outrider.redis.embedded import EmbeddedRedis
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import LEASE_S, ReplicaRecord

pytestmark = pytest.mark.xdist_group("redis")

TARGET = ReplicaRecord(
    role="target",
    name="target-1",
    address="127.0.0.1:1",
    host="h",
    pid=7,
    model="m",
    weights="w",
    device="cpu",
    load=3,
)


def named(name: str) -> ReplicaRecord:
    return replace(TARGET, name=name)


async def test_announced_replicas_are_listed_by_role_and_name(registry: RedisRegistry) -> None:
    draft = replace(named("target-1"), role="draft", leaving=True)
    assert await registry.records("target") == []
    for one in (named("b"), named("a"), draft, named("c")):
        await registry.announce(one)
    assert await registry.records("target") == [named("a"), named("b"), named("c")]
    assert await registry.records("draft") == [draft]
    assert await registry.records("coordinator") == []
    await registry.announce(replace(named("b"), leaving=True, load=9))
    assert (await registry.records("target"))[1] == replace(named("b"), leaving=True, load=9)


async def test_deployments_do_not_see_each_other(
    server: EmbeddedRedis, registry: RedisRegistry
) -> None:
    second = RedisRegistry(RedisAddress(url=server.url, key_prefix="p:"), "d2")
    await registry.announce(TARGET)
    await registry.note_started(7)
    await registry.want({"target": 2, "draft": 0})
    assert await second.records("target") == []
    assert (await second.wanted(), await second.started()) == ({}, 0)
    await second.withdraw("target", TARGET.name)
    await second.want({"target": 5})
    await registry.want({"draft": 4})
    assert await registry.records("target") == [TARGET]
    assert await registry.wanted() == {"target": 2, "draft": 4}
    assert await registry.started() == 7
    await second.close()


async def test_a_wanted_number_changes_only_if_it_is_still_the_one_seen(
    registry: RedisRegistry, admin: redis.Redis
) -> None:
    assert not await registry.change_wanted("target", 1, 2)
    await registry.want({"target": 3, "draft": 1})
    assert not await registry.change_wanted("target", 1, 2)
    assert await registry.change_wanted("target", 3, 2)
    assert await registry.wanted() == {"target": 2, "draft": 1}
    assert admin.ttl("p:wanted:{d}") > 0


async def test_replicas_lie_in_redis_as_documented(
    registry: RedisRegistry, admin: redis.Redis
) -> None:
    """A record lasts for a lease. A reader removes a name whose lease has expired."""
    await registry.announce(TARGET)
    await registry.want({"draft": 3})
    key, names = "p:replica:{d}:target:target-1", "p:replicas:{d}:target"
    assert ReplicaRecord.from_json(admin.get(key)) == TARGET
    admin.pexpire(key, 100)
    await registry.announce(TARGET)
    assert 0.5 * LEASE_S < admin.pttl(key) / 1e3 <= LEASE_S
    assert admin.smembers(names) == {b"target-1"}
    assert admin.hgetall("p:wanted:{d}") == {b"draft": b"3"}
    admin.delete(key)  # As if the lease had expired.
    await registry.announce(named("other"))
    assert await registry.records("target") == [named("other")]
    assert admin.smembers(names) == {b"other"}
    await registry.withdraw("target", "other")
    assert admin.keys() == [b"p:wanted:{d}"]


async def test_a_server_that_refuses_writes_reports_no_replica_as_gone(
    registry: RedisRegistry, admin: redis.Redis
) -> None:
    """Leases expire because the server refuses writes. This says nothing about the replicas."""
    await registry.announce(TARGET)
    admin.delete("p:replica:{d}:target:target-1")  # As if it had expired.
    admin.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(StoreUnavailable):
            await registry.announce(TARGET)
        for read in (registry.fleet, registry.contents, partial(registry.leased, [])):
            with pytest.raises(StoreUnavailable):
                await read()
    finally:
        admin.config_set("min-replicas-to-write", 0)
    await registry.announce(TARGET)
    assert await registry.records("target") == [TARGET]
