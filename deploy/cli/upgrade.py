"""`outrider upgrade`: other settings for the deployment that runs, replica by replica."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from deploy.locks import whole_paths
from deploy.state import DeploymentRecord, running_deployment, state_directory
from outrider.config import configuration, deployment_settings
from outrider.errors import SettingError, Unavailable
from outrider.security.keys import hashed_keys, new_key
from outrider.settings import Value, merge

from .progress import progress
from .scale import check_wait, redis_of, what_runs
from .settings import SECRETS, add_setting_flags, given_flags

_POLL_S: Final = 0.2
_KNOWN_S: Final = 10.0
"""By then what was accepted stands in the deployment's record, unless something else does."""


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
    if "api_key" in given_flags(arguments):
        raise SettingError(
            "api_key", "a deployment keeps its keys; give an --api-key-file, whose keys may change"
        )
    state = state_directory(os.environ)
    record = what_runs(state)
    values = whole_paths(
        merge(deployment_settings(), arguments.config, os.environ, given_flags(arguments))
    )
    changes = {
        key: value for key, value in values.items()
        if key not in SECRETS and record.settings.get(key) != value
    }  # fmt: skip
    kept: dict[str, Value] = {"api_key": hashed_keys(new_key())} if record.asks_for_keys else {}
    from deploy.rollout import check_changes

    check_changes(record.settings, changes)
    configuration({**record.settings, **kept, **changes})  # What does not go together shows here.
    progress("asking the deployment", at_once=False)
    name = asyncio.run(_tell(arguments, record, changes))
    num_stale = _wait(state, name, arguments.wait)
    progress.rest()
    if arguments.json:
        print(json.dumps({"changes": changes, "replicas_to_replace": num_stale}))
    elif not changes:
        print("nothing changes")
    else:
        left = f"replicas still to be replaced: {num_stale}" if num_stale else "done"
        print(f"{', '.join(sorted(changes))}: {left}")
    if arguments.wait and num_stale:
        raise Unavailable(f"not done after {arguments.wait:g} s; see {state / 'logs'}")
    return 0


async def _tell(
    arguments: argparse.Namespace, record: DeploymentRecord, changes: Mapping[str, Value]
) -> str:
    """The name that they have been accepted by. Raises `ConfigError` where they are refused."""
    from deploy.rollout import tell_changes
    from outrider.fleet.redis_registry import RedisRegistry

    if not changes:
        return record.changes
    registry = RedisRegistry(redis_of(arguments, record), record.deployment)
    try:
        if not await registry.wanted():
            raise Unavailable("this Redis knows nothing of the deployment")
        return await tell_changes(registry, changes)
    finally:
        await registry.close()


def _wait(state: Path, changes: str, timeout_s: float) -> int:
    """How many replicas are still to be replaced, once there are none or the time is over."""
    give_up_at = time.monotonic() + timeout_s
    progress("replacing replicas", at_once=False)
    while True:
        record = running_deployment(state)
        if record is None:
            raise Unavailable("the deployment has ended")
        is_known = record.changes == changes
        progress.update(f"replicas still to be replaced: {record.num_stale}")
        if is_known and record.num_stale == 0:
            return 0
        if time.monotonic() >= give_up_at + (0.0 if is_known else _KNOWN_S):
            return record.num_stale
        time.sleep(_POLL_S)
