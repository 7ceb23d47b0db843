"""What callers run, and have asked for, in Redis.

    <prefix>limit:{<name>}:bucket    string: when it is full again, ms of Redis' clock
    <prefix>limit:{<name>}:slots     sorted set: slot to the end of its lease, ms

The braces are literal. Both have a time to live.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outrider.errors import InvariantError, Overloaded
from outrider.limits import SLOT_LEASE_MS, SLOT_RETRY_MS, SLOTS_PER_SCRIPT_MAX
from outrider.security.callers import Caller
from outrider.security.limits import rate_exceeded
from outrider.sessions.redis_address import RedisAddress
from outrider.sessions.redis_connection import new_client
from outrider.sessions.redis_scripts import Call, Script, ScriptRunner

_TAKE = Script("take_slot")
_KEEP = Script("keep_slots")


class RedisSlots:
    """A `SlotStore` in one Redis server."""

    def __init__(self, address: RedisAddress) -> None:
        """Connects when it is first used."""
        self._client = new_client(address)
        self._scripts = ScriptRunner(self._client)
        self._prefix = address.key_prefix

    async def take(self, caller: Caller, slots: Sequence[str], depth: int) -> None:
        """See `SlotStore.take`."""
        keys = (self._key(caller.name, "bucket"), self._key(caller.name, "slots"))
        arguments: list[str | int] = [
            caller.requests_per_minute, depth, caller.concurrency, SLOT_LEASE_MS, *slots
        ]  # fmt: skip
        match await self._scripts.run(_TAKE, (keys, arguments)):
            case [b"taken", _]:
                return
            case [b"rate", int(left_ms)]:
                raise rate_exceeded(caller, left_ms)
            case [b"slots", _]:
                more = "does" if len(slots) == 1 else f"has no room for {len(slots)} more"
                raise Overloaded(
                    f"the key {caller.name!r} may run {caller.concurrency} generations at a time, "
                    f"and {more}",
                    retry_after_ms=SLOT_RETRY_MS,
                )
            case _:
                raise InvariantError("Redis gave an unknown answer for a slot")

    async def keep(self, slots: Mapping[str, tuple[Collection[str], Collection[str]]]) -> None:
        """See `SlotStore.keep`."""
        calls: list[Call] = []
        for name, (held, free) in slots.items():
            keys = (self._key(name, "slots"),)
            gone, kept = list(free), list(held)
            while gone or kept:
                some, gone = gone[:SLOTS_PER_SCRIPT_MAX], gone[SLOTS_PER_SCRIPT_MAX:]
                rest, kept = kept[:SLOTS_PER_SCRIPT_MAX], kept[SLOTS_PER_SCRIPT_MAX:]
                calls.append((keys, [SLOT_LEASE_MS, len(some), *some, *rest]))
        for answer in await self._scripts.run_all(_KEEP, calls):
            if isinstance(answer, Exception):
                raise answer

    async def close(self) -> None:
        """See `SlotStore.close`."""
        await self._scripts.close()
        await self._client.aclose()

    def _key(self, name: str, what: str) -> str:
        return f"{self._prefix}limit:{{{name}}}:{what}"
