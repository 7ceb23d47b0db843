"""What can be found out before anything starts, so that a slip does not cost a model's loading."""

from __future__ import annotations

import socket
from typing import Final

from outrider.config import PORT_MAX, DeploymentConfig
from outrider.errors import SettingError
from outrider.settings import blaming

from .locks import check_locks
from .models import emulated_spec

_ANY_FREE: Final = 0


def check_before_start(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Raises `SettingError` for a host or a port that cannot be
    listened on, for files of keys or certificates that are wrong, for a model that is certainly not
    there, and for what is no emulated one."""
    check_locks(config.coordinator)
    listeners = (
        ("grpc_port", config.coordinator, config.coordinator.grpc_port, config.num_coordinators),
        ("port", config.coordinator, config.coordinator.port, _num_on_http(config)),
        ("target_port", config.target, config.target.port, config.num_targets),
        ("draft_port", config.draft, config.draft.port, config.num_drafts),
    )
    taken: dict[int, str] = {}
    for key, server, first, number in listeners:
        for port in range(first, first + number) if first else (_ANY_FREE,):
            if port > PORT_MAX:
                raise SettingError(key, f"{first} leaves no ports for {number} replicas")
            if (other := taken.setdefault(port, key)) != key and port != _ANY_FREE:
                raise SettingError(key, f"{port} is among the ports that {other} counts up to")
            _check_listening(key, server.host, port)
    if config.target.emulated is not None:
        emulated_spec(config.target.emulated)
        return
    from outrider.engine.sources import check_name

    with blaming("model"):
        check_name(config.target.model)
    draft = config.draft.drafter.model
    on_target = config.draft.drafter.on_target
    name = on_target if draft is None else draft.name
    if name is not None:
        with blaming("draft_model"):
            check_name(name, heads=config.draft.drafter.reads_target)


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
            raise SettingError(
                "host" if port == _ANY_FREE else key,
                f"cannot listen on {host}:{port}: {error.strerror or error}",
            ) from error
