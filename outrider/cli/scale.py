"""Commands that change a running deployment: `outrider scale` and `upgrade`."""

import asyncio
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from outrider.bench.report import Report
from outrider.config.deployment import WAIT_S_MAX, AutoscaleConfig
from outrider.errors import ConfigError, SettingError, did_you_mean
from outrider.fleet.local_state import DeploymentLocation
from outrider.fleet.preflight import whole_paths
from outrider.fleet.reconciler import FIXED, ReconcilerClient, connect_reconciler, differing
from outrider.fleet.replica_set import Overview
from outrider.fleet.spec import FleetSpec
from outrider.fleet.trial import MINUTES_DEFAULT, MINUTES_MAX, SHARE_MAX
from outrider.foundation.settings import Value
from outrider.limits import REPLICAS_MAX
from outrider.registry.registry import ROLES, Role

from . import options
from .command import Arguments, Option, Seconds, argument, command, grouped, json_option
from .options import PLACE_KEYS, SECRETS
from .output import progress, tell

_POLL_S = 0.2
PLACE = "A deployment on another Ray cluster"


def _wait_option(until: str) -> Option:
    return Option(
        "--wait",
        type=Seconds(0, WAIT_S_MAX),
        default=0.0,
        metavar="S",
        help=f"longest time to wait until {until}, s",
    )


async def _overview(
    reconciler: ReconcilerClient, wait_s: float, left: Callable[[Overview], str]
) -> Overview:
    """Polls for at most `wait_s`, until `left` names no more work. Returns the last overview."""
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
        "counts",
        "wanted numbers of replicas, such as draft=4 or target=2 coordinator=2",
        metavar="ROLE=N...",
        nargs=-1,
        required=True,
    ),
    _wait_option("this many replicas serve"),
    json_option(),
    *grouped(PLACE, options.setting_options(common=PLACE_KEYS, only=PLACE_KEYS)),
)
def scale(arguments: Arguments) -> int:
    counts = parsed_counts(arguments.counts)
    where = options.find_deployment(arguments)

    def left(overview: Overview) -> str:
        serving = {
            role: sum(
                bool(replica.address) and not (replica.leaves or replica.on_trial)
                for replica in overview.of(role)
            )
            for role in counts
        }
        text = ", ".join(f"{role}={number}" for role, number in serving.items())
        return "" if serving == counts else f"serving now: {text}"

    async def ask() -> tuple[AutoscaleConfig, Overview]:
        progress("asking the deployment", at_once=False)
        async with connect_reconciler(where) as reconciler:
            scaling: AutoscaleConfig = await reconciler.call("want", counts)
            progress("starting and ending replicas", at_once=False)
            return scaling, await _overview(reconciler, arguments.wait, left)

    scaling, overview = asyncio.run(ask())
    for role in counts.keys() & scaling.bounds.keys():
        least, most = scaling.bounds[role]
        note = f"note: autoscaling may change the number of {role}s ({least} to {most});"
        print(f"{note} `outrider upgrade --autoscale-{role}s ''` turns this off", file=sys.stderr)
    wanted = {**overview.wanted, **counts}
    is_late = bool(arguments.wait and left(overview))
    what, shown = ("serving", counts) if arguments.wait and not is_late else ("wanted", wanted)
    text = ", ".join(f"{role}={shown[role]}" for role in ROLES if role in shown)
    code = tell(Report({"wanted": wanted}, [f"{what}: {text}"]), arguments.json)
    if is_late:
        raise overview.late("serving", arguments.wait)
    return code


def parsed_counts(words: Sequence[str]) -> dict[Role, int]:
    counts: dict[Role, int] = {}
    for word in words:
        name, _, text = word.partition("=")
        role = next((role for role in ROLES if role == name), None)
        if role is None or role in counts or not re.fullmatch("[0-9]{1,9}", text):
            near = "" if role else did_you_mean(word, (f"{role}={text}" for role in ROLES))
            raise ConfigError(
                f"{word}: must be ROLE=N, with each of the roles {', '.join(ROLES)} at most once, "
                f"and N a whole number up to {REPLICAS_MAX}, for example target=2 draft=4{near}"
            )
        counts[role] = int(text)
    return counts


@command(
    "upgrade",
    argument("target", "another target model, with the same tokenizer", required=False),
    _wait_option("a trial has ended and all replicas are replaced"),
    Option(
        "--trial-share",
        type=Seconds(0, SHARE_MAX),
        metavar="SHARE",
        help="first try the change on one new replica, which gets this share of the new sessions. "
        "The other replicas are replaced only if these sessions decode faster than the others. "
        "Only changes of draft replicas or of heads on the target can be tried. With N other "
        "replicas, the best share is 1 / (N + 1). 0 ends the running trial",
    ),
    Option(
        "--trial-minutes",
        type=Seconds(0.01, MINUTES_MAX),
        default=MINUTES_DEFAULT,
        metavar="MINUTES",
        help="time limit of a trial, minutes",
    ),
    json_option(),
    *options.setting_options(common=options.COMMON),
)
def upgrade(arguments: Arguments) -> int:
    if arguments.target is not None:
        arguments.settings["model"] = arguments.target
    # The deployment reveals no secrets, so this command cannot see whether a secret changes.
    for key in SECRETS:
        if key in arguments.settings:
            raise SettingError(key, f"cannot change while a deployment runs: {FIXED[key]}")
    if arguments.trial_share is None and "trial_minutes" in arguments.given:
        raise ConfigError("--trial-minutes: needs --trial-share")
    others = sorted({*arguments.settings} - {*PLACE_KEYS})
    if arguments.trial_share == 0 and others:
        raise SettingError(others[0], "cannot go with --trial-share 0, which ends a trial")
    values = whole_paths(options.given_settings(arguments))
    where = options.find_deployment(arguments)
    seconds = arguments.trial_minutes * 60
    trial = None if arguments.trial_share is None else (arguments.trial_share, seconds)
    changes, overview = asyncio.run(_upgrade(where, values, arguments.wait, trial))
    num_stale = overview.num_stale
    tried = overview.trial if trial and (changes or not trial[0]) else None
    text = "nothing changes"
    if changes or num_stale:
        what = ", ".join(sorted(changes)) or "the upgrade that is running"
        text = f"{what}: {f'replicas still to be replaced: {num_stale}' if num_stale else 'done'}"
    result: dict[str, Any] = {"changes": changes, "replicas_to_replace": num_stale}
    if tried is not None:
        text = f"{tried}\n{text}" if tried.state == "taken" else str(tried)
        result["trial"] = asdict(tried)
    code = tell(Report(result, [text]), arguments.json)
    if arguments.wait and (num_stale or (tried is not None and tried.state == "runs")):
        raise overview.late("done", arguments.wait)
    return code


async def _upgrade(
    where: DeploymentLocation,
    values: dict[str, Value],
    wait_s: float,
    trial: tuple[float, float] | None,
) -> tuple[dict[str, Value], Overview]:
    """Requests the changes. Waits at most `wait_s` until the trial and all replacements have ended.
    `trial` has a share of the sessions and a time limit in seconds; None = no trial. A share of 0
    ends the running trial. Returns the changes and the last overview."""
    progress("asking the deployment", at_once=False)
    async with connect_reconciler(where) as reconciler:
        spec: FleetSpec = await reconciler.call("spec")
        place = {"address": where.address, "deployment_name": where.deployment}
        kept = {*SECRETS, *(key for key, value in place.items() if values.get(key) == value)}
        changes = differing(spec.given, values, kept)
        if trial and not trial[0]:
            changes.clear()
            await reconciler.call("end_trial")
        elif trial and changes:
            await reconciler.call("begin_trial", changes, *trial)
        elif changes:
            await reconciler.call("change", changes)
        progress("replacing replicas", at_once=False)
        return changes, await _overview(reconciler, wait_s, _left_to_do)


def _left_to_do(now: Overview) -> str:
    if now.trial is not None and now.trial.state == "runs":
        return str(now.trial)
    return f"replicas still to be replaced: {now.num_stale}" if now.num_stale else ""
