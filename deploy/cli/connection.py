"""The coordinator that a command talks to: a named one, the one that runs, or one of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.state import running_deployment, state_directory
from outrider.config import DeploymentConfig
from outrider.errors import ConfigError, SettingError, check
from outrider.settings import Value

from .settings import (
    add_setting_flags,
    deployment_config,
    given_flags,
    public_settings,
    refuse_other_settings,
    set_by,
)


@dataclass(frozen=True, slots=True)
class Connection:
    """Where to call, and what is known of what answers there."""

    address: str
    """HOST:PORT of the coordinator."""
    target_directory: str = ""
    """Where the target's files lie on this machine."""
    tokenizer_directory: str = ""
    settings: Mapping[str, Value] = field(default_factory=dict)
    """Of the deployment, by key; empty for a server that only an address is known of."""
    is_own: bool = False
    """Whether the command started it, so that it has answered nobody else."""


def add_connection_flags(parser: argparse.ArgumentParser, without: Collection[str]) -> None:
    """`--server`, and the settings of a deployment to start if none runs."""
    parser.add_argument(
        "--server", metavar="HOST:PORT",
        help="the coordinator to call [the deployment that runs, else one of its own]",
    )  # fmt: skip
    add_setting_flags(
        parser,
        "settings of the deployment, where this command starts one (on any free port, unless "
        "--grpc-port is set)",
        without,
    )


@asynccontextmanager
async def connected(arguments: argparse.Namespace) -> AsyncIterator[Connection]:
    """A coordinator to call while the context lasts. One that this command started ends with it.
    Raises `ConfigError` where flags ask for another deployment than the one that runs."""
    if arguments.server:
        given = given_flags(arguments)
        if given:
            raise SettingError(sorted(given)[0], "cannot be set for a server that runs already")
        yield Connection(checked_address(arguments.server))
        return
    record = running_deployment(state_directory(os.environ))
    if record is not None:
        refuse_other_settings(arguments, record)
        yield Connection(
            record.grpc_address,
            record.target_directory,
            record.tokenizer_directory,
            record.settings,
        )
        return
    async with _own_deployment(own_config(arguments)) as connection:
        yield connection


def own_config(arguments: argparse.Namespace) -> DeploymentConfig:
    """The deployment that a command starts for itself: as `serve` would, but on any free port
    where none is set, since only this command looks for it, and the usual one may be taken."""
    config = deployment_config(arguments)
    if "grpc_port" in set_by(arguments):
        return config
    return replace(config, coordinator=replace(config.coordinator, grpc_port=0))


def checked_address(server: str) -> str:
    """The address itself. Raises `ConfigError` unless it is HOST:PORT."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--server: {server!r} is wrong; it must be HOST:PORT")
    return server


def _progress(line: str) -> None:
    print(f"outrider: {line}", file=sys.stderr, flush=True)


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Lets what the context holds be stopped before this process ends by SIGTERM."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    check(task is not None, "a deployment is started outside a task")
    received = False

    def end() -> None:
        nonlocal received
        received = True
        task.cancel()  # type: ignore[union-attr]

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if received:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@asynccontextmanager
async def _own_deployment(config: DeploymentConfig) -> AsyncIterator[Connection]:
    """A deployment with a state of its own, that ends with the context."""
    from deploy.launcher import Deployment

    with tempfile.TemporaryDirectory(prefix="outrider-") as state, _ends_on_sigterm():
        async with Deployment(config, Path(state), report=_progress) as deployment:
            found = deployment.config
            yield Connection(
                deployment.endpoints.coordinator,
                found.target.directory,
                found.coordinator.tokenizer_directory,
                public_settings(found),
                is_own=True,
            )
