"""The address of a Redis server and its credentials.

Passwords are not sent through Ray, because Ray's head (GCS) shows the arguments of actors to every
holder of the cluster's token. If the address has no password, a process finds the password here:

| place of the password | set by |
| --- | --- |
| a file | the setting `redis_password_file`, or `outrider serve` on one machine |
| variable OUTRIDER_REDIS_PASSWORD | you, for Ray's processes, for example from a pod's Secret |
"""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import Field

from outrider.errors import SettingError
from outrider.foundation.files import read_file
from outrider.foundation.settings import Internal, blaming, checked
from outrider.limits import PASSWORD_BYTES_MAX

DEFAULT_KEY_PREFIX = "outrider:"
_SETTINGS = (
    "url",
    "username",
    "password",
    "password_file",
    "ca_file",
    "sentinel_password",
    "key_prefix",
)


@checked("redis_", _SETTINGS)
class RedisAddress:
    """Settings of the session store."""

    url: str = Field(default="", repr=False)
    """URL of the session store: `redis://`, `rediss://` (TLS), `unix://` or, with Sentinel,
    `redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB]`; empty = an embedded server."""
    username: str = ""
    """User name for the session store. A user name in the URL overrides it."""
    password: str = Field(default="", repr=False)
    """Password for the session store. A password in the URL overrides it. Prefer the environment
    variable, because other users of the machine can see flags."""
    password_file: str = ""
    """File with the password, at the same path on each machine. Each process reads the file."""
    ca_file: str = ""
    """Certificate authority of servers reached by TLS (`rediss://`, `rediss+sentinel://`); empty =
    the authorities of the operating system."""
    sentinel_password: str = Field(default="", repr=False)
    """Password of the Sentinels, if they need one. Prefer the environment variable, because other
    users of the machine can see flags."""
    key_prefix: Annotated[str, Field(pattern="^[^{}]*$", title="a text without braces")] = (
        DEFAULT_KEY_PREFIX
    )
    """Prefix of all keys in Redis."""
    sentinel_password_file: Internal[str] = ""
    asks_for_password: Internal[bool] = False
    """Whether Redis needs a password that this address does not contain."""
    asks_for_sentinel_password: Internal[bool] = False


VARIABLE = "OUTRIDER_REDIS_PASSWORD"
SENTINEL_VARIABLE = "OUTRIDER_REDIS_SENTINEL_PASSWORD"


def without_password(address: RedisAddress) -> tuple[RedisAddress, dict[str, str]]:
    """Returns the address without passwords, and the removed passwords (field -> password). Moves
    the URL's user to the field `username`. Raises `SettingError` if the URL has a password among
    its options, or if both the URL and `password_file` give a password."""
    url, username, password = _split(address.url)
    if password and address.password_file:
        raise SettingError("redis_password_file", "cannot be given if redis_url has a password")
    if "password=" in url.lower():
        raise SettingError("redis_url", "has a password among its options; use redis_password_file")
    passwords = {
        "password": password or address.password,
        "sentinel_password": address.sentinel_password,
    }
    secrets = {kind: secret for kind, secret in passwords.items() if secret}
    changes: dict[str, Any] = dict.fromkeys(secrets, "")
    changes |= {f"asks_for_{kind}": True for kind in secrets}
    return replace(address, url=url, username=username or address.username, **changes), secrets


def with_password(address: RedisAddress) -> RedisAddress:
    """Adds the passwords that Redis needs. Raises `SettingError` if this machine lacks one."""
    changed: dict[str, Any] = {}
    for kind, variable in (("password", VARIABLE), ("sentinel_password", SENTINEL_VARIABLE)):
        file, key = getattr(address, f"{kind}_file"), f"redis_{kind}"
        if getattr(address, kind) or not (file or getattr(address, f"asks_for_{kind}")):
            continue
        changed[f"{kind}_file"] = ""
        if file:
            key = "redis_password_file" if kind == "password" else key
            changed[kind] = read_password(Path(file), key)
        elif not (text := os.environ.get(variable, "")):
            advice = ", or give --redis-password-file" if kind == "password" else ""
            raise SettingError(
                key,
                f"is not known on {socket.gethostname()}: passwords are not sent through Ray; set "
                f"{variable} for Ray's processes and for this command{advice}",
            )
        else:
            changed[kind] = text
    return replace(address, **changed)


def read_password(path: Path, key: str) -> str:
    """Returns the only line of a file. A `SettingError` names the setting `key`."""
    try:
        with blaming(key):
            text = read_file(path).decode()
    except UnicodeDecodeError:
        text = ""
    password = text.removesuffix("\n").removesuffix("\r")
    if not password or len(text) > PASSWORD_BYTES_MAX:
        raise SettingError(key, f"{path} must have one line of 1 to {PASSWORD_BYTES_MAX} bytes")
    return password


def _split(url: str) -> tuple[str, str, str]:
    """The URL without user and password, the user, and the password."""
    try:
        credentials, separator, _ = urlsplit(url).netloc.rpartition("@")
    except ValueError:
        raise SettingError("redis_url", "is not a URL") from None
    username, _, password = credentials.partition(":")
    rest = url.replace(f"//{credentials}{separator}", "//", 1)
    return rest, unquote(username), unquote(password)
