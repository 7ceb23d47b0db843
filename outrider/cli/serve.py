"""`outrider serve` starts a deployment, `outrider stop` stops it, and `outrider status` shows its
replicas. `status` exits with 0 if a coordinator and a target serve, otherwise with 1."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.report import Report
from outrider.config.deployment import WAIT_S_MAX
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.fleet import local_state
from outrider.fleet.local_state import DeploymentRecord, running_deployment, state_directory
from outrider.foundation.logs import LogFile
from outrider.redis.address import RedisAddress, with_password
from outrider.registry.registry import LEASE_S, ROLES, Role, Starts

from . import options
from .command import Arguments, Option, Seconds, argument, command, json_option
from .output import masked_settings, progress, shell_command, show, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outrider.fleet.launcher import Deployment
    from outrider.transport.channel import Trust

_log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.25
STOP_TIMEOUT_S = 60.0
STOP_POLL_S = 0.05


@command(
    "serve",
    argument("target", "the target model", required=False),
    Option(
        "--detach", is_flag=True, help="run in the background; return once the deployment is ready"
    ),
    json_option(),
    *options.setting_options(common=options.COMMON),
)
def serve(arguments: Arguments) -> int:
    if arguments.target is not None:
        model = arguments.settings.setdefault("model", arguments.target)
        if model != arguments.target:
            raise ConfigError(f"--model: {model!r} is not the TARGET {arguments.target!r}")
    config = options.deployment_config(arguments)  # Wrong settings raise here, before `fork`.
    state = state_directory(os.environ)
    if arguments.detach:
        with local_state.exclusive(state):
            pass  # If another deployment runs, this raises before `fork`.
        log_path = state / local_state.LOG_NAME
        log_path.unlink(missing_ok=True)
        log = LogFile(log_path, descriptors=(1, 2))
        if pid := os.fork():  # `fork` is safe here, because no other thread runs yet.
            return _announce_detached(pid, state, arguments)
        _detach(log)
    with local_state.exclusive(state):
        from outrider.fleet.launcher import Deployment

        return asyncio.run(_serve(Deployment(config, state, report=progress), state, arguments))


async def _serve(deployment: Deployment, state: Path, arguments: Arguments) -> int:
    """Runs until SIGINT, SIGTERM or, unless `nohup` ignores it, SIGHUP. Returns 130 if SIGINT came
    before the deployment served, otherwise 0. Raises the error of a deployment that fails."""
    serving = asyncio.create_task(_until_it_fails(deployment, state, arguments))
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def end(number: int) -> None:
        if not received:
            local_state.mark_stopping(state)
            serving.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
    try:
        await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()  # Raises the deployment's error.
        elif not received:
            raise Unavailable("the deployment was cancelled")
        served = running_deployment(state) is not None
        return 128 + signal.SIGINT if received[0] == signal.SIGINT and not served else 0
    finally:
        local_state.mark_stopping(state)  # The deployment may also have failed.
        local_state.withdraw(state)
        progress("stopping")
        await deployment.stop()


async def _until_it_fails(deployment: Deployment, state: Path, arguments: Arguments) -> None:
    """Starts the deployment, and updates its record when replicas start or end. Raises
    `Unavailable` if the last target or coordinator has ended and no new one starts."""
    await deployment.start()
    progress.rest()
    local_state.publish(state, deployment.record, deployment.api_key)
    if not arguments.detach:
        _announce(deployment.record, arguments)
    while (role := deployment.overview.failed_role) is None:
        await deployment.changed()
        try:
            local_state.publish(state, deployment.record)
        except ConfigError as error:
            _log.error("%s", error)
    raise Unavailable(f"there is no {role}, and none can be started; logs are in {state / 'logs'}")


def _announce(record: DeploymentRecord, arguments: Arguments) -> int:
    return tell(Report(asdict(record), [endpoints_text(record)]), arguments.json)


def endpoints_text(record: DeploymentRecord) -> str:
    words = '"The capital of France is"' if record.tokenizer_directory else "--token-ids 1,2,3"
    needed = ["send an API key"] if record.asks_for_keys else []
    if certificate := record.settings.get("ssl_certfile"):
        needed.append(f"use TLS (certificate {certificate})")
    scheme = "https" if certificate else "http"
    by_http = [f"{scheme}://{address}" for address in record.http_address.split(",") if address]
    sections = {
        "gRPC": record.grpc_address.split(","),
        "OpenAI": [f"{url}/v1" for url in by_http],
        "window": [f"{url}/" for url in by_http],
        "access": [f"callers must {' and '.join(needed)}; local commands do so"] if needed else [],
        "try": [f"{shell_command()} generate {words}"],
        "stop": [f"{shell_command()} stop"],
    }
    lines = [f"serving {record.served_model_name}, drafted by {record.draft_model}"]
    for name, values in sections.items():
        for place, value in enumerate(values):
            lines.append(f"  {'' if place else name:6}  {value}")
    return "\n".join(lines)


def _announce_detached(pid: int, state: Path, arguments: Arguments) -> int:
    try:
        result = _record_once_ready(state, pid)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    if isinstance(result, DeploymentRecord):
        return _announce(result, arguments)
    log_path, error = state / local_state.LOG_NAME, local_state.logged_error(state)
    if result == 2 and error is not None:
        raise ConfigError(error)
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    last = error or (lines[-1] if lines else "its log is empty")
    raise OutriderError(f"the deployment did not start (exit code {result}): {last} ({log_path})")


def _record_once_ready(state: Path, pid: int) -> DeploymentRecord | int:
    """Waits until the detached process serves or ends, and prints the progress lines of its log.
    Returns the deployment's record, or the process's exit code."""
    with (state / local_state.LOG_NAME).open("rb") as log:
        unfinished = b""
        while True:
            record, (gone, status) = running_deployment(state), os.waitpid(pid, os.WNOHANG)
            *lines, unfinished = (unfinished + log.read()).split(b"\n")
            for line in lines:
                progress.relay(line.decode("utf-8", "replace"))
            if record is not None and record.pid == pid:
                return record
            if gone:
                return os.waitstatus_to_exitcode(status)
            time.sleep(LOOK_PERIOD_S)


def _detach(log: LogFile) -> None:
    """Detaches this process from the terminal. Output and errors go to the log."""
    os.setsid()
    progress.quiet = False  # All lines go to the log. The parent decides which lines it prints.
    log.take_over()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    root = logging.getLogger()
    for before in root.handlers[:]:
        log.setFormatter(before.formatter)
        root.removeHandler(before)
    root.addHandler(log)


@command(
    "stop",
    Option(
        "--timeout",
        type=Seconds(0, WAIT_S_MAX),
        default=STOP_TIMEOUT_S,
        metavar="S",
        help="how long to wait for the deployment to end, s",
    ),
)
def stop(arguments: Arguments) -> int:
    """Ends the deployment's process. If no deployment runs, says why, and also returns 0."""
    state = state_directory(os.environ)
    record, holder = local_state.recorded_deployment(state), local_state.lock_holder(state)
    if holder is None:
        message = _nothing_to_stop(state, record)
    else:
        _end(holder, arguments.timeout)
        message = f"stopped a deployment that was starting or stopping (pid {holder})"
        if record is not None:
            message = f"stopped the deployment at {record.grpc_address}"
    if not arguments.quiet:
        print(message, file=sys.stderr)
    return 0


def _end(pid: int, timeout_s: float) -> None:
    progress(f"stopping the deployment (pid {pid})", at_once=False)
    give_up_at = time.monotonic() + timeout_s
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        # Polls, because only a parent can use `waitpid`, and `pidfd_open` may be missing.
        while not _is_zombie(pid):
            if time.monotonic() >= give_up_at:
                raise Unavailable(
                    f"the deployment (pid {pid}) is still running after {timeout_s:g} s"
                )
            time.sleep(STOP_POLL_S)
            os.kill(pid, 0)
    progress.rest()


def _is_zombie(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "Z"
    return False


def _nothing_to_stop(state: Path, record: DeploymentRecord | None) -> str:
    """Says why no deployment runs. Removes the record of a process that has died."""
    if record is not None:
        local_state.withdraw(state)
        return (
            f"nothing runs: the deployment at {record.grpc_address} (pid {record.pid}) died; "
            f"removed its record {state / local_state.FILE_NAME}"
        )
    if (error := local_state.logged_error(state)) is None:
        return "nothing runs"
    log = state / local_state.LOG_NAME
    return f"nothing runs: the last detached deployment ended by itself: {error} (log {log})"


Facts = dict[str, Any]
TIMEOUT_S = 5.0
"""Time limit of `status` for each answer of a replica or of Redis."""
WATCH_S = 2.0
NEEDED = ("coordinator", "target")
HEALTH = {"serving": "green", "not serving": "red", "leaving": "yellow", "starting": "yellow"}
FIGURES = {
    "tokens_per_second": "{:.0f} tokens/s",
    "busy": "{:.0%} busy",
    "fill": "steps {:.0%} full",
    "kv_usage": "{:.0%} of KV cache",
    "acceptance": "{:.0%} accepted",
    "look_ahead_hits": "{:.0%} look-ahead hits",
    "draft_waits": "{:.0%} of rounds wait for drafts",
    "queue_steps": "mean wait in the queue {:.1f} steps",
    "loop_lag_ms": "event loop {:.0f} ms late",
}
PRINTS = {
    "weights_fingerprint": "weights",
    "tokenizer_fingerprint": "tokenizer",
    "numerics": "bit-equal rows",
}


@command(
    "status",
    json_option(),
    Option(
        "--server",
        metavar="HOST:PORT",
        help="ask only this coordinator; by default ask all replicas of this machine's deployment",
    ),
    Option(
        "--watch",
        type=Seconds(0.1, 3600),
        is_flag=False,
        flag_value=WATCH_S,
        metavar="[S]",
        help=f"repeat every S seconds [{WATCH_S:g}], until Ctrl-C",
    ),
    *options.caller_options(),
)
def status(arguments: Arguments) -> int:
    watches = arguments.watch is not None
    while True:
        facts = asyncio.run(_status(arguments))
        if arguments.json:
            print(json.dumps(facts), flush=True)
        else:
            show(status_table(facts), soft_wrap=not facts["running"], clear=watches)
        if not watches:
            return 0 if facts["serving"] else 1
        time.sleep(arguments.watch)


async def _status(arguments: Arguments) -> Facts:
    key = options.caller_key(arguments)
    facts: Facts = {"running": False, "serving": False, "stopping": False, "deployment": None}
    facts |= {f"{role}s": [] for role in ROLES}
    if arguments.server:
        address = options.checked_address(arguments.server)
        trust = options.caller_trust_of(arguments, {})
        coordinator = await ask_replica("coordinator", address, key, trust)
        # If a coordinator serves but refuses this caller, `serving` is True and `error` is set.
        running = coordinator["error"] is None or coordinator["serving"]
        return facts | {
            "running": running,
            "serving": coordinator["serving"],
            "coordinators": [coordinator],
        }
    state = state_directory(os.environ)
    holder = local_state.lock_holder(state)
    facts["lease"] = {"file": str(state / local_state.LOCK_NAME), "holder": holder}
    record = running_deployment(state)
    if record is None:
        return facts | {"stopping": local_state.is_stopping(state)}
    trust = options.caller_trust_of(arguments, record.settings)
    internal = str(record.settings.get("internal_tls_dir") or "")
    addresses: dict[Role, list[str]] = {
        "coordinator": list(filter(None, record.grpc_address.split(","))),
        "target": record.target_addresses,
        "draft": record.draft_addresses,
    }
    shown = key or local_state.local_key(state)
    asked = [
        asyncio.gather(*(ask_replica(role, address, shown, trust, internal) for address in those))
        for role, those in addresses.items()
    ]
    registry, answers = await asyncio.gather(ask_registry(record), asyncio.gather(*asked))
    if local_state.is_stopping(state):  # Since then, the replicas may have ended.
        return facts | {"stopping": True}
    for role, replicas in zip(addresses, answers, strict=True):
        facts[f"{role}s"] = [
            registry.replicas.get(replica["address"], {}) | replica for replica in replicas
        ]
    started = datetime.fromisoformat(record.started_at)
    return facts | {
        "running": True,
        "serving": all(any(replica["serving"] for replica in facts[f"{role}s"]) for role in NEEDED),
        "deployment": asdict(record)
        | {
            "uptime_s": round((datetime.now(UTC) - started).total_seconds()),
            "state_directory": str(state),
            "log": str(state / local_state.LOG_NAME),
            "settings": masked_settings(record.settings),
        },
        "starts": [asdict(start) for start in registry.starts],
        "registry_error": registry.error,
    }


@dataclass(frozen=True)
class InRegistry:
    """What the deployment's Redis says."""

    replicas: dict[str, Facts] = field(default_factory=dict)
    """The replicas' records, by address."""
    starts: tuple[Starts, ...] = ()
    error: str | None = None


async def ask_registry(record: DeploymentRecord) -> InRegistry:
    """Reads the registry in the deployment's Redis. Passwords come from files that `record.redis`
    names, or from the environment."""
    from outrider.registry.redis_registry import RedisRegistry

    known: dict[str, Facts] = {}
    starts: dict[Role, Starts] = {}
    try:
        address = with_password(RedisAddress(**record.redis))
        async with AsyncExitStack() as stack, asyncio.timeout(TIMEOUT_S):
            registry = RedisRegistry(address, record.name)
            stack.push_async_callback(registry.close)
            for role in ROLES:
                for replica, left_s in await registry.leases(role):
                    age_s = round(max(0.0, LEASE_S - left_s), 2)
                    known[replica.address] = asdict(replica) | {"lease_age_s": age_s}
            starts = await registry.starts()
    except TimeoutError:
        return InRegistry(known, error=f"Redis has not answered within {TIMEOUT_S:g} s")
    except OutriderError as error:
        return InRegistry(known, error=error.message)
    # If the reconciler has died, a replica may serve by now.
    serving = {facts["name"] for facts in known.values()}
    waiting = (start.without(serving) for start in starts.values())
    return InRegistry(known, tuple(start for start in waiting if start.names or start.expected))


async def ask_replica(
    role: Role, address: str, key: str, trust: Trust | None, internal: str = ""
) -> Facts:
    """Asks a replica to describe itself. Calls targets and drafts with the coordinator's TLS
    certificate in the directory `internal`, or without TLS if `internal` is empty."""
    from outrider.transport.channel import PLAIN
    from outrider.transport.codec import DRAFT, VERIFY
    from outrider.transport.grpc_link import GrpcLink
    from outrider.transport.tls import internal_trust

    facts: Facts = {"address": address, "serving": False, "error": None}
    try:
        async with AsyncExitStack() as stack:
            link: Any = None
            if role != "coordinator":
                key, trust = "", PLAIN
                if internal:
                    trust = internal_trust(Path(internal), "coordinator", role)
                link = GrpcLink(VERIFY if role == "target" else DRAFT, address, trust)
                stack.push_async_callback(link.close)
            connection = options.Connection(address, api_key=key, trust=trust)
            client = await stack.enter_async_context(connection.client())
            facts["serving"] = await client.healthy(TIMEOUT_S)
            facts |= asdict(await (link or client).describe(TIMEOUT_S))
    except OutriderError as error:
        facts["error"] = options.error_message(error)
    return facts


def status_table(report: Facts) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    deployment = report["deployment"] or {}
    if not report["running"]:
        holder = report.get("lease", {}).get("holder")
        verb = "being stopped" if report.get("stopping") else "starting"
        return Text("nothing runs" if holder is None else f"{verb} (pid {holder})")
    parts: list[RenderableType] = []
    if deployment:
        models = f"{deployment['served_model_name']}, drafted by {deployment['draft_model']}"
        parts.append(Text(f"{models}: pid {deployment['pid']}, since {deployment['started_at']}"))
    table = Table(box=None, pad_edge=False)
    for title in ("replica", "address", "health", "details"):
        table.add_column(title, overflow="fold")
    parts.append(table)
    starts = {entry["role"]: Starts(**entry) for entry in report.get("starts", ())}
    for role in ROLES:
        replicas = report[f"{role}s"]
        for facts in replicas:
            health = "serving" if facts["serving"] else "not serving"
            health = "leaving" if facts.get("leaving") else health
            table.add_row(
                facts.get("name", role),
                Text(facts["address"]),
                Text(health, HEALTH[health]),
                Text("\n".join(filter(None, _lines(facts)))),
            )
        if (start := starts.get(role)) is not None:
            for name in start.names or (role,):
                table.add_row(name, "", Text("starting", HEALTH["starting"]), start.details)
        number = sum(not facts.get("trial_share") for facts in replicas)
        wanted = deployment.get("wanted", {}).get(role, number)
        if number != wanted:
            table.add_row(role, "", "", f"{number} of {wanted} running")
    if trial := deployment.get("trial"):
        parts.append(Text(trial))
    if error := report.get("registry_error"):
        parts.append(Text(f"the replicas' load is not known: {error}", style="yellow"))
    if address := deployment.get("http_address"):
        parts.append(Text(f"HTTP {address}"))
    if deployment:
        parts.append(Text(f"log {deployment['log']}", overflow="fold"))
    return Group(*parts)


def _lines(facts: Facts) -> Iterator[str]:
    from outrider.interfaces.messages import coupling_note

    if facts["error"] is not None:
        yield facts["error"]
    elif "num_running" in facts:
        num = facts["num_running"]
        running = f"{num} session{'s' * (num != 1)} running"
        yield f"{facts['model']}, {running}, max_model_len {facts['max_model_len']}"
    else:
        prints = [f"{name} {facts[key][:12]}" for key, name in PRINTS.items() if facts[key]]
        yield ", ".join(filter(None, (facts["model"], facts["dtype"], *prints)))
        yield facts["dtype_note"]
        yield f"steps run on {facts['kernels']}" if facts["kernels"] else ""
        yield facts["draft_note"]
        yield coupling_note(facts["row_coupling"])
    if "lease_age_s" in facts:
        age = f"last seen {facts['lease_age_s']:.1f} s ago"
        trial = f"trial share {facts['trial_share']:.0%}" if facts["trial_share"] else ""
        on = (facts["host"], f"pid {facts['pid']}", facts["device"], age, trial)
        yield ", ".join(filter(None, on))
        figures = facts["figures"]
        known = (key for key in FIGURES if figures[key] is not None)
        yield ", ".join(FIGURES[key].format(figures[key]) for key in known)
