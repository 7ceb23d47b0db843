"""What a command talks to: a coordinator that is named, that runs, or that it starts; or the
deployment that it changes."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy.fleet.local_state import (
    DeploymentRecord,
    local_key,
    running_deployment,
    state_directory,
)
from deploy.fleet.reconciler import DeploymentLocation
from outrider.config import DeploymentConfig, configuration
from outrider.errors import ConfigError, SettingError, Unavailable
from outrider.settings import Value

from .command import Arguments, Option, grouped, option
from .options import (
    KEY_VARIABLE,
    OF_CALLERS,
    PLACE_KEYS,
    given_settings,
    key_option,
    refuse_other_settings,
    setting_options,
)
from .output import progress

if TYPE_CHECKING:
    from deploy.fleet.launcher import Deployment
    from outrider.client import Client
    from outrider.transport.channel import Trust

TRUST_OPTIONS: Final = {
    "ca_cert": "authority of a coordinator with TLS, in PEM",
    "client_cert": "certificate for one that asks for it, in PEM",
    "client_key": "private key of that, in PEM",
}


@dataclass(frozen=True, slots=True)
class Connection:
    """Where to call, and what is known of what answers there."""

    address: str
    """HOST:PORT of the coordinators, with commas between them."""
    target_directory: str = ""
    """Where the target's files lie on this machine."""
    tokenizer_directory: str = ""
    settings: Mapping[str, Value] = field(default_factory=dict)
    """Of the deployment, by key; empty for a server that only an address is known of."""
    deployment: str = ""
    """Names the deployment that runs on this machine; empty for others."""
    is_own: bool = False
    """Whether the command started it, and no other client has called it."""
    api_key: str = field(default="", repr=False)
    trust: Trust | None = field(default=None, repr=False)
    """How it is known; None = it has no TLS."""
    http_address: str = ""
    """HOST:PORT of a coordinator's HTTP interface; empty where it has none, or none is known."""
    find: Callable[[], str] | None = None
    """Says where coordinators are by now; None where only an address is known."""

    def client(self, *, tries_again: bool = True) -> Client:
        """Calls what is there, and tries again what fails for now, or not."""
        from outrider.client import Client
        from outrider.client.failover import RESUME_TIMEOUT_S
        from outrider.transport.channel import PLAIN

        return Client(
            self.find or self.address,
            api_key=self.api_key,
            trust=self.trust or PLAIN,
            resume_timeout_s=RESUME_TIMEOUT_S if tries_again else 0.0,
        )


def connection_options(without: Iterable[str]) -> list[Option]:
    """`--server`, and the settings of a deployment to start if none runs."""
    server = option(
        "--server", metavar="HOST:PORT",
        help="the coordinator to call; by default the deployment that runs, else one of its own",
    )  # fmt: skip
    return [
        *grouped("Connection", [server, *trust_options()]),
        *setting_options(tuple(without), ("model", "draft_model")),
    ]


def caller_options() -> list[Option]:
    """What a command shows that starts no deployment."""
    return grouped("Connection", [key_option(), *trust_options()])


def trust_options() -> list[Option]:
    """How a coordinator is known by TLS."""
    tls = "it has TLS, by an authority that gRPC knows"
    found = [option("--tls", is_flag=True, rare=True, help=tls)]
    for name, words in TRUST_OPTIONS.items():
        flag, variable = "--" + name.replace("_", "-"), f"OUTRIDER_{name.upper()}"
        text = f"{words} [${variable}]"
        found.append(option(flag, metavar="FILE", envvar=variable, rare=True, help=text))
    return found


def caller_trust_of(arguments: Arguments, settings: Mapping[str, Value]) -> Trust | None:
    """How the coordinators of a deployment with these settings are known: as flags or variables
    say, or by the certificate that they show, where this machine has it. None where they have no
    TLS. Raises `ConfigError`."""
    options = {
        option: Path(text).expanduser() if (text := getattr(arguments, option)) else None
        for option in TRUST_OPTIONS
    }
    pinned = str(settings.get("ssl_certfile") or "")
    if not (pinned or arguments.tls or any(options.values())):
        return None
    from outrider.transport.tls import caller_trust, pinned_trust

    shown = options["client_cert"], options["client_key"]
    if pinned and options["ca_cert"] is None and not arguments.tls:
        return pinned_trust(Path(pinned), *shown)
    return caller_trust(options["ca_cert"], *shown)


@asynccontextmanager
async def connected(arguments: Arguments) -> AsyncIterator[Connection]:
    """A coordinator to call while the context lasts. One that this command started ends with it.
    Raises `ConfigError` where flags ask for another deployment than the one that runs."""
    state = state_directory(os.environ)
    if arguments.server:
        given = arguments.settings.keys() - set(OF_CALLERS)
        if given:
            raise SettingError(min(given), "cannot be set for a server that runs already")
        address, trust = checked_address(arguments.server), caller_trust_of(arguments, {})
        yield Connection(address, api_key=caller_key(arguments), trust=trust)
    elif (record := running_deployment(state)) is not None:
        refuse_other_settings(arguments, record)
        key = caller_key(arguments) or local_key(state)
        found = _connection(arguments, record, key, lambda: _recorded_address(state))
        yield replace(found, deployment=f"{record.deployment} {record.started_at}")
    else:
        async with _own_deployment(arguments) as deployment:
            key = deployment.api_key
            found = _connection(arguments, deployment.record, key, lambda: deployment.address)
            yield replace(found, is_own=True)


def _connection(
    arguments: Arguments, record: DeploymentRecord, api_key: str, find: Callable[[], str]
) -> Connection:
    return Connection(
        record.grpc_address, record.target_directory, record.tokenizer_directory, record.settings,
        http_address=record.http_address.partition(",")[0], api_key=api_key,
        trust=caller_trust_of(arguments, record.settings), find=find,
    )  # fmt: skip


def _recorded_address(state: Path) -> str:
    record = running_deployment(state)
    return "" if record is None else record.grpc_address


def caller_key(arguments: Arguments) -> str:
    """The key that flag or variable names; the first of several. Raises `ConfigError` for a hash,
    which is none."""
    keys = str(arguments.settings.get("api_key", os.environ.get(KEY_VARIABLE, "")))
    key = keys.partition(",")[0].strip()
    if key.startswith("sha256:"):
        raise SettingError("api_key", "is the hash of a key; servers know it by that, callers not")
    return key


def own_config(arguments: Arguments) -> DeploymentConfig:
    """The deployment that a command starts for itself: as `serve` would, but on any free port
    where none is set, since only this command looks for it, and the usual one may be taken; and by
    HTTP only where that is asked for."""
    given = given_settings(arguments)
    own: dict[str, Value] = {"grpc_port": 0} if "port" in given else {"grpc_port": 0, "http": False}
    return configuration(own | given)


def checked_address(server: str) -> str:
    """The address itself. Raises `ConfigError` unless it is HOST:PORT."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--server: {server!r} is wrong; it must be HOST:PORT")
    return server


@asynccontextmanager
async def _own_deployment(arguments: Arguments) -> AsyncIterator[Deployment]:
    """A deployment with a state of its own, that ends with the context."""
    from deploy.fleet.launcher import Deployment

    config = own_config(arguments)
    task = asyncio.current_task()
    if task is not None:  # SIGTERM, too, ends this process only once the deployment has ended.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="outrider-") as state:
        async with Deployment(config, Path(state), report=progress) as deployment:
            progress.rest()
            try:
                yield deployment
            finally:
                progress("stopping the deployment", at_once=False)
        progress.rest()


def find_deployment(arguments: Arguments) -> DeploymentLocation:
    """The deployment of this machine, unless settings name another one and its cluster. Raises
    `Unavailable` where there is none."""
    values = given_settings(arguments)
    address, name = (str(values.get(key) or "") for key in PLACE_KEYS)
    record = running_deployment(state_directory(os.environ))
    if record is not None and name in ("", record.deployment):
        token = Path(record.ray_token) if record.ray_token else None
        return DeploymentLocation(record.ray_address, record.deployment, token=token)
    if not (address and name):
        raise Unavailable(
            "nothing runs here; `outrider serve` starts a deployment, --address and "
            "--deployment-name name one on a Ray cluster elsewhere"
        )
    return DeploymentLocation(address, name, elsewhere=True)
