"""`outrider scale`: how many replicas of a role the deployment that runs is to have."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from deploy.fleet.reconciler import DeploymentLocation, connect_reconciler
from outrider.config import WAIT_S_MAX, AutoscalePolicy
from outrider.errors import ConfigError
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import ROLES, Role

from .deployment import add_place_flags, find_deployment
from .progress import progress

if TYPE_CHECKING:
    from deploy.fleet.status import Overview

_POLL_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The counts, whether to wait, and which deployment."""
    parser.add_argument(
        "counts", nargs="+", metavar="ROLE=N",
        help="draft=4, target=2 or coordinator=2; several at once",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="S",
        help="wait so long until there are as many, s [0]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_place_flags(parser)


def check_wait(wait_s: float) -> None:
    """Raises `ConfigError` for a `--wait` that is none."""
    if not 0 <= wait_s <= WAIT_S_MAX:
        raise ConfigError(f"--wait: {wait_s} is wrong; it must be 0 to {WAIT_S_MAX}, s")


def run(arguments: argparse.Namespace) -> int:
    """Says what is wanted; the deployment does it."""
    counts = parsed_counts(arguments.counts)
    check_wait(arguments.wait)
    where = find_deployment(arguments)
    overview, policy, there = asyncio.run(_scale(where, counts, arguments.wait))
    wanted = {**overview.wanted, **counts}
    for role in counts.keys() & policy.bounds.keys():
        least, most = policy.bounds[role]
        note = f"note: {role} is autoscaled, {least} to {most}, which may change this; first"
        print(f"{note} `outrider autoscale {role}=off` keeps a number", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"wanted": wanted}))
    else:
        print("wanted: " + ", ".join(f"{role}={wanted.get(role, 0)}" for role in ROLES))
    if arguments.wait and not there:
        raise overview.late("there", arguments.wait)
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


async def _scale(
    where: DeploymentLocation, counts: dict[Role, int], wait_s: float
) -> tuple[Overview, AutoscalePolicy, bool]:
    """What there is then, what decides from now on, and whether there are as many within the
    time."""
    progress("asking the deployment", at_once=False)
    async with connect_reconciler(where) as reconciler:
        policy: AutoscalePolicy = await reconciler.call("want", counts)
        progress("starting and ending replicas", at_once=False)
        give_up_at = time.monotonic() + wait_s
        while True:
            overview: Overview = await reconciler.call("overview", "")
            serving = {
                role: sum(bool(one.address) and not one.leaves for one in overview.of(role))
                for role in counts
            }
            progress.update(f"serving now: {', '.join(f'{r}={n}' for r, n in serving.items())}")
            there = serving == counts
            if there or time.monotonic() >= give_up_at:
                return overview, policy, there
            await asyncio.sleep(_POLL_S)
