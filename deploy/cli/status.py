"""`outrider status`: what runs, where it answers, and whether it serves.

Exit code 0 where everything that a request needs serves, else 1.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.fleet.local_state import (
    LOCK_NAME,
    LOG_NAME,
    DeploymentRecord,
    local_key,
    lock_holder,
    running_deployment,
    state_directory,
)
from outrider.errors import OutriderError
from outrider.registry.registry import LEASE_S, ROLES, Role
from outrider.sessions.redis_address import RedisAddress, with_password
from outrider.settings import check_range

from .command import Arguments, command, json_option, option
from .masking import masked_settings
from .options import (
    Connection,
    caller_key,
    caller_options,
    caller_trust_of,
    checked_address,
    error_message,
)
from .output import show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outrider.transport.channel import Trust

Facts = dict[str, Any]
TIMEOUT_S = 5.0
WATCH_S = 2.0
NEEDED = ("coordinator", "target")
"""Roles that every request needs."""
HEALTH = {"serving": "green", "not serving": "red", "leaving": "yellow"}
FIGURES = {
    "tokens_per_second": "{:.0f} tokens/s", "busy": "{:.0%} busy", "fill": "{:.0%} slots",
    "kv_usage": "{:.0%} KV cache", "acceptance": "{:.0%} accepted",
    "look_ahead_hits": "{:.0%} ahead",
    "draft_waits": "{:.0%} wait for drafts", "queue_steps": "queue {:.1f} steps",
}  # fmt: skip
PRINTS = {
    "weights_fingerprint": "weights", "tokenizer_fingerprint": "tokenizer",
    "numerics": "bit-equal rows",
}  # fmt: skip


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
    return asyncio.run(_run(arguments))


async def _run(arguments: Arguments) -> int:
    """On a terminal each table takes the place of the one before."""
    watches = arguments.watch is not None
    while True:
        found = await _status(arguments)
        if arguments.json:
            print(json.dumps(found), flush=True)
        else:
            table = status_table(found)
            show(table, highlight=False, soft_wrap=not found["running"], clear=watches)
        if not watches:
            return 0 if found["serving"] else 1
        await asyncio.sleep(arguments.watch)


async def _status(arguments: Arguments) -> Facts:
    timeout_s, key = arguments.timeout, caller_key(arguments)
    found: Facts = {"running": False, "serving": False, "deployment": None}
    found |= {f"{role}s": [] for role in ROLES}
    if arguments.server:
        address, trust = checked_address(arguments.server), caller_trust_of(arguments, {})
        one = await _ask("coordinator", address, key, trust, timeout_s)
        # One that serves, and does not answer this caller, says why.
        running = one["error"] is None or one["serving"]
        return found | {"running": running, "serving": one["serving"], "coordinators": [one]}
    state = state_directory(os.environ)
    # The lock lets only one deployment have the directory.
    found["lease"] = {"file": str(state / LOCK_NAME), "holder": lock_holder(state)}
    record = running_deployment(state)
    if record is None:
        return found
    trust = caller_trust_of(arguments, record.settings)
    internal = str(record.settings.get("internal_tls_dir") or "")
    addresses: dict[Role, list[str]] = {
        "coordinator": list(filter(None, record.grpc_address.split(","))),
        "target": record.target_addresses, "draft": record.draft_addresses,
    }  # fmt: skip
    shown = key or local_key(state)
    asked = [
        asyncio.gather(*(_ask(role, one, shown, trust, timeout_s, internal) for one in those))
        for role, those in addresses.items()
    ]
    (known, registry_error), answers = await asyncio.gather(
        ask_registry(record, timeout_s), asyncio.gather(*asked)
    )
    for role, replicas in zip(addresses, answers, strict=True):
        found[f"{role}s"] = [known.get(one["address"], {}) | one for one in replicas]
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
                    known[one.address] = asdict(one) | {"lease_age_s": age_s}
    except TimeoutError:
        return known, f"Redis has not answered within {timeout_s:g} s"
    except OutriderError as error:
        return known, error.message
    return known, None


def _deployment(record: DeploymentRecord, state: Path) -> Facts:
    started = datetime.fromisoformat(record.started_at)
    return asdict(record) | {
        "uptime_s": round((datetime.now(UTC) - started).total_seconds()),
        "state_directory": str(state),
        "log": str(state / LOG_NAME),
        "settings": masked_settings(record.settings),
    }


async def _ask(
    role: Role, address: str, key: str, trust: Trust | None, timeout_s: float, internal: str = ""
) -> Facts:
    """Asks a replica; one that is no coordinator as coordinators do, with the certificate in the
    directory `internal`, if there is one."""
    from outrider.transport.channel import PLAIN
    from outrider.transport.grpc_link import draft_link, target_link
    from outrider.transport.tls import internal_trust

    found: Facts = {"address": address, "serving": False, "error": None}
    try:
        async with AsyncExitStack() as stack:
            link: Any = None
            if role != "coordinator":
                key, trust = "", PLAIN
                if internal:
                    trust = internal_trust(Path(internal), "coordinator", role)
                link = (target_link if role == "target" else draft_link)(address, trust)
                stack.push_async_callback(link.close)
            connection = Connection(address, api_key=key, trust=trust)
            client = await stack.enter_async_context(connection.client())
            found["serving"] = await client.healthy(timeout_s)
            found |= asdict(await (link or client).describe(timeout_s))
    except OutriderError as error:
        found["error"] = error_message(error)
    return found


def status_table(found: Facts) -> RenderableType:
    """What `outrider status` found."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    deployment = found["deployment"] or {}
    if not found["running"]:
        holder = found.get("lease", {}).get("holder")
        return Text("nothing runs" if holder is None else f"starting (pid {holder})")
    parts: list[RenderableType] = []
    if deployment:
        models = f"{deployment['served_model_name']}, drafted by {deployment['draft_model']}"
        parts.append(Text(f"{models}: pid {deployment['pid']}, since {deployment['started_at']}"))
    table = Table(box=None, pad_edge=False)
    for title in ("replica", "address", "health", "details"):
        table.add_column(title, overflow="fold")
    parts.append(table)
    for role in ROLES:
        replicas = found[f"{role}s"]
        for facts in replicas:
            health = "serving" if facts["serving"] else "not serving"
            health = "leaving" if facts.get("leaving") else health
            table.add_row(
                facts.get("name", role), Text(facts["address"]), Text(health, HEALTH[health]),
                Text("\n".join(filter(None, _lines(facts)))),
            )  # fmt: skip
        wanted = deployment.get("wanted", {}).get(role, len(replicas))
        if len(replicas) != wanted:
            table.add_row(role, "", "", f"{len(replicas)} of {wanted} running")
    if error := found.get("registry_error"):
        parts.append(Text(f"what replicas do is not known: {error}", style="yellow"))
    if address := deployment.get("http_address"):
        parts.append(Text(f"HTTP {address}"))
    if deployment:
        parts.append(Text(f"log {deployment['log']}", no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _lines(facts: Facts) -> Iterator[str]:
    """What a replica runs, where, and what it does."""
    if facts["error"] is not None:
        yield facts["error"]
    elif "num_running" in facts:
        num = facts["num_running"]
        running = f"{num} session{'s' * (num != 1)} running"
        yield f"{facts['model']}, {running}, {facts['max_model_len']} tokens at most"
    else:
        prints = [f"{name} {facts[key][:12]}" for key, name in PRINTS.items() if facts[key]]
        yield ", ".join(filter(None, (facts["model"], facts["dtype"], *prints)))
    if "lease_age_s" in facts:
        age = f"last seen {facts['lease_age_s']:.1f} s ago"
        on = (facts["host"], f"pid {facts['pid']}", facts["device"], age)
        yield ", ".join(filter(None, on))
        figures = {key: facts["figures"][key] for key in FIGURES}
        known = (FIGURES[key].format(value) for key, value in figures.items() if value is not None)
        yield ", ".join(known)
