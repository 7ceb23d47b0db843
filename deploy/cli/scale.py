"""Commands that change the deployment that runs: `outrider scale`, `autoscale` and `upgrade`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.report import Report
from deploy.fleet.local_state import DeploymentLocation
from deploy.fleet.preflight import whole_paths
from deploy.fleet.reconciler import CHANGE_S, FIXED, ReconcilerClient, connect_reconciler
from deploy.fleet.replica_set import Overview
from deploy.fleet.spec import FleetSpec
from deploy.fleet.trial import MINUTES_DEFAULT, MINUTES_MAX, SHARE_MAX
from outrider.config import WAIT_S_MAX, AutoscaleConfig
from outrider.drafters.names import same_drafter
from outrider.errors import ConfigError, SettingError
from outrider.registry.registry import ROLES, Role
from outrider.settings import Value

from .command import Arguments, Option, Seconds, argument, command, json_option, option
from .options import (
    COMMON,
    PLACE_KEYS,
    SECRETS,
    find_deployment,
    given_settings,
    place_options,
    setting_options,
)
from .output import progress, tell

OFF = "off"
_POLL_S = 0.2


def _wait_option(until: str) -> Option:
    return option(
        "--wait", type=Seconds(0, WAIT_S_MAX), default=0.0, metavar="S",
        help=f"wait at most this long until {until}, s",
    )  # fmt: skip


async def _overview(
    reconciler: ReconcilerClient, wait_s: float, left: Callable[[Overview], str]
) -> Overview:
    """What there is once nothing is left to do, or the time is over."""
    give_up_at = time.monotonic() + wait_s
    while True:
        overview: Overview = await reconciler.call("overview")
        if not (text := left(overview)) or time.monotonic() >= give_up_at:
            return overview
        progress.update(text)
        await asyncio.sleep(_POLL_S)


@command(
    "scale",
    argument(
        "counts", "draft=4, target=2 or coordinator=2; several at once", metavar="ROLE=N...",
        nargs=-1, required=True,
    ),
    _wait_option("there are as many"),
    json_option(),
    *place_options(),
)  # fmt: skip
def scale(arguments: Arguments) -> int:
    """Says what is wanted; the deployment does it."""
    counts = parsed_counts(arguments.counts)
    where = find_deployment(arguments)

    def left(overview: Overview) -> str:
        serving = {
            role: sum(bool(one.address) and not (one.leaves or one.on_trial) for one in those)
            for role, those in ((role, overview.of(role)) for role in counts)
        }
        said = ", ".join(f"{role}={number}" for role, number in serving.items())
        return "" if serving == counts else f"serving now: {said}"

    async def ask() -> tuple[AutoscaleConfig, Overview]:
        progress("asking the deployment", at_once=False)
        async with connect_reconciler(where) as reconciler:
            scaling: AutoscaleConfig = await reconciler.call("want", counts)
            progress("starting and ending replicas", at_once=False)
            return scaling, await _overview(reconciler, arguments.wait, left)

    scaling, overview = asyncio.run(ask())
    for role in counts.keys() & scaling.bounds.keys():
        least, most = scaling.bounds[role]
        note = f"note: {role} is autoscaled, {least} to {most}, which may change this; first"
        print(f"{note} `outrider autoscale {role}=off` keeps a number", file=sys.stderr)
    wanted = {**overview.wanted, **counts}
    said = ", ".join(f"{role}={wanted.get(role, 0)}" for role in ROLES)
    code = tell(Report({"wanted": wanted}, [f"wanted: {said}"]), arguments.json)
    if arguments.wait and left(overview):
        raise overview.late("there", arguments.wait)
    return code


def parsed_counts(words: Sequence[str]) -> dict[Role, int]:
    """Of `ROLE=N`. Raises `ConfigError`."""
    counts: dict[Role, int] = {}
    for word, role, text in _by_role(words, "N"):
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"{word}: {text!r} is wrong; it must be a whole number")
        counts[role] = int(text)
    return counts


def _by_role(words: Sequence[str], value: str) -> Iterator[tuple[str, Role, str]]:
    """The words, each with its parts: `ROLE=...`, where `value` stands for what follows."""
    seen = set()
    for word in words:
        name, _, text = word.partition("=")
        role = next((role for role in ROLES if role == name), None)
        if role is None or not text:
            unknown = f"unknown role; use {', '.join(ROLES[:-1])} or {ROLES[-1]}"
            raise ConfigError(f"{word}: {f'must be {role}={value}' if role else unknown}")
        if role in seen:
            raise ConfigError(f"{word}: {role} is given twice")
        seen.add(role)
        yield word, role, text


@command(
    "autoscale",
    argument(
        "bounds", "target=1:4, draft=0:8 or coordinator=1:2; ROLE=off leaves a role's number to "
        "`outrider scale`; without arguments, show the current bounds",
        metavar="ROLE=LEAST:MOST...", nargs=-1, required=False,
    ),
    json_option(),
    *place_options(),
)  # fmt: skip
def autoscale(arguments: Arguments) -> int:
    """Tells the deployment, and prints what holds."""
    changes = parsed_bounds(arguments.bounds)
    where = find_deployment(arguments)

    async def ask() -> AutoscaleConfig:
        async with connect_reconciler(where) as reconciler:
            found: AutoscaleConfig = await reconciler.call("change", changes, timeout_s=CHANGE_S)
            return found

    bounds = asyncio.run(ask()).bounds
    said = [f"{r}: {'{} to {}'.format(*bounds[r]) if r in bounds else OFF}" for r in ROLES]
    return tell(Report({"bounds": bounds}, said), arguments.json)


def parsed_bounds(words: Sequence[str]) -> dict[str, Any]:
    """The settings that `ROLE=LEAST:MOST` and `ROLE=off` stand for. Raises `ConfigError`."""
    found: dict[str, Any] = {}
    for word, role, text in _by_role(words, f"LEAST:MOST or {OFF}"):
        found[f"autoscale_{role}s"] = "" if text == OFF else text
        try:
            AutoscaleConfig(**found)
        except SettingError as error:
            raise ConfigError(f"{word}: {error.reason}, or {OFF}") from None
    return found


@command(
    "upgrade",
    argument(
        "target", "another target model, with the same tokenizer", required=False,
    ),
    _wait_option("a trial has ended and all replicas are new ones"),
    option(
        "--trial-share", type=Seconds(0, SHARE_MAX), metavar="SHARE",
        help="first try what changes of draft replicas, as by --draft-model: with one replica that "
        "gets this share of the new sessions. All are replaced only if sessions decode faster with "
        "it. Beside N replicas best 1 / (N + 1). 0 ends a trial that runs",
    ),
    option(
        "--trial-minutes", type=Seconds(0.01, MINUTES_MAX), default=MINUTES_DEFAULT,
        metavar="MINUTES", help="the most that a trial takes",
    ),
    json_option(),
    *setting_options(common=COMMON),
)  # fmt: skip
def upgrade(arguments: Arguments) -> int:
    """Says what is to be; the deployment does it."""
    if arguments.target is not None:
        arguments.settings["model"] = arguments.target
    for key in SECRETS:  # What runs does not tell them, so they cannot be compared.
        if key in arguments.settings:
            raise SettingError(key, f"cannot change while a deployment runs: {FIXED[key]}")
    if arguments.trial_share is None and "trial_minutes" in arguments.given:
        raise ConfigError("--trial-minutes: is the time of a trial; give --trial-share, too")
    others = sorted({*arguments.settings} - {*PLACE_KEYS})
    if arguments.trial_share == 0 and others:
        raise SettingError(others[0], "cannot change by --trial-share 0, which ends a trial alone")
    values = whole_paths(given_settings(arguments))
    where = find_deployment(arguments)
    seconds = arguments.trial_minutes * 60
    trial = None if arguments.trial_share is None else (arguments.trial_share, seconds)
    changes, runs, overview = asyncio.run(_upgrade(where, values, arguments.wait, trial))
    num_stale = overview.num_stale
    tried = overview.trial if trial and (changes or not trial[0]) else None
    said = "nothing changes"
    if runs:
        what = ", ".join(sorted(changes)) or "the upgrade that runs already"
        said = f"{what}: {f'replicas still to be replaced: {num_stale}' if num_stale else 'done'}"
    told: dict[str, Any] = {"changes": changes, "replicas_to_replace": num_stale}
    if tried is not None:
        said = f"{tried}\n{said}" if tried.state == "taken" else str(tried)
        told["trial"] = asdict(tried)
    code = tell(Report(told, [said]), arguments.json)
    if arguments.wait and (num_stale or (tried is not None and tried.state == "runs")):
        raise overview.late("done", arguments.wait)
    return code


async def _upgrade(
    where: DeploymentLocation,
    values: dict[str, Value],
    wait_s: float,
    trial: tuple[float, float] | None = None,
) -> tuple[dict[str, Value], bool, Overview]:
    """Asks for what changes, and waits at most `wait_s` until all replicas are replaced, also by an
    upgrade that runs already: what changes, whether replicas are replaced, and what there is then.
    A `trial`, on a share of the sessions and for so many seconds, comes first; of a share of 0 it
    ends what runs. Raises `ConfigError` where the changes are refused."""
    progress("asking the deployment", at_once=False)
    async with connect_reconciler(where) as reconciler:
        spec: FleetSpec = await reconciler.call("spec")
        runs_with = spec.given.values()
        place = runs_with | {"address": where.address, "deployment_name": where.deployment}
        changes = {
            key: value for key, value in values.items()
            if key not in SECRETS and value not in (runs_with[key], place[key])
        }  # fmt: skip
        asked = changes.get("draft_model")
        if asked and same_drafter(str(asked), spec.given.draft.model):
            del changes["draft_model"]
        ends_trial = trial is not None and trial[0] == 0
        if ends_trial:
            changes.clear()
        runs = bool(changes) or (await reconciler.call("overview")).num_stale > 0
        if ends_trial:
            await reconciler.call("end_trial")
        elif trial and changes:
            await reconciler.call("begin_trial", changes, *trial, timeout_s=CHANGE_S)
        elif changes:
            await reconciler.call("change", changes, timeout_s=CHANGE_S)
        progress("replacing replicas", at_once=False)
        return changes, runs, await _overview(reconciler, wait_s, _left_to_do)


def _left_to_do(now: Overview) -> str:
    if now.trial is not None and now.trial.state == "runs":
        return str(now.trial)
    return f"replicas still to be replaced: {now.num_stale}" if now.num_stale else ""
