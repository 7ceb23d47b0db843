"""What can be found out before anything starts, so that a slip does not cost a model's loading."""

from __future__ import annotations

import socket
from typing import Final

from outrider.config import DeploymentConfig
from outrider.errors import ConfigError

_ANY_FREE: Final = 0


def check_before_start(config: DeploymentConfig) -> None:
    """For a deployment on this machine. Raises `ConfigError`, naming the setting, for a host or a
    port that cannot be listened on, and for a model that is certainly not there."""
    listeners = (
        ("grpc_port", config.coordinator.host, config.coordinator.grpc_port),
        ("target_port", config.target.host, config.target.port),
        ("draft_port", config.draft.host, config.draft.port),
    )
    for setting, host, port in listeners:
        _check_listening(setting, host, port)
    if config.target.emulated is not None:
        return
    from outrider.engine.sources import check_name

    check_name(config.target.model)
    if not config.draft.is_ngram:
        check_name(config.draft.model)


def _check_listening(setting: str, host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host: {host!r} is no address: {error.strerror or error}") from error
    with socket.socket(family, kind) as probe:
        # As the server will: an address that is only waiting to be forgotten is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            what = "host" if port == _ANY_FREE else setting
            raise ConfigError(
                f"{what}: cannot listen on {host}:{port}: {error.strerror or error}"
            ) from error
