"""`outrider status`: what runs, where it answers, and whether it serves.

Exit code 0 where everything that a request needs serves, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from deploy.state import (
    LOCK_NAME,
    LOG_NAME,
    DeploymentRecord,
    lock_holder,
    locks_known,
    running_deployment,
    state_directory,
)
from outrider.errors import ConfigError, OutriderError
from outrider.fleet.registry import ROLES

from .connection import checked_address
from .masking import masked_settings

TIMEOUT_S: Final = 5.0

Facts = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, and how to tell."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--server", metavar="HOST:PORT", help="a coordinator to ask [the deployment that runs]"
    )
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S",
        help=f"wait so long for each answer, s [{TIMEOUT_S:g}]",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Asks and tells."""
    if not 0 < arguments.timeout <= 3600:
        raise ConfigError(f"--timeout: {arguments.timeout} is wrong; it must be above 0, s")
    found = asyncio.run(_status(arguments))
    if arguments.json:
        print(json.dumps(found))
    else:
        _show(found)
    return 0 if found["serving"] else 1


async def _status(arguments: argparse.Namespace) -> Facts:
    timeout_s: float = arguments.timeout
    if arguments.server:
        coordinator = await ask_coordinator(checked_address(arguments.server), timeout_s)
        running = coordinator["error"] is None
        return {
            "running": running, "serving": coordinator["serving"], "deployment": None,
            "coordinators": [coordinator], "targets": [], "drafts": [],
        }  # fmt: skip
    state = state_directory(os.environ)
    record = running_deployment(state)
    if record is None:
        return {
            "running": False, "serving": False, "deployment": None,
            "coordinators": [], "targets": [], "drafts": [],
            "lease": lease(state),
        }  # fmt: skip
    coordinators, targets, drafts = await asyncio.gather(
        asyncio.gather(
            *(ask_coordinator(one, timeout_s) for one in record.grpc_address.split(",") if one)
        ),
        asyncio.gather(*(ask_replica("target", one, timeout_s) for one in record.target_addresses)),
        asyncio.gather(*(ask_replica("draft", one, timeout_s) for one in record.draft_addresses)),
    )
    return {
        "running": True,
        # Without a draft requests are slower, and served all the same.
        "serving": all(any(one["serving"] for one in found) for found in (coordinators, targets)),
        "deployment": _deployment(record, state),
        "coordinators": coordinators,
        "targets": targets,
        "drafts": drafts,
        "lease": lease(state),
    }


def _deployment(record: DeploymentRecord, state: Path) -> Facts:
    """What its record says."""
    started = datetime.fromisoformat(record.started_at)
    return {
        "pid": record.pid,
        "started_at": record.started_at,
        "uptime_s": round((datetime.now(UTC) - started).total_seconds()),
        "state_directory": str(state),
        "log": str(state / LOG_NAME),
        "model": record.model,
        "draft_model": record.draft_model,
        "served_model_name": record.served_model_name,
        "wanted": record.wanted,
        "settings": masked_settings(record.settings),
    }


def lease(state: Path) -> Facts:
    """Who holds the lock that lets only one deployment have a state directory. `holder` is None
    where nobody does, and where the kernel does not say (`known`)."""
    return {
        "file": str(state / LOCK_NAME), "known": locks_known(), "holder": lock_holder(state),
    }  # fmt: skip


async def ask_coordinator(address: str, timeout_s: float) -> Facts:
    """What it serves, how many sessions run, and its health."""
    from outrider.client import Client

    async with Client(address) as client:
        serving = await client.healthy(timeout_s)
        return await _answer(address, serving, lambda: client.describe(timeout_s))


async def ask_replica(role: str, address: str, timeout_s: float) -> Facts:
    """What it runs, with its fingerprints, and its health."""
    from outrider.client import Client
    from outrider.wire.grpc_link import draft_link, target_link

    link: Any = (target_link if role == "target" else draft_link)(address)
    try:
        async with Client(address) as client:
            serving = await client.healthy(timeout_s)
        return await _answer(address, serving, lambda: link.describe(timeout_s))
    finally:
        await link.close()


async def _answer(address: str, serving: bool, describe: Callable[[], Awaitable[Any]]) -> Facts:
    try:
        facts, error = asdict(await describe()), None
    except OutriderError as failure:
        facts, error = {}, failure.message
    return {"address": address, "serving": serving, "error": error, **facts}


def _show(found: Facts) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    deployment = found["deployment"]
    if not found["running"]:
        holder = found["lease"]["holder"]
        console.print("nothing runs" if holder is None else f"starting (pid {holder})")
        return
    if deployment is not None:
        console.print(
            f"{deployment['served_model_name']}, drafted by {deployment['draft_model']}: "
            f"pid {deployment['pid']}, since {deployment['started_at']}",
            markup=False,
        )
    table = Table(box=None, pad_edge=False)
    for title in ("role", "address", "health", "runs"):
        table.add_column(title, overflow="fold")
    wanted = {} if deployment is None else deployment["wanted"]
    for role in ROLES:
        replicas = found[f"{role}s"]
        for facts in replicas:
            health = "[green]serving[/]" if facts["serving"] else "[red]not serving[/]"
            table.add_row(role, facts["address"], health, _what(facts))
        if len(replicas) != wanted.get(role, len(replicas)):
            table.add_row(role, "", "", f"{len(replicas)} of {wanted[role]} that are wanted")
    console.print(table)
    if deployment is not None:
        console.print(f"log {deployment['log']}", markup=False, soft_wrap=True)


def _what(facts: Facts) -> str:
    """A replica's or a coordinator's description in one line."""
    from rich.markup import escape

    if facts["error"] is not None:
        return escape(str(facts["error"]))
    if "num_running" in facts:
        return escape(
            f"{facts['model']}, {facts['num_running']} sessions running, "
            f"{facts['max_model_len']} tokens at most"
        )
    parts = [facts["model"], facts["dtype"]]
    parts += [
        f"{name} {facts[f'{name}_fingerprint'][:12]}"
        for name in ("weights", "tokenizer")
        if facts[f"{name}_fingerprint"]
    ]
    return escape(", ".join(part for part in parts if part))
