"""What a server that users call can be told about keys and TLS."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

from outrider.config.models import LOOPBACK, ServerConfig
from outrider.errors import SettingError
from outrider.security.keys import given_keys
from outrider.settings import blaming, setting

PATHS: Final = (
    "internal_tls_dir", "api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs",
    "redis_password_file", "redis_ca_file",
)  # fmt: skip
"""Settings that are paths of files that replicas read."""

Server = TypeVar("Server", bound=ServerConfig)


def unlocked(config: Server) -> Server:
    """The same server for a measurement of this machine alone: on loopback, without keys, TLS and
    certificates."""
    locks = {one.name: "" for one in fields(config) if one.name in (*PATHS, "api_key")}
    changes: dict[str, Any] = {"host": LOOPBACK, **locks}
    return replace(config, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig(ServerConfig):
    """A server that users call."""

    api_key: str = setting(
        "", "API keys that callers need one of, or their hashes, with commas between several, or "
        "by several flags. Best given as a variable: other users of this machine see flags.",
        secret=True,
    )  # fmt: skip
    api_key_file: str = setting(
        "", "File of API keys as `outrider keys new` writes it, with each one's tenant and limits. "
        "It is read again when it changes.",
    )  # fmt: skip
    ssl_certfile: str = setting(
        "", "Certificate of the coordinators, in PEM, with those between it and its authority "
        "behind it: callers then need TLS. It is read again when it changes.",
    )  # fmt: skip
    ssl_keyfile: str = setting("", "Its private key, in PEM.")
    ssl_ca_certs: str = setting(
        "", "Authorities, in PEM, by one of which callers must have a certificate, too; empty = "
        "they need none.",
    )  # fmt: skip
    reflection: bool | None = setting(
        None, "Serve gRPC reflection on the coordinator; unset = where no key is asked for."
    )

    @property
    def asks_for_keys(self) -> bool:
        """Whether callers need one."""
        return bool(self.api_key or self.api_key_file)

    @property
    def knows_callers(self) -> bool:
        """See `ServerConfig`."""
        return self.asks_for_keys

    @property
    def serves_reflection(self) -> bool:
        """Whether services are described to whoever is let in."""
        return not self.asks_for_keys if self.reflection is None else self.reflection

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            given, missing = "ssl_certfile", "ssl_keyfile"
            if self.ssl_keyfile:
                given, missing = missing, given
            raise SettingError(given, f"needs {missing}, too: a certificate goes with its key")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise SettingError("ssl_ca_certs", "needs --ssl-certfile and --ssl-keyfile, too")
        with blaming("api_key"):
            given_keys(self.api_key)
