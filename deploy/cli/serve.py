"""`outrider serve` starts a deployment, in the foreground or detached; `outrider stop` ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.fleet.local_state import (
    FILE_NAME,
    LOG_NAME,
    DeploymentRecord,
    exclusive,
    lock_holder,
    logged_error,
    publish,
    publish_key,
    recorded_deployment,
    running_deployment,
    state_directory,
    withdraw,
)
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.telemetry.logs import LogFile

from .command import Arguments, argument, command, json_option, option
from .options import COMMON, deployment_config, setting_options
from .output import progress, shell_command

if TYPE_CHECKING:
    from deploy.fleet.launcher import Deployment

_log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.25
"""Between two looks at a detached process that starts."""
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.05


@command(
    "serve",
    argument("target", "the target model", required=False),
    option(
        "--detach", is_flag=True,
        help="go on in the background after this command and its shell have ended",
    ),
    json_option(),
    *setting_options(common=COMMON),
)  # fmt: skip
def serve(arguments: Arguments) -> int:
    """Serves until a signal; detached: returns once the deployment is ready."""
    if arguments.target is not None:
        model = arguments.settings.setdefault("model", arguments.target)
        if model != arguments.target:
            raise ConfigError(f"--model: {model!r} is not the TARGET {arguments.target!r}")
    config = deployment_config(arguments)  # Here, so that what is wrong shows on this terminal.
    state = state_directory(os.environ)
    if arguments.detach:
        with exclusive(state):
            pass  # Another deployment is noticed here, with a better message than from a log.
        (state / LOG_NAME).unlink(missing_ok=True)
        log = LogFile(state / LOG_NAME, descriptors=(1, 2))
        if pid := os.fork():  # No other thread runs yet.
            return _announce_detached(pid, state, arguments)
        _detach(log)
    with exclusive(state):
        from deploy.fleet.launcher import Deployment

        return asyncio.run(_serve(Deployment(config, state, report=progress), state, arguments))


async def _serve(deployment: Deployment, state: Path, arguments: Arguments) -> int:
    """Until SIGINT or SIGTERM, or until there is none of a role that cannot be missed. The exit
    code: 0, or that of an interrupted command where SIGINT came before it served."""
    serving = asyncio.create_task(_until_it_fails(deployment, state, arguments))
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def end(number: int) -> None:
        if not received:
            serving.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()  # Raises.
        elif not received:
            raise Unavailable("the deployment was given up")
        served = running_deployment(state) is not None
        return 128 + signal.SIGINT if received[0] == signal.SIGINT and not served else 0
    finally:
        withdraw(state)
        progress("stopping")
        await deployment.stop()


async def _until_it_fails(deployment: Deployment, state: Path, arguments: Arguments) -> None:
    """Keeps the record true while replicas come and go."""
    await deployment.start()
    progress.rest()
    publish_key(state, deployment.api_key)
    publish(state, deployment.record)
    if not arguments.detach:
        _announce(deployment.record, arguments)
    while (role := deployment.overview.hopeless) is None:
        await deployment.changed()
        try:
            publish(state, deployment.record)
        except OSError as error:
            _log.error("the record of what runs cannot be written: %s", error)
    raise Unavailable(f"there is no {role}, and none can be started; logs are in {state / 'logs'}")


def _announce(record: DeploymentRecord, arguments: Arguments) -> None:
    print(json.dumps(asdict(record)) if arguments.json else endpoints_text(record), flush=True)


def endpoints_text(record: DeploymentRecord) -> str:
    """Where a deployment answers, what callers need, and a command to try that it does not refuse.
    Those of this user on this machine need nothing."""
    words = '"The capital of France is"' if record.tokenizer_directory else "--token-ids 1,2,3"
    needed = ["an API key"] if record.asks_for_keys else []
    if certificate := record.settings.get("ssl_certfile"):
        needed.append(f"TLS, by {certificate}")
    scheme = "https" if certificate else "http"
    by_http = [f"{scheme}://{one}" for one in record.http_address.split(",") if one]
    sections = {
        "gRPC": record.grpc_address.split(","),
        "OpenAI": [f"{one}/v1" for one in by_http],
        "window": [f"{one}/" for one in by_http],
        "others": [f"need {' and '.join(needed)}"] if needed else [],
        "try": [f"{shell_command()} generate {words}"],
        "stop": [f"{shell_command()} stop"],
    }
    lines = [f"serving {record.served_model_name}, drafted by {record.draft_model}"]
    for name, values in sections.items():
        for place, value in enumerate(values):
            lines.append(f"  {'' if place else name:6}  {value}")
    return "\n".join(lines)


def _announce_detached(pid: int, state: Path, arguments: Arguments) -> int:
    """Waits until the detached process serves or is gone; then says why, in its own words where it
    had any."""
    try:
        record, code = _record_once_ready(state, pid)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    if record is not None:
        _announce(record, arguments)
        return 0
    log_path, error = state / LOG_NAME, logged_error(state)
    if code == 2 and error is not None:
        raise ConfigError(error)
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    last = error or (lines[-1] if lines else "it wrote nothing")
    raise OutriderError(f"the deployment did not start (exit code {code}): {last} ({log_path})")


def _record_once_ready(state: Path, pid: int) -> tuple[DeploymentRecord | None, int]:
    """What a detached process records when it serves; None, and its exit code, where it has gone.
    What it says meanwhile in its log is said here, too."""
    with (state / LOG_NAME).open("rb") as log:
        said = b""
        while True:
            record, (gone, status) = running_deployment(state), os.waitpid(pid, os.WNOHANG)
            *lines, said = (said + log.read()).split(b"\n")
            for line in lines:
                progress.relay(line.decode("utf-8", "replace"))
            if record is not None and record.pid == pid:
                return record, 0
            if gone:
                return None, os.waitstatus_to_exitcode(status)
            time.sleep(LOOK_PERIOD_S)


def _detach(log: LogFile) -> None:
    """Makes this process one of its own session, whose standard output and error are its log."""
    os.setsid()
    progress.quiet = False  # The other process relays what this one says, or not.
    log.take_over()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    root = logging.getLogger()
    for before in root.handlers[:]:
        log.setFormatter(before.formatter)
        root.removeHandler(before)
    root.addHandler(log)


@command(
    "stop",
    option(
        "--timeout", type=float, default=STOP_TIMEOUT_S, metavar="S",
        help="wait at most this long for it to end, s",
    ),
)  # fmt: skip
def stop(arguments: Arguments) -> int:
    """Asks the deployment's process to stop, and waits until it is gone. Nothing to stop is no
    error; a deployment that ended by itself is reported, and its record removed."""
    directory = state_directory(os.environ)
    record = recorded_deployment(directory)
    holder = lock_holder(directory)
    if holder is None:
        found = _nothing_to_stop(directory, record)
    else:
        _end(holder, directory, arguments.timeout)
        found = f"stopped a deployment that was starting or stopping (pid {holder})"
        if record is not None:
            found = f"stopped the deployment at {record.grpc_address}"
    if not arguments.quiet:
        print(found, file=sys.stderr)
    return 0


def _end(pid: int, directory: Path, timeout_s: float) -> None:
    """Raises `Unavailable` where the process still runs after the time."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    progress(f"stopping the deployment (pid {pid})", at_once=False)
    give_up_at = time.monotonic() + timeout_s
    # The process is no child of this one, so the kernel does not tell when it ends.
    while lock_holder(directory) == pid or _is_running(pid):
        if time.monotonic() >= give_up_at:
            raise Unavailable(f"the deployment (pid {pid}) still runs after {timeout_s:g} s")
        time.sleep(_POLL_S)
    progress.rest()


def _is_running(pid: int) -> bool:
    """Whether the process is there and no zombie. Told by Linux alone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def _nothing_to_stop(directory: Path, record: DeploymentRecord | None) -> str:
    """What is left where nothing runs; removes the record of a process that is gone."""
    error = logged_error(directory)
    if record is not None:
        withdraw(directory)
        return (
            f"nothing runs: the deployment at {record.grpc_address} (pid {record.pid}) is gone "
            f"without having been stopped; removed its record {directory / FILE_NAME}"
        )
    if error is not None:
        log = directory / LOG_NAME
        return f"nothing runs: the last one that was detached ended by itself: {error} (log {log})"
    return "nothing runs"
