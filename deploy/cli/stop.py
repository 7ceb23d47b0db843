"""`outrider stop`: ends the deployment that was started with `serve`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Final

from deploy.state import alive, running_deployment, state_directory
from outrider.errors import Unavailable

STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long to wait, and whether to say what was done."""
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    parser.add_argument(
        "--timeout", type=float, default=STOP_TIMEOUT_S, metavar="S",
        help=f"wait so long for it to end, s [{STOP_TIMEOUT_S:g}]",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Asks the deployment's process to stop, and waits until it is gone. Nothing to stop is no
    error."""
    directory = state_directory(os.environ)
    record = running_deployment(directory)
    if record is None:
        _say("nothing runs", arguments)
        return 0
    try:
        os.kill(record.pid, signal.SIGTERM)
    except ProcessLookupError:
        return 0
    give_up_at = time.monotonic() + arguments.timeout
    # The process is no child of this one, so the kernel does not tell when it ends.
    while alive(record):
        if time.monotonic() >= give_up_at:
            raise Unavailable(
                f"the deployment (pid {record.pid}) still runs after {arguments.timeout:g} s"
            )
        time.sleep(_POLL_S)
    _say(f"stopped the deployment at {record.grpc_address}", arguments)
    return 0


def _say(line: str, arguments: argparse.Namespace) -> None:
    if not arguments.quiet:
        print(line, file=sys.stderr)
