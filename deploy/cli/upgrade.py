"""`outrider upgrade`: other settings for the deployment that runs, replica by replica."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deploy.fleet.preflight import check_ports_apart
from deploy.fleet.reconciler import DeploymentLocation, connect_reconciler
from deploy.fleet.rolling_update import FIXED, check_changes
from deploy.fleet.security_setup import whole_paths
from outrider.config import configuration, deployment_settings
from outrider.errors import SettingError
from outrider.settings import Value, merge

from .deployment import find_deployment
from .progress import progress
from .scale import check_wait
from .settings import SECRETS, add_setting_flags, given_flags

if TYPE_CHECKING:
    from deploy.fleet.spec import FleetSpec
    from deploy.fleet.status import Overview

_POLL_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings that are to be others, and whether to wait."""
    parser.add_argument(
        "target", nargs="?", default=argparse.SUPPRESS, metavar="TARGET",
        help="another target model, with the same tokenizer; the same as --model",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="S",
        help="wait so long until all replicas are new ones, s [0]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_setting_flags(parser, "settings that change")


def run(arguments: argparse.Namespace) -> int:
    """Says what is to be; the deployment does it."""
    if "target" in arguments:
        arguments.setting_model = arguments.target
    check_wait(arguments.wait)
    for key in SECRETS:  # What runs does not tell them, so they cannot be compared.
        if key in given_flags(arguments):
            raise SettingError(key, f"cannot change while a deployment runs: {FIXED[key]}")
    values = whole_paths(
        merge(deployment_settings(), arguments.config, os.environ, given_flags(arguments))
    )
    where = find_deployment(arguments)
    upgrade = asyncio.run(_upgrade(where, values, arguments.wait))
    if arguments.json:
        num_stale = upgrade.num_stale
        print(json.dumps({"changes": upgrade.changes, "replicas_to_replace": num_stale}))
    elif not upgrade.runs:
        print("nothing changes")
    else:
        what = ", ".join(sorted(upgrade.changes)) or "the upgrade that runs already"
        num_stale = upgrade.num_stale
        print(f"{what}: {f'replicas still to be replaced: {num_stale}' if num_stale else 'done'}")
    if arguments.wait and upgrade.num_stale:
        raise upgrade.overview.late("done", arguments.wait)
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
    """Asks for what changes, and waits at most so long until all replicas are replaced; where
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
