"""A Redis primary, its replica and a Sentinel, as processes of a test."""

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Self

import redis
from redis.exceptions import RedisError

from outrider.redis.embedded import find_server

SERVICE: Final = "outrider"
DOWN_AFTER_MS: Final = 1_000
"""Sentinel promotes the replica once the primary has not answered for this long."""
START_S: Final = 20.0
PROMOTED_S: Final = 60.0
"""For a promotion. If Sentinel has not run for 2 s, it promotes nothing for 30 s (*TILT*)."""
_POLL_S: Final = 0.05
Forward = Callable[[str], Awaitable[str]]
"""Returns an address from which connections are forwarded to this HOST:PORT."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def _until(condition: Callable[[], Any], within_s: float = START_S) -> None:
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(_POLL_S)


class Server:
    """One process: a Redis server or a Sentinel."""

    def __init__(self, directory: Path, config: str, *words: str, port: int) -> None:
        directory.mkdir(parents=True)
        path = directory / "redis.conf"
        path.write_text(config, encoding="utf-8")
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [find_server(), str(path), *words], cwd=directory, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def call(self, *words: object, password: str | None = None) -> Any:
        """Returns the answer to one command. Raises `RedisError`."""
        with redis.Redis(
            port=self.port, password=password, protocol=2, socket_timeout=1, decode_responses=True
        ) as client:
            return client.execute_command(*words)

    def info(self, password: str | None = None) -> dict[str, Any]:
        """The answer to INFO; empty if the server does not answer."""
        try:
            return self.call("INFO", password=password)
        except RedisError:
            return {}


class RedisServers:
    """A Redis primary, its replica and a Sentinel. An async context manager. A killed server never
    returns; `replace` starts another server as a replica."""

    def __init__(
        self,
        directory: Path,
        *,
        forward: Forward | None = None,
        password: str = "",
        sentinel_password: str = "",
    ) -> None:
        """`forward` maps a server's address to that by which others reach it."""
        self._directory = directory
        self._forward = forward
        self._password = password
        self._sentinel_password = sentinel_password
        self._num_started = 0
        self._known_by: dict[str, Server] = {}
        """Running servers, by the address under which Sentinel knows them."""
        self.sentinel: Server

    async def __aenter__(self) -> Self:
        try:
            primary = await self._start(None)
            await self._start(primary)
            await _until(lambda: self._is_followed(primary))
            self._start_sentinel(primary)
            await self.until_whole()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for one in self._known_by.values():
            one.kill()
        if hasattr(self, "sentinel"):
            self.sentinel.kill()

    @property
    def url(self) -> str:
        """URL for `--redis-url`, without a password."""
        return f"redis+sentinel://{self.sentinel.address}/{SERVICE}/0"

    @property
    def primary(self) -> Server:
        """The primary that Sentinel names."""
        return self._known_by[self.primary_address]

    @property
    def primary_address(self) -> str:
        """The address that clients get. It changes when a failover is complete."""
        words = self._ask_sentinel("MASTER", SERVICE)
        state = dict(zip(words[::2], words[1::2], strict=True))
        return f"{state['ip']}:{state['port']}"

    def _ask_sentinel(self, *words: str) -> Any:
        return self.sentinel.call("SENTINEL", *words, password=self._sentinel_password or None)

    @property
    def num_tilts(self) -> int:
        """How often Sentinel has begun a TILT."""
        return self.sentinel.log.count("+tilt")

    @property
    def replicas(self) -> list[Server]:
        primary = self.primary
        return [one for one in self._known_by.values() if one is not primary]

    async def demote(self) -> None:
        """Makes the primary a replica, as in a planned failover, and waits for that."""
        before = self.primary_address
        await asyncio.to_thread(self._ask_sentinel, "FAILOVER", SERVICE)
        await self.until_promoted(before)

    def is_whole(self) -> bool:
        """Whether Sentinel knows all replicas, and they follow the primary that it names."""
        try:
            primary = self.primary
            known = self._ask_sentinel("REPLICAS", SERVICE)
        except (RedisError, KeyError):
            return False
        replicas = [dict(zip(one[::2], one[1::2], strict=True)) for one in known]
        states = [(one["flags"], one["master-link-status"]) for one in replicas]
        return states.count(("slave", "ok")) == 1 and self._is_followed(primary)

    def _is_followed(self, primary: Server) -> bool:
        info = primary.info(self._password or None)
        states = [
            one["state"]
            for name, one in info.items()
            if name.removeprefix("slave").isdecimal() and isinstance(one, dict)
        ]
        return info.get("role") == "master" and states == ["online"]

    async def until_whole(self, within_s: float = START_S) -> None:
        await _until(self.is_whole, within_s)

    async def until_promoted(self, before: str) -> None:
        await _until(lambda: self.primary_address != before, PROMOTED_S)

    async def replace(self, address: str) -> None:
        """Kills the server with this address, and starts a replica of the primary that Sentinel
        then names. Returns when it follows. Sentinel learns of it within 10 s."""
        self._known_by[address].kill()
        await self.until_promoted(address)
        del self._known_by[address]
        primary = self.primary
        await self._start(primary)
        await _until(lambda: self._is_followed(primary))
        # Sentinel forgets servers only on this command.
        await asyncio.to_thread(self._ask_sentinel, "RESET", SERVICE)

    async def _start(self, primary: Server | None) -> Server:
        port = free_port()
        self._num_started += 1
        known = f"127.0.0.1:{port}"
        if self._forward is not None:
            known = await self._forward(known)
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
            "repl-diskless-sync-delay 0",
            "replica-announce-ip 127.0.0.1",
            f"replica-announce-port {known.rpartition(':')[2]}",
            "repl-timeout 10",
        ]
        if self._password:
            lines += [f"requirepass {self._password}", f"masterauth {self._password}"]
        if primary is not None:
            [address] = [name for name, one in self._known_by.items() if one is primary]
            lines.append(f"replicaof {address.replace(':', ' ')}")
        directory = self._directory / f"server-{self._num_started}"
        server = Server(directory, "\n".join(lines) + "\n", port=port)
        self._known_by[known] = server
        await _until(lambda: server.info(self._password or None))
        return server

    def _start_sentinel(self, primary: Server) -> None:
        port = free_port()
        [address] = [name for name, one in self._known_by.items() if one is primary]
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"sentinel monitor {SERVICE} {address.replace(':', ' ')} 1",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 2000",
        ]
        if self._password:
            lines.append(f"sentinel auth-pass {SERVICE} {self._password}")
        if self._sentinel_password:
            lines.append(f"requirepass {self._sentinel_password}")
        config = "\n".join(lines) + "\n"
        self.sentinel = Server(self._directory / "sentinel", config, "--sentinel", port=port)
