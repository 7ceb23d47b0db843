"""The password of Redis, kept out of what Ray is told: arguments of actors stand in its head (GCS),
and whoever has the cluster's token may read them.

An address without its password says where each process finds it:

| where | set by |
| --- | --- |
| `password_file`, on its machine | `redis_password_file`; on one machine `serve` writes it |
| its variable OUTRIDER_REDIS_PASSWORD | whatever starts Ray there, such as a pod with a Secret |
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from outrider.errors import ConfigError, SettingError
from outrider.limits import PASSWORD_BYTES_MAX

from .redis_address import RedisAddress

VARIABLE: Final = "OUTRIDER_REDIS_PASSWORD"


def without_password(address: RedisAddress) -> tuple[RedisAddress, str]:
    """The address with a URL that names no user and no password, and the password; empty for none.
    What the URL said wins, as it does for Redis' client. Raises `SettingError` for a URL that has
    further passwords."""
    url, username, password = _split(address.url)
    if password and address.password_file:
        raise SettingError("redis_password_file", "cannot go with a password in redis_url")
    password = password or address.password
    if "password=" in url.lower():
        raise SettingError("redis_url", "has a password among its options; use redis_password_file")
    return replace(
        address, url=url, username=username or address.username, password="",
        asks_for_password=address.asks_for_password or bool(password),
    ), password  # fmt: skip


def with_password(
    address: RedisAddress, environment: Mapping[str, str] | None = None
) -> RedisAddress:
    """The address as this process connects to it. Raises `SettingError` where the password is not
    to be had on this machine."""
    if address.password or not (address.password_file or address.asks_for_password):
        return address
    if address.password_file:
        return _known(address, read_password(Path(address.password_file)))
    password = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not password:
        raise SettingError(
            "redis_password",
            f"is not known on {socket.gethostname()}: passwords do not travel through Ray; give "
            f"its processes {VARIABLE}, or --redis-password-file",
        )
    return _known(address, password)


def _known(address: RedisAddress, password: str) -> RedisAddress:
    return replace(address, password=password, password_file="", asks_for_password=False)


def read_password(path: Path) -> str:
    """What stands in the file, without the line's end. Raises `SettingError`."""
    try:
        with path.open("rb") as file:
            text = file.read(PASSWORD_BYTES_MAX + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise SettingError("redis_password_file", f"cannot read {path}: {reason}") from None
    password = text.removesuffix("\n").removesuffix("\r")
    if not password or len(text) > PASSWORD_BYTES_MAX:
        raise SettingError(
            "redis_password_file", f"{path} is not one line of 1 to {PASSWORD_BYTES_MAX} bytes"
        )
    return password


def _split(url: str) -> tuple[str, str, str]:
    """The URL without user and password, and these. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("redis_url: is no URL") from None
    user, has_user, place = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    options = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(options)
    kept = [(key, value) for key, value in options if key not in ("username", "password")]
    if not has_user and len(kept) == len(options):
        return url, "", ""
    whole = f"{parts.scheme}://{place}{parts.path}{'?' if kept else ''}{urlencode(kept)}"
    return (
        whole, unquote(username) or given.get("username", ""),
        unquote(password) or given.get("password", ""),
    )  # fmt: skip
