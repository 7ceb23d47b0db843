"""Commands that change the deployment that runs: `outrider scale`, `autoscale` and `upgrade`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deploy.fleet.preflight import check_ports_apart
from deploy.fleet.reconciler import DeploymentLocation, connect_reconciler
from deploy.fleet.rolling_update import FIXED, check_changes
from deploy.fleet.security_setup import whole_paths
from outrider.config import WAIT_S_MAX, AutoscalePolicy, Bounds, configuration, parse_bounds
from outrider.errors import ConfigError, SettingError
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import ROLES, Role
from outrider.settings import Value

from .command import Arguments, Option, argument, command, json_option, option
from .connection import find_deployment
from .options import COMMON, SECRETS, given_settings, place_options, setting_options
from .output import progress

if TYPE_CHECKING:
    from deploy.fleet.spec import FleetSpec
    from deploy.fleet.status import Overview

OFF: Final = "off"
_POLL_S: Final = 0.2


def wait_option(until: str) -> Option:
    """`--wait S`."""
    return option(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help=f"wait at most this long until {until}, s",
    )


def check_wait(wait_s: float) -> None:
    """Raises `ConfigError` for a `--wait` that is none."""
    if not 0 <= wait_s <= WAIT_S_MAX:
        raise ConfigError(f"--wait: {wait_s} is wrong; it must be 0 to {WAIT_S_MAX}, s")


@command(
    "scale",
    argument(
        "counts", "draft=4, target=2 or coordinator=2; several at once", metavar="ROLE=N",
        nargs=-1, required=True,
    ),
    wait_option("there are as many"),
    json_option(),
    *place_options(),
)  # fmt: skip
def scale(arguments: Arguments) -> int:
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


@command(
    "autoscale",
    argument(
        "bounds", "target=1:4, draft=0:8 or coordinator=1:2; ROLE=off leaves a role's number to "
        "`outrider scale`; nothing shows what holds", metavar="ROLE=LEAST:MOST", nargs=-1,
    ),
    json_option(),
    *place_options(),
)  # fmt: skip
def autoscale(arguments: Arguments) -> int:
    """Tells the deployment, and prints what holds."""
    changes = parsed_bounds(arguments.bounds)
    policy = asyncio.run(_bound(find_deployment(arguments), changes))
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
            found[role] = None if text == OFF else parse_bounds(text, role)
        except ValueError as error:
            raise ConfigError(f"{word}: {error}, or {OFF}") from None
    return found


async def _bound(where: DeploymentLocation, changes: dict[Role, Bounds | None]) -> AutoscalePolicy:
    async with connect_reconciler(where) as reconciler:
        policy: AutoscalePolicy = await reconciler.call("bound", changes)
        return policy


@command(
    "upgrade",
    argument(
        "target", "another target model, with the same tokenizer; the same as --model",
        required=False,
    ),
    wait_option("all replicas are new ones"),
    json_option(),
    *setting_options(common=COMMON),
)  # fmt: skip
def upgrade(arguments: Arguments) -> int:
    """Says what is to be; the deployment does it."""
    if arguments.target is not None:
        arguments.settings["model"] = arguments.target
    check_wait(arguments.wait)
    for key in SECRETS:  # What runs does not tell them, so they cannot be compared.
        if key in arguments.settings:
            raise SettingError(key, f"cannot change while a deployment runs: {FIXED[key]}")
    values = whole_paths(given_settings(arguments))
    where = find_deployment(arguments)
    found = asyncio.run(_upgrade(where, values, arguments.wait))
    if arguments.json:
        num_stale = found.num_stale
        print(json.dumps({"changes": found.changes, "replicas_to_replace": num_stale}))
    elif not found.runs:
        print("nothing changes")
    else:
        what = ", ".join(sorted(found.changes)) or "the upgrade that runs already"
        num_stale = found.num_stale
        print(f"{what}: {f'replicas still to be replaced: {num_stale}' if num_stale else 'done'}")
    if arguments.wait and found.num_stale:
        raise found.overview.late("done", arguments.wait)
    return 0


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """What has come of one `outrider upgrade`."""

    changes: dict[str, Value]
    """Settings that this command has changed."""
    runs: bool
    """Whether replicas are replaced: for these, or for changes that were asked for before."""
    overview: Overview
    """Afterwards."""

    @property
    def num_stale(self) -> int:
        """Replicas that are still to be replaced."""
        return self.overview.num_stale if self.runs else 0


async def _upgrade(where: DeploymentLocation, values: dict[str, Value], wait_s: float) -> _Upgrade:
    """Asks for what changes, and waits at most `wait_s` until all replicas are replaced; where
    nothing changes, for an upgrade that runs already. Raises `ConfigError` where the changes are
    refused."""
    progress("asking the deployment", at_once=False)
    async with connect_reconciler(where) as reconciler:
        spec: FleetSpec = await reconciler.call("spec")
        given = spec.given.values()
        changes = {
            key: value for key, value in values.items()
            if key not in SECRETS and given[key] != value
            and not (key == "address" and where.elsewhere)
            and not (key == "deployment_name" and value == where.deployment)
        }  # fmt: skip
        check_changes(given, changes)
        config = configuration({**given, **changes})  # What does not go together shows here.
        if not given["address"]:
            check_ports_apart(config)
        if changes:
            await reconciler.change(changes)
        progress("replacing replicas", at_once=False)
        give_up_at = time.monotonic() + wait_s
        overview: Overview = await reconciler.call("overview", "")
        if not changes and not overview.num_stale:
            return _Upgrade({}, runs=False, overview=overview)
        while overview.num_stale and time.monotonic() < give_up_at:
            progress.update(f"replicas still to be replaced: {overview.num_stale}")
            await asyncio.sleep(_POLL_S)
            overview = await reconciler.call("overview", "")
        return _Upgrade(changes, runs=True, overview=overview)
