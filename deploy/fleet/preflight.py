"""What can be found out before anything starts, so that a slip does not cost a model's loading."""

from __future__ import annotations

import errno
import socket
from typing import Final

from outrider.config import PORT_MAX, DeploymentConfig, deployment_settings
from outrider.errors import SettingError

from .model_files import check_names
from .security_setup import check_locks

_ANY_FREE: Final = 0
_PORT_ERRORS: Final = (errno.EADDRINUSE, errno.EACCES)
"""Errors that another port on the same host may not have."""


def check_before_start(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Raises `SettingError` for wrong files of keys or
    certificates, for ports that are not apart, for a model that is certainly not there, and for
    what is no emulated one."""
    check_locks(config.coordinator)
    check_ports_apart(config)
    check_names(config)


def check_ports_apart(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Raises `SettingError` where two roles count up to one port,
    or one beyond the last."""
    _ports(config)


def check_ports(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Binds each port for a moment. Raises `SettingError` for a
    host or a port that cannot be listened on."""
    for key, host, port in _ports(config):
        _check_listening(key, host, port)


def _ports(config: DeploymentConfig) -> list[tuple[str, str, int]]:
    """The setting, the host and the port of each listener; `_ANY_FREE` once for each role that has
    no port of its own. Raises `SettingError` where there are none left or two roles share one."""
    listeners = (
        ("grpc_port", config.coordinator, config.coordinator.grpc_port, config.num_coordinators),
        ("port", config.coordinator, config.coordinator.port, _num_on_http(config)),
        ("target_port", config.target, config.target.port, config.num_targets),
        ("draft_port", config.draft, config.draft.port, config.num_drafts),
    )
    taken: dict[int, str] = {}
    found = []
    for key, server, first, number in listeners:
        for port in range(first, first + number) if first else (_ANY_FREE,):
            if port > PORT_MAX:
                raise SettingError(key, f"{first} leaves no ports for {number} replicas")
            if (other := taken.setdefault(port, key)) != key and port != _ANY_FREE:
                raise SettingError(key, f"{port} is a port of {other}, too; give another one, or 0")
            found.append((key, server.host, port))
    return found


def _num_on_http(config: DeploymentConfig) -> int:
    """Coordinators that listen for HTTP, too."""
    return config.num_coordinators if config.coordinator.http else 0


def _check_listening(key: str, host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingError("host", f"{host!r} is no address: {error.strerror or error}") from error
    with socket.socket(family, kind) as probe:
        # As the server will: an address that is only waiting to be forgotten is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            if error.errno not in _PORT_ERRORS:
                raise SettingError("host", reason) from error
            flag = deployment_settings()[key].flag
            raise SettingError(
                key, f"{reason}; give another port with {flag}, where 0 means any free one"
            ) from error
