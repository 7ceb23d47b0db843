"""A client that writes to Redis changes numbers of replicas within bounds, and nothing else."""

import json
import sys
from dataclasses import replace

import pytest
import redis

from outrider.config.deployment import AutoscaleConfig, load_config
from outrider.fleet.autoscaling import Autoscaler
from outrider.fleet.replica_set import Fleet
from outrider.fleet.spec import plan_fleet
from outrider.limits import REPLICA_NUMBER_MAX, REPLICAS_MAX
from outrider.registry.redis_registry import RedisRegistry
from outrider.registry.registry import LEASE_S, ROLES, ReplicaRecord

pytestmark = pytest.mark.xdist_group("redis")

SETTINGS = {"engine": "emulated:vocab_size=10", "draft_model": "emulated"}
CODE = {
    "name": "x",
    "cluster_gpus": None,
    "values": {"model": "/tmp/evil", "trust_remote_code": True, "engine": "transformers"},
}
HOSTILE: list[bytes | str] = [
    "",
    "-1",
    "+1",
    "1.5",
    " 3",
    "1e3",
    "nan",
    "0x10",
    "²",
    "٣",
    "9" * 5000,
    str(sys.maxsize),
    b"\xff\xfe\x00",
    "true",
    "[]",
    "{",
    json.dumps(CODE),
    "[" * 100_000,
    json.dumps({"bounds": {"target": [0, 10**9]}, "calm_s": -1}),
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
async def test_no_text_in_redis_changes_anything_but_counts_within_bounds(
    admin: redis.Redis, registry: RedisRegistry, value: bytes | str
) -> None:
    """The text is in every field that is or was read, and in a record of every role."""
    config = load_config(SETTINGS, {})
    plan = plan_fleet(config, config, 0.0, "d", local=True)
    fleet = Fleet(None, plan, registry)
    scaling = Autoscaler(registry, AutoscaleConfig(autoscale_drafts="1:2"))
    for field in (*ROLES, "started", "changes", "asked", "answer", "policy", "boss"):
        admin.hset("p:wanted:{d}", field, value)
    for role in ROLES:
        admin.sadd(f"p:replicas:{{d}}:{role}", "evil", value)
        admin.set(f"p:replica:{{d}}:{role}:evil", value, px=int(LEASE_S * 1e3))
        assert await registry.records(role) == []
    wanted = await registry.wanted()
    assert all(0 <= count <= REPLICAS_MAX for count in wanted.values())
    assert 0 <= await registry.started() <= REPLICA_NUMBER_MAX
    await fleet._adopt_wanted()
    await scaling.adjust()
    least = {"coordinator": 1, "target": 1, "draft": 0}
    assert all(least[role] <= fleet.wanted[role] <= REPLICAS_MAX for role in ROLES)
    assert scaling.config == AutoscaleConfig(autoscale_drafts="1:2")
    assert fleet.spec == plan
    assert fleet.spec.given == load_config(SETTINGS, {})


async def test_a_record_under_anothers_name_or_role_is_none(
    admin: redis.Redis, registry: RedisRegistry
) -> None:
    good = ReplicaRecord(role="target", name="evil", address="h:1", host="h", pid=1)
    admin.sadd("p:replicas:{d}:target", "evil")
    for record in (good, replace(good, name="another"), replace(good, role="draft")):
        admin.set("p:replica:{d}:target:evil", record.to_json())
        assert await registry.records("target") == [good] * (record is good)
