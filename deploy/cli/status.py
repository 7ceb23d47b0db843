"""`outrider status`: what runs, where it answers, and whether it serves.

Exit code 0 where everything that a request needs serves, else 1.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
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
    running_deployment,
    state_directory,
)
from outrider.errors import ConfigError, OutriderError
from outrider.registry.registry import LEASE_S, ROLES
from outrider.sessions.redis_address import RedisAddress, with_password
from outrider.settings import check_range

from .command import Arguments, command, json_option, option
from .connection import Connection, caller_key, caller_options, caller_trust_of, checked_address
from .masking import masked_settings
from .options import error_message
from .output import show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outrider.client import Client
    from outrider.transport.channel import Trust

Facts = dict[str, Any]
TIMEOUT_S: Final = 5.0
WATCH_S: Final = 2.0
NEEDED: Final = ("coordinator", "target")
"""Roles that every request needs."""
HEALTH: Final = {"serving": "green", "not serving": "red", "leaving": "yellow"}
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
    check_range("timeout", arguments.timeout, 0.001, 3600)
    check_range("watch", arguments.watch, 0.1, 3600)
    if arguments.watch is None:
        found = asyncio.run(_status(arguments))
        _print(found, as_json=arguments.json)
        return 0 if found["serving"] else 1
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
    key = caller_key(arguments)
    if arguments.server:
        trust = caller_trust_of(arguments, {})
        one = await _ask_coordinator(checked_address(arguments.server), key, trust, timeout_s)
        # One that serves, and does not answer this caller, says why.
        running = one["error"] is None or one["serving"]
        return found | {"running": running, "serving": one["serving"], "coordinators": [one]}
    state = state_directory(os.environ)
    # The lock lets only one deployment have the directory.
    found["lease"] = {"file": str(state / LOCK_NAME), "holder": lock_holder(state)}
    record = running_deployment(state)
    if record is None:
        return found
    key, trust = key or local_key(state), caller_trust_of(arguments, record.settings)
    inner = str(record.settings.get("internal_tls_dir") or "")
    asked = {
        "coordinators": [
            _ask_coordinator(one, key, trust, timeout_s)
            for one in record.grpc_address.split(",") if one
        ],
        "targets": [
            _ask_replica("target", one, timeout_s, inner) for one in record.target_addresses
        ],
        "drafts": [
            _ask_replica("draft", one, timeout_s, inner) for one in record.draft_addresses
        ],
    }  # fmt: skip
    answers: list[Any] = await asyncio.gather(
        ask_registry(record, timeout_s), *(asyncio.gather(*calls) for calls in asked.values())
    )
    known, registry_error = answers[0]
    for name, replicas in zip(asked, answers[1:], strict=True):
        found[name] = [one | known.get(one["address"], {}) for one in replicas]
    return found | {
        "running": True,
        # Without a draft requests are slower, and served all the same.
        "serving": all(any(one["serving"] for one in found[f"{role}s"]) for role in NEEDED),
        "deployment": _deployment(record, state),
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
    try:
        address = with_password(RedisAddress(**record.redis), by_ray=False)
        async with AsyncExitStack() as stack, asyncio.timeout(timeout_s):
            registry = RedisRegistry(address, record.deployment)
            stack.push_async_callback(registry.close)
            for role in ROLES:
                for one, left_s in await registry.leases(role):
                    age_s = round(max(0.0, LEASE_S - left_s), 2)
                    known[one.address] = {
                        "name": one.name, "host": one.host, "pid": one.pid, "device": one.device,
                        "leaving": one.leaving, "lease_age_s": age_s, "load": one.load,
                        "figures": asdict(one.figures),
                    }  # fmt: skip
    except TimeoutError:
        return known, f"Redis has not answered within {timeout_s:g} s"
    except OutriderError as error:
        return known, error.message
    return known, None


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


async def _ask_coordinator(address: str, key: str, trust: Trust | None, timeout_s: float) -> Facts:
    async with Connection(address, api_key=key, trust=trust).client() as client:
        return await _answer(client, lambda: client.describe(timeout_s), timeout_s)


async def _ask_replica(
    role: Literal["target", "draft"], address: str, timeout_s: float, internal_tls_dir: str
) -> Facts:
    """As a coordinator asks, where it answers no one else."""
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
        async with Connection(address, trust=trust).client() as client:
            return await _answer(client, lambda: link.describe(timeout_s), timeout_s)
    finally:
        await link.close()


async def _answer(
    client: Client, describe: Callable[[], Awaitable[Any]], timeout_s: float
) -> Facts:
    serving = await client.healthy(timeout_s)
    try:
        facts, error = asdict(await describe()), None
    except OutriderError as failure:
        facts, error = {}, error_message(failure)
    return {"address": client.address, "serving": serving, "error": error, **facts}


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
    wanted = {}
    if error := found.get("registry_error"):
        foot.append(Text(f"what replicas do is not known: {error}", style="yellow"))
    if deployment is not None:
        wanted = deployment["wanted"]
        models = f"{deployment['served_model_name']}, drafted by {deployment['draft_model']}"
        head.append(Text(f"{models}: pid {deployment['pid']}, since {deployment['started_at']}"))
        if deployment["http_address"]:
            foot.append(Text(f"HTTP {deployment['http_address']}"))
        foot.append(Text(f"log {deployment['log']}", no_wrap=True, overflow="ignore"))
    table = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, overflow="fold")
    for role in ROLES:
        replicas = found[f"{role}s"]
        for facts in replicas:
            health = "serving" if facts["serving"] else "not serving"
            health = "leaving" if facts.get("leaving") else health
            lines = "\n".join(filter(None, (_runs(facts), _where(facts), _does(facts))))
            table.add_row(
                facts.get("name", role), Text(facts["address"]), Text(health, HEALTH[health]),
                Text(lines),
            )  # fmt: skip
        if len(replicas) != wanted.get(role, len(replicas)):
            table.add_row(role, "", "", f"{len(replicas)} of {wanted[role]} that are wanted")
    return Group(*head, table, *foot)


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
    return ", ".join(filter(None, (facts["model"], facts["dtype"], *parts)))


def _where(facts: Facts) -> str:
    if "lease_age_s" not in facts:
        return ""
    age = f"heard of {facts['lease_age_s']:.1f} s ago"
    return ", ".join(filter(None, (facts["host"], f"pid {facts['pid']}", facts["device"], age)))


def _does(facts: Facts) -> str:
    figures = facts.get("figures") or {}
    formats = {
        "tokens_per_second": "{:.0f} tokens/s", "busy": "{:.0%} busy", "fill": "{:.0%} places",
        "kv_usage": "{:.0%} pages", "acceptance": "{:.0%} accepted",
        "look_ahead_hits": "{:.0%} ahead", "draft_waits": "{:.0%} wait for drafts",
        "queue_steps": "queue {:.1f} steps",
    }  # fmt: skip
    known = (key for key in formats if figures.get(key) is not None)
    return ", ".join(formats[key].format(figures[key]) for key in known)
