"""The replicas of a deployment in Redis.

    <prefix>replicas:{<deployment>}:<role>          set: names
    <prefix>replica:{<deployment>}:<role>:<name>    string: the record, as JSON, with a time to live
    <prefix>wanted:{<deployment>}                   hash: role to count, and how many replicas were
                                                    started; with a time to live

The braces are literal. Leases are Redis' own times to live. Whatever else is found in these keys is
left out: what is read decides how many replicas there are, within `REPLICAS_MAX`, and nothing of
what they run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from outrider.errors import InvariantError, OutriderError, check
from outrider.limits import REPLICA_NUMBER_MAX, REPLICAS_MAX
from outrider.registry.registry import LEASE_S, RENEWAL_S, ROLES, ReplicaRecord, Role
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_connection import calling, new_client, redis_errors

_log = logging.getLogger(__name__)

_STARTED = "started"
"""Field of the hash of what is wanted: how many replicas were started."""
WANTED_TTL_S = 7 * 86_400
"""Counts that are wanted expire so long after they were last read or written, s."""


class RedisRegistry:
    """The records of one deployment. Every call may raise `StoreUnavailable`."""

    def __init__(self, address: RedisAddress, deployment: str) -> None:
        """Connects when it is first used. `deployment` names whose replicas these are."""
        check(not set(deployment) & set("{}"), "braces in a deployment's name")
        self._client = new_client(address)
        self._prefix, self._tag = address.key_prefix, f"{{{deployment}}}"
        self._wanted = f"{self._prefix}wanted:{self._tag}"
        self._expiry = ("EXPIRE", self._wanted, WANTED_TTL_S)

    async def announce(self, record: ReplicaRecord) -> None:
        """Begins or renews a replica's lease."""
        key, lease_ms = self._key(record.role, record.name), int(LEASE_S * 1e3)
        await self._run(
            ("SET", key, record.to_json(), "PX", lease_ms),
            ("SADD", self._names(record.role), record.name),
        )

    async def withdraw(self, role: Role, name: str) -> None:
        """Ends it."""
        await self._run(("DEL", self._key(role, name)), ("SREM", self._names(role), name))

    async def records(self, role: Role) -> list[ReplicaRecord]:
        """The records of a role whose leases run, by name. Names whose leases have run out are
        taken off the list; what is no record is left out."""
        [members] = await self._run(("SMEMBERS", self._names(role)))
        names = sorted(member.decode(errors="replace") for member in members)
        if not names:
            return []
        [texts] = await self._run(("MGET", *(self._key(role, name) for name in names)))
        over = [name for name, text in zip(names, texts, strict=True) if text is None]
        if over:
            # One that comes back says its name again.
            await self._run(("SREM", self._names(role), *over))
        found = (_read(role, name, text) for name, text in zip(names, texts, strict=True))
        return [record for record in found if record is not None]

    async def leases(self, role: Role) -> list[tuple[ReplicaRecord, float]]:
        """The records of a role, with the seconds that each one's lease still runs."""
        records = await self.records(role)
        if not records:
            return []
        left = await self._run(*(("PTTL", self._key(role, one.name)) for one in records))
        return [(one, max(0, ms) / 1e3) for one, ms in zip(records, left, strict=True)]

    async def want(self, counts: Mapping[Role, int]) -> None:
        """So many replicas of these roles are wanted from now on."""
        fields = [part for role, count in counts.items() for part in (role, count)]
        await self._run(("HSET", self._wanted, *fields), self._expiry)

    async def wanted(self) -> dict[Role, int]:
        """How many are, of the roles of which that was said: each 0 to `REPLICAS_MAX`. What is no
        count is left out."""
        texts, _ = await self._run(("HMGET", self._wanted, *ROLES), self._expiry)
        counts = {
            role: _number(text, REPLICAS_MAX) for role, text in zip(ROLES, texts, strict=True)
        }
        return {role: count for role, count in counts.items() if count is not None}

    async def note_started(self, number: int) -> None:
        """The deployment has started so many replicas in all."""
        await self._run(("HSET", self._wanted, _STARTED, number), self._expiry)

    async def started(self) -> int:
        """What was noted last, 0 to `REPLICA_NUMBER_MAX`; 0 where nothing was."""
        [text] = await self._run(("HGET", self._wanted, _STARTED))
        return _number(text, REPLICA_NUMBER_MAX) or 0

    async def close(self) -> None:
        """Gives back its connections."""
        await self._client.aclose()

    async def _run(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """The answers to commands that go together, wholly or not at all."""
        with redis_errors():
            async with calling(self._client), self._client.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute()
                return answers

    def _names(self, role: Role) -> str:
        return f"{self._prefix}replicas:{self._tag}:{role}"

    def _key(self, role: Role, name: str) -> str:
        return f"{self._prefix}replica:{self._tag}:{role}:{name}"


class Lease:
    """Announces a replica until it is closed. While the registry is away the replica goes on, and
    is announced once that is back."""

    def __init__(self, registry: RedisRegistry, record: Callable[[], ReplicaRecord]) -> None:
        """`record()` is what to say now. `close` closes the registry, too."""
        self._registry = registry
        self._record = record
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    async def start(self) -> None:
        """Announces it for the first time, and goes on to. Raises `StoreUnavailable`."""
        await self._registry.announce(self._record())
        self._task = asyncio.create_task(self._run())

    def say_again(self) -> None:
        """Announces the replica at once, as its record has changed."""
        self._soon.set()

    async def _run(self) -> None:
        heard = True
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEWAL_S):
                    await self._soon.wait()
            self._soon.clear()
            try:
                await self._registry.announce(self._record())
                heard = True
            except OutriderError as error:
                if heard:
                    _log.warning("this replica cannot be announced: %s", error)
                heard = False

    async def withdraw(self) -> None:
        """Ends the lease. Repeating it does nothing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            record = self._record()
            with suppress(OutriderError):
                await self._registry.withdraw(record.role, record.name)

    async def close(self) -> None:
        """Withdraws it, and closes the registry."""
        await self.withdraw()
        await self._registry.close()


def _number(text: bytes | None, most: int) -> int | None:
    """Of its decimal digits; None for what is no number from 0 to `most`."""
    if text is None or not text.isdigit() or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if number <= most else None


def _read(role: Role, name: str, text: bytes | None) -> ReplicaRecord | None:
    if text is None:
        return None
    try:
        record = ReplicaRecord.from_json(text)
        check((record.role, record.name) == (role, name), "it is another replica's")
    except (ValueError, InvariantError) as error:
        _log.warning("a %s's record is left out: %s", role, error)
        return None
    return record
