"""`outrider status`: what runs, where it answers, and whether it serves.

Exit code 0 where everything that a request needs serves, else 1.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from deploy.fleet.local_state import (
    LOCK_NAME,
    LOG_NAME,
    DeploymentRecord,
    local_key,
    lock_holder,
    locks_known,
    running_deployment,
    state_directory,
)
from outrider.errors import ConfigError, OutriderError, SettingError
from outrider.registry.registry import LEASE_S, ROLES
from outrider.sessions.redis_address import RedisAddress, with_password

from .command import Arguments, command, json_option, option
from .connection import Connection, caller_key, caller_options, caller_trust_of, checked_address
from .masking import masked_settings
from .options import error_message
from .output import show

if TYPE_CHECKING:
    from rich.console import RenderableType

Facts = dict[str, Any]
TIMEOUT_S: Final = 5.0
WATCH_S: Final = 2.0
_COLUMNS: Final = ("replica", "address", "health", "runs, on, does")


@command(
    "status",
    json_option(),
    option(
        "--server", metavar="HOST:PORT",
        help="a coordinator to ask; by default the deployment that runs",
    ),
    option(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S",
        help="wait at most this long for each answer, s",
    ),
    option(
        "--watch", type=float, is_flag=False, flag_value=WATCH_S, metavar="[S]",
        help=f"ask again and again, each S seconds [{WATCH_S:g}], until Ctrl-C",
    ),
    *caller_options(),
)  # fmt: skip
def status(arguments: Arguments) -> int:
    """Asks and tells."""
    if not 0 < arguments.timeout <= 3600:
        raise ConfigError(f"--timeout: {arguments.timeout} is wrong; it must be above 0, s")
    if arguments.watch is None:
        found = asyncio.run(_status(arguments))
        _print(found, as_json=arguments.json)
        return 0 if found["serving"] else 1
    if not 0.1 <= arguments.watch <= 3600:
        raise ConfigError(f"--watch: {arguments.watch} is wrong; it must be 0.1 to 3600, s")
    return asyncio.run(_watch(arguments))


def _print(found: Facts, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        show(status_table(found), highlight=False, soft_wrap=not found["running"])


async def _watch(arguments: Arguments) -> int:
    """On a terminal one table that changes; else a table or an object after the other."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if arguments.json or not console.is_terminal:
        while True:
            _print(await _status(arguments), as_json=arguments.json)
            await asyncio.sleep(arguments.watch)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(status_table(await _status(arguments)), refresh=True)
            await asyncio.sleep(arguments.watch)


async def _status(arguments: Arguments) -> Facts:
    timeout_s: float = arguments.timeout
    found: Facts = {
        "running": False, "serving": False, "deployment": None,
        "coordinators": [], "targets": [], "drafts": [],
    }  # fmt: skip
    if arguments.server:
        key, trust = caller_key(arguments), caller_trust_of(arguments, {})
        one = Connection(checked_address(arguments.server), api_key=key, trust=trust)
        coordinator = await _ask_coordinator(one, timeout_s)
        # One that serves, and does not answer this caller, says why.
        running = coordinator["error"] is None or coordinator["serving"]
        serving = {"running": running, "serving": coordinator["serving"]}
        return found | serving | {"coordinators": [coordinator]}
    state = state_directory(os.environ)
    # The lock lets only one deployment have the directory. Not every kernel says who holds it.
    found["lease"] = {
        "file": str(state / LOCK_NAME), "known": locks_known(), "holder": lock_holder(state),
    }  # fmt: skip
    record = running_deployment(state)
    if record is None:
        return found
    key = caller_key(arguments) or local_key(state)
    trust = caller_trust_of(arguments, record.settings)
    inner = str(record.settings.get("internal_tls_dir") or "")
    addresses = [one for one in record.grpc_address.split(",") if one]
    answers: list[Any] = await asyncio.gather(
        ask_registry(record, timeout_s),
        *(
            _ask_coordinator(Connection(one, api_key=key, trust=trust), timeout_s)
            for one in addresses
        ),
        *(_ask_replica("target", one, timeout_s, inner) for one in record.target_addresses),
        *(_ask_replica("draft", one, timeout_s, inner) for one in record.draft_addresses),
    )
    (known, registry_error), *replicas = answers
    facts = [one | known.get(one["address"], {}) for one in replicas]
    first_target = len(addresses)
    first_draft = first_target + len(record.target_addresses)
    coordinators, targets = facts[:first_target], facts[first_target:first_draft]
    return found | {
        "running": True,
        # Without a draft requests are slower, and served all the same.
        "serving": all(any(one["serving"] for one in role) for role in (coordinators, targets)),
        "deployment": _deployment(record, state),
        "coordinators": coordinators,
        "targets": targets,
        "drafts": facts[first_draft:],
        "registry_error": registry_error,
    }


async def ask_registry(
    record: DeploymentRecord, timeout_s: float
) -> tuple[dict[str, Facts], str | None]:
    """What replicas say of themselves in the deployment's Redis, by address, and why some of it is
    missing. A password that is in no file of this machine is read from the variable that replicas
    take it from."""
    from outrider.registry.redis_registry import RedisRegistry

    known: dict[str, Facts] = {}
    failure = None
    try:
        address = with_password(RedisAddress(**record.redis), by_ray=False)
        registry = RedisRegistry(address, record.deployment)
    except SettingError as error:
        return known, str(error)
    try:
        async with asyncio.timeout(timeout_s):
            for role in ROLES:
                for one, left_s in await registry.leases(role):
                    age_s = round(max(0.0, LEASE_S - left_s), 2)
                    known[one.address] = {
                        "name": one.name, "host": one.host, "pid": one.pid, "device": one.device,
                        "leaving": one.leaving, "lease_age_s": age_s, "load": one.load,
                        "figures": asdict(one.figures),
                    }  # fmt: skip
    except TimeoutError:
        failure = f"Redis has not answered within {timeout_s:g} s"
    except OutriderError as error:
        failure = error.message
    finally:
        await registry.close()
    return known, failure


def _deployment(record: DeploymentRecord, state: Path) -> Facts:
    names = ("pid", "started_at", "model", "draft_model", "served_model_name", "http_address",
             "wanted")  # fmt: skip
    started = datetime.fromisoformat(record.started_at)
    return {
        **{name: getattr(record, name) for name in names},
        "uptime_s": round((datetime.now(UTC) - started).total_seconds()),
        "state_directory": str(state),
        "log": str(state / LOG_NAME),
        "settings": masked_settings(record.settings),
    }


async def _ask_coordinator(connection: Connection, timeout_s: float) -> Facts:
    async with connection.client() as client:
        serving = await client.healthy(timeout_s)
        return await _answer(connection.address, serving, lambda: client.describe(timeout_s))


async def _ask_replica(
    role: Literal["target", "draft"], address: str, timeout_s: float, internal_tls_dir: str = ""
) -> Facts:
    """As a coordinator asks, where it answers no one else."""
    from outrider.client import Client
    from outrider.transport.channel import PLAIN
    from outrider.transport.grpc_link import draft_link, target_link
    from outrider.transport.tls import internal_trust

    trust = PLAIN
    if internal_tls_dir:
        try:
            trust = internal_trust(Path(internal_tls_dir), "coordinator", role)
        except ConfigError as error:
            return {"address": address, "serving": False, "error": error.message}
    link: Any = (target_link if role == "target" else draft_link)(address, trust)
    try:
        async with Client(address, trust=trust) as client:
            serving = await client.healthy(timeout_s)
        return await _answer(address, serving, lambda: link.describe(timeout_s))
    finally:
        await link.close()


async def _answer(address: str, serving: bool, describe: Callable[[], Awaitable[Any]]) -> Facts:
    try:
        facts, error = asdict(await describe()), None
    except OutriderError as failure:
        facts, error = {}, error_message(failure)
    return {"address": address, "serving": serving, "error": error, **facts}


def status_table(found: Facts) -> RenderableType:
    """What `outrider status` found."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    deployment = found["deployment"]
    if not found["running"]:
        holder = found.get("lease", {}).get("holder")
        return Text("nothing runs" if holder is None else f"starting (pid {holder})")
    head: list[RenderableType] = []
    foot: list[RenderableType] = []
    if deployment is not None:
        models = f"{deployment['served_model_name']}, drafted by {deployment['draft_model']}"
        head.append(Text(f"{models}: pid {deployment['pid']}, since {deployment['started_at']}"))
        if deployment["http_address"]:
            foot.append(Text(f"HTTP {deployment['http_address']}"))
        foot.append(Text(f"log {deployment['log']}", no_wrap=True, overflow="ignore"))
    table = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, overflow="fold")
    wanted = {} if deployment is None else deployment["wanted"]
    for role in ROLES:
        replicas = found[f"{role}s"]
        for facts in replicas:
            table.add_row(*map(_cell, _row(role, facts)))
        if len(replicas) != wanted.get(role, len(replicas)):
            table.add_row(role, "", "", f"{len(replicas)} of {wanted[role]} that are wanted")
    if error := found.get("registry_error"):
        foot.insert(0, Text(f"what replicas do is not known: {error}", style="yellow"))
    return Group(*head, table, *foot)


def _cell(words: str) -> RenderableType:
    from rich.text import Text

    styles = {"serving": "green", "not serving": "red", "leaving": "yellow"}
    return Text(words, style=styles.get(words, ""))


def _row(role: str, facts: Facts) -> tuple[str, ...]:
    health = "serving" if facts["serving"] else "not serving"
    if facts.get("leaving"):
        health = "leaving"
    lines = (_runs(facts), _where(facts), _does(facts))
    words = "\n".join(line for line in lines if line)
    return facts.get("name", role), facts["address"], health, words


def _where(facts: Facts) -> str:
    if "lease_age_s" not in facts:
        return ""
    process, age = f"{facts['host']}, pid {facts['pid']}", f"{facts['lease_age_s']:.1f}"
    return ", ".join(part for part in (process, facts["device"], f"heard of {age} s ago") if part)


def _runs(facts: Facts) -> str:
    if facts["error"] is not None:
        return str(facts["error"])
    if "num_running" in facts:
        return (
            f"{facts['model']}, {facts['num_running']} sessions running, "
            f"{facts['max_model_len']} tokens at most"
        )
    prints = (("weights", "weights_fingerprint"), ("tokenizer", "tokenizer_fingerprint"),
              ("bit-equal rows", "numerics"))  # fmt: skip
    parts = [f"{name} {facts[key][:12]}" for name, key in prints if facts[key]]
    return ", ".join(part for part in (facts["model"], facts["dtype"], *parts) if part)


def _does(facts: Facts) -> str:
    figures = {k: v for k, v in (facts.get("figures") or {}).items() if v is not None}
    formats = {
        "tokens_per_second": "{:.0f} tokens/s", "busy": "{:.0%} busy", "fill": "{:.0%} places",
        "kv_usage": "{:.0%} pages", "acceptance": "{:.0%} accepted",
        "look_ahead_hits": "{:.0%} ahead", "draft_waits": "{:.0%} wait for drafts",
        "queue_steps": "queue {:.1f} steps",
    }  # fmt: skip
    return ", ".join(text.format(figures[key]) for key, text in formats.items() if key in figures)
