"""`outrider autoscale`: between which bounds the load decides how many replicas a role has."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from deploy.state import state_directory
from outrider.config import LEAST
from outrider.drafting.registry import parse_drafter
from outrider.errors import ConfigError, Unavailable
from outrider.fleet.autoscaling import Bounds, Policy, parse_bounds
from outrider.fleet.registry import ROLES, Role
from outrider.limits import REPLICAS_MAX
from outrider.sessions.redis_address import RedisAddress

from .scale import add_redis_flags, redis_of, role_and_value, what_runs

OFF = "off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bounds, and how to reach a Redis that is not the deployment's own."""
    parser.add_argument(
        "bounds", nargs="*", metavar="ROLE=LEAST:MOST",
        help="target=1:4, draft=0:8 or coordinator=1:2; ROLE=off leaves a role's number to "
        "`outrider scale`; nothing shows what holds",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_redis_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Tells the deployment, and prints what holds."""
    changes = parsed_bounds(arguments.bounds)
    record = what_runs(state_directory(os.environ))
    if changes.get("draft") and parse_drafter(record.draft_model).on_target:
        raise ConfigError(f"draft: with {record.draft_model} the target drafts")
    policy = asyncio.run(_tell(redis_of(arguments, record), record.deployment, changes))
    if arguments.json:
        print(policy.to_json())
        return 0
    for role in ROLES:
        least, most = policy.bounds.get(role, (None, None))
        print(f"{role}: {OFF if least is None else f'{least} to {most}'}")
    return 0


def parsed_bounds(words: Sequence[str]) -> dict[Role, Bounds | None]:
    """Of `ROLE=LEAST:MOST` and `ROLE=off`. Raises `ConfigError`."""
    found: dict[Role, Bounds | None] = {}
    for word in words:
        role, text = role_and_value(word, "LEAST:MOST", found)
        try:
            found[role] = None if text == OFF else parse_bounds(text, LEAST[role], REPLICAS_MAX)
        except ValueError as error:
            raise ConfigError(f"{word}: {error}, or {OFF}") from None
    return found


async def _tell(redis: RedisAddress, deployment: str, changes: dict[Role, Bounds | None]) -> Policy:
    from outrider.fleet.redis_registry import RedisRegistry

    registry = RedisRegistry(redis, deployment)
    try:
        text = await registry.noted("policy")
        if not text:
            raise Unavailable("this Redis knows nothing of the deployment")
        policy = Policy.from_json(text)
        bounds = dict(policy.bounds)
        for role, pair in changes.items():
            bounds.pop(role, None)
            if pair is not None:
                bounds[role] = pair
        policy = replace(policy, bounds=bounds)
        if changes:
            await registry.note("policy", policy.to_json())
        return policy
    finally:
        await registry.close()
