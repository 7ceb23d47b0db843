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
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

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

from .connection import (
    Connection,
    add_caller_flags,
    checked_address,
    shown_key,
    trust_of,
)
from .masking import masked_settings
from .naming import told
from .status_table import Facts, status_table
from .tables import show

TIMEOUT_S: Final = 5.0
WATCH_S: Final = 2.0


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
    parser.add_argument(
        "--watch", type=float, nargs="?", const=WATCH_S, metavar="S",
        help=f"ask again and again, each S seconds [{WATCH_S:g}], until Ctrl-C",
    )  # fmt: skip
    add_caller_flags(parser)


def run(arguments: argparse.Namespace) -> int:
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
        return
    show(status_table(found), highlight=False, soft_wrap=not found["running"])


async def _watch(arguments: argparse.Namespace) -> int:
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


async def _status(arguments: argparse.Namespace) -> Facts:
    timeout_s: float = arguments.timeout
    if arguments.server:
        caller = partial(Connection, api_key=shown_key(arguments), trust=trust_of(arguments, {}))
        coordinator = await ask_coordinator(caller(checked_address(arguments.server)), timeout_s)
        # One that serves, and does not answer this caller, says why.
        running = coordinator["error"] is None or coordinator["serving"]
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
    caller = partial(
        Connection, api_key=shown_key(arguments) or local_key(state),
        trust=trust_of(arguments, record.settings),
    )  # fmt: skip
    inner = str(record.settings.get("internal_tls_dir") or "")
    (known, registry_error), coordinators, targets, drafts = await asyncio.gather(
        ask_registry(record, timeout_s),
        asyncio.gather(
            *(
                ask_coordinator(caller(one), timeout_s)
                for one in record.grpc_address.split(",")
                if one
            )
        ),
        asyncio.gather(
            *(ask_replica("target", one, timeout_s, inner) for one in record.target_addresses)
        ),
        asyncio.gather(
            *(ask_replica("draft", one, timeout_s, inner) for one in record.draft_addresses)
        ),
    )
    for facts in (*coordinators, *targets, *drafts):
        facts |= known.get(facts["address"], {})
    return {
        "running": True,
        # Without a draft requests are slower, and served all the same.
        "serving": all(any(one["serving"] for one in found) for found in (coordinators, targets)),
        "deployment": _deployment(record, state),
        "coordinators": coordinators,
        "targets": targets,
        "drafts": drafts,
        "registry_error": registry_error,
        "lease": lease(state),
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
        "http_address": record.http_address,
        "wanted": record.wanted,
        "settings": masked_settings(record.settings),
    }


def lease(state: Path) -> Facts:
    """Who holds the lock that lets only one deployment have a state directory. `holder` is None
    where nobody does, and where the kernel does not say (`known`)."""
    return {
        "file": str(state / LOCK_NAME), "known": locks_known(), "holder": lock_holder(state),
    }  # fmt: skip


async def ask_coordinator(connection: Connection, timeout_s: float) -> Facts:
    """What it serves, how many sessions run, and its health."""
    async with connection.client() as client:
        serving = await client.healthy(timeout_s)
        return await _answer(connection.address, serving, lambda: client.describe(timeout_s))


async def ask_replica(
    role: Literal["target", "draft"], address: str, timeout_s: float, internal_tls_dir: str = ""
) -> Facts:
    """What it runs, with its fingerprints, and its health; as a coordinator asks, where it answers
    no one else."""
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
        facts, error = {}, told(failure)
    return {"address": address, "serving": serving, "error": error, **facts}
