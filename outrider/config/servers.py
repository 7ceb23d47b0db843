"""What every server can be told, and the server that users call."""

from __future__ import annotations

import ipaddress
from dataclasses import fields, replace
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from outrider.api_keys import given_keys
from outrider.errors import SettingError
from outrider.registry.registry import Membership
from outrider.settings import CHECKED, Internal, blaming
from outrider.telemetry.destination import Destination

PORT_MAX: Final = 65_535
THREADS_MAX: Final = 1024
LOOPBACK: Final = "127.0.0.1"
PATHS: Final = (
    "internal_tls_dir", "api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs",
    "redis_password_file", "redis_ca_file",
)  # fmt: skip
"""Settings that are paths of files that replicas read."""

Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
Server = TypeVar("Server", bound="ServerConfig")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unlocked(config: Server) -> Server:
    """The same server for a measurement of this machine alone: on loopback, without keys, TLS and
    certificates."""
    locks = {one.name: "" for one in fields(config) if one.name in (*PATHS, "api_key")}
    changes: dict[str, Any] = {"host": LOOPBACK, **locks}
    return replace(config, **changes)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ServerConfig:
    """What every service that listens has."""

    host: str = LOOPBACK
    """Address the servers bind to."""
    insecure: bool = False
    """Allow an address other than loopback, without keys and without TLS."""
    internal_tls_dir: str = ""
    """Directory of certificates, as `outrider certs` makes it, by which coordinators, targets and
    drafts know each other; it must be on each one's machine. Empty = they speak in plain text and
    answer whoever reaches them."""
    telemetry: str = ""
    """Where traces and metrics go: `otlp=http://HOST:PORT`, `prometheus=PORT`, or both with a
    comma; the target takes the port after PORT, the draft the next. Empty = nowhere, but for `GET
    /metrics` of a coordinator with HTTP."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """What the logs have: `debug` adds a line for each session that ends or moves."""

    membership: Internal[Membership | None] = None
    """Where it is announced; None = nowhere."""

    @property
    def plan(self) -> str:
        """See `Membership.plan`."""
        return "" if self.membership is None else self.membership.plan

    @property
    def slot(self) -> int:
        """See `Membership.slot`."""
        return 0 if self.membership is None else self.membership.slot

    def log_name(self, role: str) -> str:
        """What its log is called: as the replica, or else as its role."""
        return role if self.membership is None else self.membership.name

    @property
    def knows_callers(self) -> bool:
        """Whether whoever calls must show who that is."""
        return bool(self.internal_tls_dir)

    @property
    def metrics_host(self) -> str:
        """Where Prometheus is served, which asks nobody who they are."""
        return self.host if self.insecure or is_loopback(self.host) else LOOPBACK

    def __post_init__(self) -> None:
        if not (self.insecure or self.knows_callers or is_loopback(self.host)):
            raise SettingError(
                "host",
                f"{self.host!r} is reachable from other machines, and nothing asks callers for a "
                "key; bind 127.0.0.1, give keys with --api-key-file, or give --insecure if the "
                "network is trusted",
            )
        Destination.parse(self.telemetry)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class FrontConfig(ServerConfig):
    """A server that users call."""

    api_key: str = Field(default="", repr=False)
    """API keys that callers need one of, or their hashes, with commas between several, or by
    several flags. Best given as a variable: other users of this machine see flags."""
    api_key_file: str = ""
    """File of API keys as `outrider keys new` writes it, with each one's tenant and limits. It is
    read again when it changes."""
    ssl_certfile: str = ""
    """Certificate of the coordinators, in PEM, with those between it and its authority behind it:
    callers then need TLS. It is read again when it changes."""
    ssl_keyfile: str = ""
    """Its private key, in PEM."""
    ssl_ca_certs: str = ""
    """Authorities, in PEM, by one of which callers must have a certificate, too; empty = they need
    none."""
    reflection: bool | None = None
    """Serve gRPC reflection on the coordinator; unset = where no key is asked for."""

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
        super().__post_init__()
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            given, missing = "ssl_certfile", "ssl_keyfile"
            if self.ssl_keyfile:
                given, missing = missing, given
            raise SettingError(given, f"needs {missing}, too: a certificate goes with its key")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise SettingError("ssl_ca_certs", "needs --ssl-certfile and --ssl-keyfile, too")
        with blaming("api_key"):
            given_keys(self.api_key)
