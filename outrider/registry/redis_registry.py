"""The registry of a deployment's replicas in Redis.

    <prefix>replicas:{<deployment>}:<role>          set: names
    <prefix>replica:{<deployment>}:<role>:<name>    string: the record, as JSON, with a time to live
    <prefix>wanted:{<deployment>}                   hash: the wanted number of replicas by role, and
                                                    the number of replicas started so far; with a
                                                    time to live
    <prefix>starts:{<deployment>}                   string: the replicas that the reconciler is
                                                    starting, as JSON, with a time to live

The braces are part of the keys. A lease is the time to live of a record's key. Invalid values are
ignored. No settings of replicas are stored, because programs that can write to Redis must not
choose what code or model a replica runs."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvariantError, OutriderError, check
from outrider.limits import REPLICA_NUMBER_MAX, REPLICAS_MAX
from outrider.redis.address import RedisAddress
from outrider.redis.connection import calling, new_client
from outrider.registry.registry import (
    LEASE_S,
    RENEWAL_S,
    ROLES,
    STARTS_LEASE_S,
    ReplicaRecord,
    Role,
    Starts,
)

_log = logging.getLogger(__name__)
_STARTED = "started"
WANTED_TTL_S = 7 * 86_400
"""Time from the last access to the hash `wanted` until it expires. (`started` does not count.)"""
_COMPARE_AND_SET = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True)
class Contents:
    """All that the registry holds."""

    records: Mapping[Role, Sequence[ReplicaRecord]]
    """See `RedisRegistry.fleet`."""
    wanted: Mapping[Role, int]
    """See `RedisRegistry.wanted`."""
    starts: Mapping[Role, Starts]
    """See `RedisRegistry.starts`."""


class RedisRegistry:
    """Connects to Redis at the first call. Every call may raise `StoreUnavailable`."""

    def __init__(self, address: RedisAddress, deployment: str) -> None:
        check(not set(deployment) & set("{}"), "braces in a deployment's name")
        self._client = new_client(address)
        self._prefix, self._tag = address.key_prefix, f"{{{deployment}}}"
        self._wanted = f"{self._prefix}wanted:{self._tag}"
        self._expiry = ("EXPIRE", self._wanted, WANTED_TTL_S)
        self._starts = f"{self._prefix}starts:{self._tag}"

    async def announce(self, record: ReplicaRecord) -> None:
        """Begins or renews a replica's lease."""
        key, lease_ms = self._key(record.role, record.name), int(LEASE_S * 1e3)
        await self._run(
            ("SET", key, record.to_json(), "PX", lease_ms),
            ("SADD", self._names(record.role), record.name),
        )

    async def withdraw(self, role: Role, name: str) -> None:
        """Ends a replica's lease."""
        await self._run(("DEL", self._key(role, name)), ("SREM", self._names(role), name))

    async def records(self, role: Role) -> list[ReplicaRecord]:
        """Returns the records of one role (see `fleet`)."""
        return (await self.fleet((role,)))[role]

    async def fleet(self, roles: Sequence[Role] = ROLES) -> dict[Role, list[ReplicaRecord]]:
        """Maps each role to the records of its replicas with current leases, sorted by name. Omits
        invalid records. Removes names without a lease from Redis."""
        return await self._read_records(roles, await self._run(*self._list_names(roles)))

    async def contents(self) -> Contents:
        """Returns what `fleet`, `wanted` and `starts` return, in two requests to Redis."""
        *members, wanted, _, [starts] = await self._run(
            *self._list_names(ROLES),
            ("HMGET", self._wanted, *ROLES),
            self._expiry,
            ("MGET", self._starts),
        )
        records = await self._read_records(ROLES, members)
        return Contents(records, _read_wanted(wanted), _read_starts(starts))

    def _list_names(self, roles: Sequence[Role]) -> list[tuple[str, str]]:
        return [("SMEMBERS", self._names(role)) for role in roles]

    async def _read_records(
        self, roles: Sequence[Role], members: Sequence[Collection[bytes]]
    ) -> dict[Role, list[ReplicaRecord]]:
        keys = [
            (role, name)
            for role, names in zip(roles, members, strict=True)
            for name in sorted(member.decode(errors="replace") for member in names)
        ]
        records: dict[Role, list[ReplicaRecord]] = {role: [] for role in roles}
        if not keys:
            return records
        [texts] = await self._run(("MGET", *(self._key(role, name) for role, name in keys)))
        over: list[tuple[str, ...]] = []
        for (role, name), text in zip(keys, texts, strict=True):
            record = _read_record(role, name, text)
            if record is not None:
                records[role].append(record)
            elif text is None:
                over.append(("SREM", self._names(role), name))
        if over:
            # If one of these replicas still runs, its next announcement adds the name again.
            await self._run(*over)
        return records

    async def leases(self, role: Role) -> list[tuple[ReplicaRecord, float]]:
        """Returns the records of a role, each with the remaining seconds of its lease."""
        if not (records := await self.records(role)):
            return []
        left = await self._run(*(("PTTL", self._key(role, record.name)) for record in records))
        return [(record, max(0, ms) / 1e3) for record, ms in zip(records, left, strict=True)]

    async def leased(self, replicas: Sequence[tuple[Role, str]]) -> set[str]:
        """Returns the names of those of the `replicas` (role, name) that have a lease. Raises
        `StoreUnavailable` also while Redis refuses writes, because then no lease can be renewed."""
        keys = [self._key(role, name) for role, name in replicas]
        *found, _ = await self._run(*(("EXISTS", key) for key in keys), self._expiry)
        return {name for (_, name), exists in zip(replicas, found, strict=True) if exists}

    async def want(self, counts: Mapping[Role, int]) -> None:
        """Stores the wanted number of replicas of each role in `counts`."""
        fields = [part for role, count in counts.items() for part in (role, count)]
        await self._run(("HSET", self._wanted, *fields), self._expiry)

    async def change_wanted(self, role: Role, seen: int, count: int) -> bool:
        """Stores the wanted number of a role's replicas if the stored number is still `seen`.
        Returns whether it was."""
        words = ("EVAL", _COMPARE_AND_SET, 1, self._wanted, role, seen, count)
        is_stored, _ = await self._run(words, self._expiry)
        return bool(is_stored)

    async def wanted(self) -> dict[Role, int]:
        """Returns the numbers that `want` stored. Omits numbers outside 0..`REPLICAS_MAX`."""
        return (await self.wanted_and_started())[0]

    async def wanted_and_started(self) -> tuple[dict[Role, int], int]:
        """Returns what `wanted` and `started` return."""
        read = ("HMGET", self._wanted, *ROLES, _STARTED)
        [*wanted, started], _ = await self._run(read, self._expiry)
        return _read_wanted(wanted), _read_started(started)

    async def note_started(self, number: int) -> None:
        """Stores the number of replicas that the deployment has started so far."""
        await self._run(("HSET", self._wanted, _STARTED, number), self._expiry)

    async def started(self) -> int:
        """Returns the number that `note_started` stored, or 0 without a valid number."""
        [text] = await self._run(("HGET", self._wanted, _STARTED))
        return _read_started(text)

    async def announce_starts(self, each: Sequence[Starts]) -> None:
        """Begins or renews the lease of the reconciler's `Starts`, at most one for each role."""
        lease_ms = int(STARTS_LEASE_S * 1e3)
        await self._run(("SET", self._starts, Starts.to_json(each), "PX", lease_ms))

    async def withdraw_starts(self) -> None:
        """Ends the lease of `announce_starts`."""
        await self._run(("DEL", self._starts))

    async def starts(self) -> dict[Role, Starts]:
        """Returns what `announce_starts` stored, by role. Empty without a lease, or if the stored
        text is invalid."""
        [[text]] = await self._run(("MGET", self._starts))
        return _read_starts(text)

    async def close(self) -> None:
        """Closes the connections to Redis."""
        await self._client.aclose()

    async def _run(self, *commands: tuple[str | int, ...]) -> list[Any]:
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
    """Announces the current `record()` of a replica every `RENEWAL_S` until `withdraw`."""

    def __init__(self, registry: RedisRegistry, record: Callable[[], ReplicaRecord]) -> None:
        self._registry = registry
        self._record = record
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    async def start(self) -> None:
        """Raises `StoreUnavailable` if the first announcement fails."""
        await self._registry.announce(self._record())
        self._task = asyncio.create_task(self._run())

    def announce_now(self) -> None:
        """Must be called when the replica's record has changed. Announces the replica at once."""
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
        """Ends the lease. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            record = self._record()
            with suppress(OutriderError):
                await self._registry.withdraw(record.role, record.name)


def _number(text: bytes | None, most: int) -> int | None:
    if text is None or not text.isdigit() or len(text) > len(str(most)):
        return None
    return number if (number := int(text)) <= most else None


def _read_wanted(texts: Sequence[bytes | None]) -> dict[Role, int]:
    counts = ((role, _number(text, REPLICAS_MAX)) for role, text in zip(ROLES, texts, strict=True))
    return {role: count for role, count in counts if count is not None}


def _read_started(text: bytes | None) -> int:
    return _number(text, REPLICA_NUMBER_MAX) or 0


def _read_starts(text: bytes | None) -> dict[Role, Starts]:
    try:
        return {} if text is None else Starts.from_json(text)
    except ValueError as error:
        _log.warning("an invalid announcement of starts is ignored: %s", error)
        return {}


def _read_record(role: Role, name: str, text: bytes | None) -> ReplicaRecord | None:
    if text is None:
        return None
    try:
        record = ReplicaRecord.from_json(text)
        check((record.role, record.name) == (role, name), "the record names another replica")
        return record
    except (ValueError, InvariantError) as error:
        _log.warning("an invalid record of a %s is ignored: %s", role, error)
        return None
