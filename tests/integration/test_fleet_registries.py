"""The registry against a real Redis server."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis

from outrider.errors import StoreUnavailable
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import LEASE_S, ReplicaRecord
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_address import RedisAddress

pytestmark = pytest.mark.xdist_group("redis")

TARGET = ReplicaRecord(
    role="target", name="target-1", address="127.0.0.1:1", host="h", pid=7, model="m", weights="w",
    device="cpu", load=3,
)  # fmt: skip


class Registries:
    """Registries of several deployments on one server."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self.prefix = f"{uuid.uuid4()}:"
        self._server = server
        self._made: list[RedisRegistry] = []

    def registry(self, deployment: str) -> RedisRegistry:
        address = RedisAddress(url=self._server.url, key_prefix=self.prefix)
        self._made.append(RedisRegistry(address, deployment))
        return self._made[-1]

    async def close(self) -> None:
        for made in self._made:
            await made.close()


@pytest.fixture
async def registries(server: EmbeddedRedis) -> AsyncIterator[Registries]:
    made = Registries(server)
    yield made
    await made.close()


def named(name: str) -> ReplicaRecord:
    return replace(TARGET, name=name)


async def test_announced_replicas_are_listed_by_role_and_name(registries: Registries) -> None:
    registry = registries.registry("d")
    draft = replace(named("target-1"), role="draft", leaving=True)
    assert await registry.records("target") == []
    for one in (named("b"), named("a"), draft, named("c")):
        await registry.announce(one)
    assert await registry.records("target") == [named("a"), named("b"), named("c")]
    assert await registry.records("draft") == [draft]
    assert await registry.records("coordinator") == []
    await registry.announce(replace(named("b"), leaving=True, load=9))
    assert (await registry.records("target"))[1] == replace(named("b"), leaving=True, load=9)


async def test_deployments_do_not_see_each_other(registries: Registries) -> None:
    first, second = registries.registry("d"), registries.registry("d2")
    await first.announce(TARGET)
    await first.note_started(7)
    await first.want({"target": 2, "draft": 0})
    assert await second.records("target") == []
    assert (await second.wanted(), await second.started()) == ({}, 0)
    await second.withdraw("target", TARGET.name)
    await second.want({"target": 5})
    await first.want({"draft": 4})
    assert await first.records("target") == [TARGET]
    assert await first.wanted() == {"target": 2, "draft": 4}
    assert await first.started() == 7


async def test_replicas_lie_in_redis_as_documented(
    registries: Registries, admin: redis.Redis
) -> None:
    """A record lasts for a lease after its last renewal. A name is removed once a reader finds that
    its lease has expired."""
    registry = registries.registry("d")
    await registry.announce(TARGET)
    await registry.want({"draft": 3})
    key, names = f"{registries.prefix}replica:{{d}}:target:target-1", "replicas:{d}:target"
    assert ReplicaRecord.from_json(admin.get(key)) == TARGET
    admin.pexpire(key, 100)
    await registry.announce(TARGET)
    assert 0.5 * LEASE_S < admin.pttl(key) / 1e3 <= LEASE_S
    assert admin.smembers(registries.prefix + names) == {b"target-1"}
    assert admin.hgetall(f"{registries.prefix}wanted:{{d}}") == {b"draft": b"3"}
    admin.delete(key)  # As if the lease had expired.
    await registry.announce(named("other"))
    assert await registry.records("target") == [named("other")]
    assert admin.smembers(registries.prefix + names) == {b"other"}
    await registry.withdraw("target", "other")
    left = {bytes(name).decode() for name in admin.keys(f"{registries.prefix}*")}
    assert left == {f"{registries.prefix}wanted:{{d}}"}


async def test_a_server_that_refuses_writes_reports_no_replica_as_gone(
    registries: Registries, admin: redis.Redis
) -> None:
    """Leases expire because the server refuses writes. This says nothing about the replicas."""
    registry = registries.registry("d")
    await registry.announce(TARGET)
    admin.delete(f"{registries.prefix}replica:{{d}}:target:target-1")  # As if it had expired.
    admin.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(StoreUnavailable):
            await registry.announce(TARGET)
        with pytest.raises(StoreUnavailable):
            await registry.records("target")
    finally:
        admin.config_set("min-replicas-to-write", 0)
    await registry.announce(TARGET)
    assert await registry.records("target") == [TARGET]
