"""Keys, certificates and secret files of a deployment that is started here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from outrider.api_keys import KeyHash, hashed_keys, new_key, read_key_file
from outrider.config import PATHS, CoordinatorConfig, DeploymentConfig, ServerConfig
from outrider.sessions.redis_address import Passwords, without_password
from outrider.settings import Value, blaming

Server = TypeVar("Server", bound=ServerConfig)


class SecretFiles:
    """A directory of files for their owner alone, which processes of this machine read: Ray opens
    its own directory to all users, and a list of processes shows their arguments. It is made when
    it is first needed, without what an earlier deployment has left."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begun = False

    def hide(self, name: str, secret: str) -> Path:
        """A file with the secret, of mode 0600 in a directory of mode 0700."""
        if not self._begun:
            self.forget()
            self._directory.mkdir(mode=0o700, parents=True)
            self._begun = True
        path = self._directory / name
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secret)
        return path

    def forget(self) -> None:
        """Removes them."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._begun = False


def without_secrets(config: DeploymentConfig) -> tuple[DeploymentConfig, str, Passwords]:
    """The configuration with hashes in place of keys and without passwords of Redis and Sentinels;
    a new key for commands of this machine, whose hash is among those (empty where no key is asked
    for); and the passwords. Neither Ray nor Redis is told any. Raises `SettingError`."""
    config = replace(
        config,
        target=_with_whole_paths(config.target),
        draft=_with_whole_paths(config.draft),
        coordinator=_with_whole_paths(config.coordinator),
    )
    front, key = config.coordinator, ""
    if front.asks_for_keys:
        key = new_key()
        hashes = [hashed_keys(front.api_key), str(KeyHash.of(key))]
        front = replace(front, api_key=",".join(text for text in hashes if text))
    redis, passwords = without_password(front.redis)
    return replace(config, coordinator=front.reaching(redis)), key, passwords


def whole_paths(values: Mapping[str, Value]) -> dict[str, Value]:
    """The same settings, but paths do not depend on where a process runs."""
    return {
        key: _whole(value) if key in PATHS and isinstance(value, str) else value
        for key, value in values.items()
    }


def _with_whole_paths(config: Server) -> Server:
    names = [one.name for one in fields(config) if one.name in PATHS]
    paths: dict[str, Any] = {name: _whole(getattr(config, name)) for name in names}
    return replace(config, **paths)


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def check_security_files(config: CoordinatorConfig) -> None:
    """Reads the files of keys and certificates, as the replicas of this machine will. Raises
    `SettingError`."""
    from outrider.transport.certificates import INTERNAL_ROLES, RoleFiles, check_pair

    if config.ssl_certfile:
        with blaming("ssl_certfile"):
            check_pair(Path(config.ssl_certfile), Path(config.ssl_keyfile))
    if config.internal_tls_dir:
        with blaming("internal_tls_dir"):
            for role in INTERNAL_ROLES:
                RoleFiles.of(Path(config.internal_tls_dir), role).check()
    if config.api_key_file:
        with blaming("api_key_file"):
            read_key_file(Path(config.api_key_file))
