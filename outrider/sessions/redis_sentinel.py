"""A Redis whose primary is found through Sentinel.

    redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB]

The hosts are Sentinels; user and password are those of the Redis servers. With
`rediss+sentinel://` both the servers and the Sentinels are reached by TLS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from outrider.limits import REDIS_SENTINEL_TIMEOUT_MS
from outrider.sessions.redis_pool import Pool

SCHEMES: Final = ("redis+sentinel://", "rediss+sentinel://")
_PORT: Final = 26_379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of such a URL."""

    hosts: tuple[tuple[str, int], ...]
    """HOST and PORT of each Sentinel."""
    service: str
    """What Sentinel calls the primary and its replicas."""
    db: int
    tls: bool
    username: str | None
    """Of the Redis servers; None where the URL has none ..."""
    password: str | None = field(repr=False)
    """... and its password."""

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Raises `ValueError`, without the password in it, for a URL of another form."""
        scheme, _, rest = url.partition("://")
        if f"{scheme}://" not in SCHEMES:
            raise ValueError("not a URL of Sentinels")
        place, _, path = rest.partition("/")
        credentials, has_credentials, hosts = place.rpartition("@")
        if not has_credentials and "@" in path:
            raise ValueError("a password's / is written as %2F")
        service, _, db = path.partition("/")
        if not service or "?" in path or "#" in path or not (db or "0").isdecimal():
            raise ValueError("the path is not /SERVICE[/DB]")
        username, has_password, password = credentials.partition(":")
        return cls(
            tuple(_host_and_port(one) for one in hosts.split(",")),
            unquote(service),
            int(db or 0),
            scheme == "rediss+sentinel",
            unquote(username) or None,
            unquote(password) if has_password else None,
        )


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.netloc != text:
        raise ValueError("a Sentinel is not HOST or HOST:PORT")
    return parts.hostname, parts.port or _PORT


class _Pool(SentinelConnectionPool, Pool):
    """Connections to the primary that Sentinel names."""


class _Client(redis.asyncio.Redis):
    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Closes the connections to the Sentinels, too."""
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def sentinel_client(
    url: SentinelUrl, sentinel_password: str | None, options: dict[str, Any]
) -> redis.asyncio.Redis:
    """A client of whatever server is the primary when it connects. `options` are those of its
    connections and of their pool; user and password of the URL win over them.

    Sentinels are asked one after the other, each for `REDIS_SENTINEL_TIMEOUT_MS`."""
    timeout_s = REDIS_SENTINEL_TIMEOUT_MS / 1000
    secure = {"ssl": True} if url.tls else {}
    sentinel_options = secure | {
        "password": sentinel_password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if "ssl_ca_certs" in options:
        sentinel_options["ssl_ca_certs"] = options["ssl_ca_certs"]
    given = {"username": url.username, "password": url.password}
    options = options | secure | {key: text for key, text in given.items() if text is not None}
    sentinel: Any = Sentinel(url.hosts, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
    client: redis.asyncio.Redis = sentinel.master_for(
        url.service, redis_class=_Client, connection_pool_class=_Pool, db=url.db, **options
    )
    return client
