"""`outrider stop`: ends the deployment that was started with `serve`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from deploy.fleet.local_state import (
    FILE_NAME,
    LOG_NAME,
    DeploymentRecord,
    alive,
    lock_holder,
    logged_error,
    recorded_deployment,
    state_directory,
    withdraw,
)
from outrider.errors import Unavailable

from .progress import progress

STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long to wait."""
    parser.add_argument(
        "--timeout", type=float, default=STOP_TIMEOUT_S, metavar="S",
        help=f"wait so long for it to end, s [{STOP_TIMEOUT_S:g}]",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Asks the deployment's process to stop, and waits until it is gone. Nothing to stop is no
    error; what is left of a deployment that ended by itself is told, and its record removed."""
    directory = state_directory(os.environ)
    record = recorded_deployment(directory)
    holder = lock_holder(directory)
    if record is not None and alive(record):
        _end(record.pid, lambda: alive(record), arguments.timeout)
        found = f"stopped the deployment at {record.grpc_address}"
    elif holder is not None:
        _end(holder, lambda: lock_holder(directory) == holder, arguments.timeout)
        found = f"stopped a deployment that was starting or stopping (pid {holder})"
    else:
        found = _left(directory, record)
    if "quiet" not in arguments:
        print(found, file=sys.stderr)
    return 0


def _end(pid: int, runs: Callable[[], bool], timeout_s: float) -> None:
    """Raises `Unavailable` where the process still runs after the time."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    progress(f"stopping the deployment (pid {pid})", at_once=False)
    give_up_at = time.monotonic() + timeout_s
    # The process is no child of this one, so the kernel does not tell when it ends.
    while runs():
        if time.monotonic() >= give_up_at:
            raise Unavailable(f"the deployment (pid {pid}) still runs after {timeout_s:g} s")
        time.sleep(_POLL_S)
    progress.rest()


def _left(directory: Path, record: DeploymentRecord | None) -> str:
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
