"""`outrider scale`: how many replicas of a role the deployment that runs is to have."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from deploy.state import DeploymentRecord, running_deployment, state_directory
from outrider.config import WAIT_S_MAX, deployment_settings
from outrider.drafting.registry import parse_drafter
from outrider.errors import ConfigError, SettingError, Unavailable
from outrider.fleet.autoscaling import Policy
from outrider.fleet.registry import ROLES, Role
from outrider.limits import REPLICAS_MAX
from outrider.sessions.redis_address import RedisAddress

from .progress import progress
from .settings import add_setting_flags, deployment_config

_REDIS: Final = (
    "redis_url", "redis_username", "redis_password", "redis_ca_file", "redis_sentinel_password",
)  # fmt: skip
_POLL_S: Final = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The counts, whether to wait, and how to reach a Redis that is not the deployment's own."""
    parser.add_argument(
        "counts", nargs="+", metavar="ROLE=N",
        help="draft=4, target=2 or coordinator=2; several at once",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="S",
        help="wait so long until there are as many, s [0]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_redis_flags(parser)


def check_wait(wait_s: float) -> None:
    """Raises `ConfigError` for a `--wait` that is none."""
    if not 0 <= wait_s <= WAIT_S_MAX:
        raise ConfigError(f"--wait: {wait_s} is wrong; it must be 0 to {WAIT_S_MAX}, s")


def what_runs(state: Path) -> DeploymentRecord:
    """The deployment that runs. Raises `Unavailable` where there is none."""
    record = running_deployment(state)
    if record is None:
        raise Unavailable("nothing runs; `outrider serve` starts a deployment")
    return record


def add_redis_flags(parser: argparse.ArgumentParser) -> None:
    """How to reach a deployment's Redis; see `redis_of`."""
    others = [key for key in deployment_settings() if key not in _REDIS]
    add_setting_flags(parser, "the deployment's Redis, where it is not its own", without=others)


def run(arguments: argparse.Namespace) -> int:
    """Says what is wanted; the deployment does it."""
    counts = parsed_counts(arguments.counts)
    check_wait(arguments.wait)
    state = state_directory(os.environ)
    record = what_runs(state)
    if counts.get("draft") and parse_drafter(record.draft_model).on_target:
        raise ConfigError(f"draft={counts['draft']}: with {record.draft_model} the target drafts")
    policy = asyncio.run(_want(record, redis_of(arguments, record), counts))
    for role in counts.keys() & policy.bounds.keys():
        least, most = policy.bounds[role]
        note = f"note: {role} is autoscaled, {least} to {most}, which may change this; first"
        print(f"{note} `outrider autoscale {role}=off` keeps a number", file=sys.stderr)
    there = _wait(state, counts, arguments.wait)
    progress.rest()
    wanted = record.wanted | counts
    if arguments.json:
        print(json.dumps({"wanted": wanted}))
    else:
        print("wanted: " + ", ".join(f"{role}={wanted.get(role, 0)}" for role in ROLES))
    if arguments.wait and not there:
        raise Unavailable(f"not there after {arguments.wait:g} s; see `outrider status`")
    return 0


def parsed_counts(words: Sequence[str]) -> dict[Role, int]:
    """Of `ROLE=N`. Raises `ConfigError`."""
    counts: dict[Role, int] = {}
    for word in words:
        role, text = role_and_value(word, "N", counts)
        least = 0 if role == "draft" else 1
        is_count = text.isascii() and text.isdecimal()
        if not (is_count and least <= int(text) <= REPLICAS_MAX):
            raise ConfigError(f"{word}: {text!r} is wrong; it must be {least} to {REPLICAS_MAX}")
        counts[role] = int(text)
    return counts


def role_and_value(word: str, value: str, given: Collection[Role]) -> tuple[Role, str]:
    """Of `ROLE=...`, where `value` stands for what follows and other roles are `given` already.
    Raises `ConfigError`."""
    name, has_value, text = word.partition("=")
    role = next((role for role in ROLES if role == name), None)
    if role is None or not has_value:
        allowed = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
        raise ConfigError(f"{word}: is wrong; it must be ROLE={value}, and ROLE {allowed}")
    if role in given:
        raise ConfigError(f"{word}: {role} is given twice")
    return role, text


def redis_of(arguments: argparse.Namespace, record: DeploymentRecord) -> RedisAddress:
    """Where the deployment keeps what is wanted: its own server, or the one that settings name.
    Raises `SettingError`."""
    given = deployment_config(arguments).coordinator.redis
    given = replace(
        given, key_prefix=str(record.settings.get("redis_key_prefix", given.key_prefix))
    )
    if record.redis_url:
        return RedisAddress(url=record.redis_url, key_prefix=given.key_prefix)
    if not given.url:
        raise SettingError(
            "redis_url", "the deployment has another Redis than its own; give that one's URL"
        )
    return given


async def _want(record: DeploymentRecord, redis: RedisAddress, counts: dict[Role, int]) -> Policy:
    """Returns what decides from now on, for the roles that it has bounds for."""
    from outrider.fleet.redis_registry import RedisRegistry

    registry = RedisRegistry(redis, record.deployment)
    try:
        if not await registry.wanted():
            raise Unavailable("this Redis knows nothing of the deployment")
        policy = await registry.noted("policy")
        await registry.want(counts)
    finally:
        await registry.close()
    try:
        return Policy.from_json(policy)
    except ValueError:  # As the autoscaler: what is no policy scales nothing.
        return Policy()


def _wait(state: Path, counts: dict[Role, int], timeout_s: float) -> bool:
    """Whether there are as many within the time."""
    give_up_at = time.monotonic() + timeout_s
    progress("starting and ending replicas", at_once=False)
    while True:
        record = running_deployment(state)
        if record is None:
            raise Unavailable("the deployment has ended")
        found = {
            "coordinator": len([one for one in record.grpc_address.split(",") if one]),
            "target": len(record.target_addresses),
            "draft": len(record.draft_addresses),
        }
        there = ", ".join(f"{role}={number}" for role, number in found.items())
        progress.update(f"serving now: {there}")
        if all(found[role] == count for role, count in counts.items()):
            return True
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(_POLL_S)
