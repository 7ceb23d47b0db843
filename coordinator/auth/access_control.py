"""Access control for gRPC and HTTP: checks API keys, and limits each caller. The limits hold for
all coordinators together.

A token bucket with room for `requests_per_minute` requests limits the rate of a caller's requests.
For resumptions, the bucket is `RESUME_DEPTH` times as large, because clients resume all
sessions of a coordinator at once when this coordinator ends.

Each generation holds one of its caller's `concurrency` slots. A slot's name is the id of its
session, so a session keeps its slot when another coordinator resumes the session. Each coordinator
renews the leases of its slots. If a coordinator dies, its slots become free after `SLOT_LEASE_MS`.

Redis keeps a bucket and slots for each caller, under two keys that expire. `<name>` is the caller's
name, and the braces are literal:

    <prefix>limit:{<name>}:bucket    string: time at which the bucket is full again, ms
    <prefix>limit:{<name>}:slots     sorted set: names of slots, and the ends of their leases, ms
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

from outrider import limits
from outrider.errors import NotFound, OutriderError, Overloaded, Unauthenticated
from outrider.foundation.api_keys import ANYBODY, Caller, key_hash, read_key_file
from outrider.foundation.files import FileWatch
from outrider.interfaces.request import Event, Finished, Started
from outrider.redis.address import RedisAddress
from outrider.redis.connection import Call, Script, ScriptRunner, new_client
from outrider.transport.server import HEALTH_PATH, Context

_log = logging.getLogger(__name__)

_OTHERS_MAY_WRITE = 0o022
RESUME_DEPTH = 2
COUNTED = 0
"""In place of a bucket's depth: the request has a token of the bucket already."""
_COUNTED = frozenset(f"/outrider.v1.Coordinator/{name}" for name in ("Generate", "GetSession"))
"""Methods that an empty bucket refuses before their message is read."""
_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def current_caller() -> Caller:
    """Returns the caller of the current gRPC call; `ANYBODY` without API keys."""
    return _CALLER.get()


def watch_keys(
    path: Path | None, given: dict[str, Caller] | None = None
) -> FileWatch[Mapping[str, Caller]]:
    """Watches a file of API keys. The keys in `given` are added to those of the file. The result
    maps the hash of each key to the key's caller. Raises `ConfigError` for an unusable file."""

    def read() -> Mapping[str, Caller]:
        return (given or {}) | (read_key_file(path) if path else {})

    watch = FileWatch([path], read)
    if path is not None and path.stat().st_mode & _OTHERS_MAY_WRITE:
        _log.warning("%s: other users can write this file, so they can add API keys", path)
    return watch


class RateExceeded(Overloaded):
    """The next request is allowed after `left_ms`."""

    def __init__(self, caller: Caller, left_ms: int) -> None:
        number = caller.requests_per_minute
        message = f"the key {caller.name!r} may make {number} requests a minute; try again later"
        super().__init__(message, left_ms, "requests_per_minute")


class Grant:
    """An admitted request and its slots. Without a limit (`concurrency` 0), there are no slots."""

    def __init__(
        self, access: AccessControl, caller: Caller, names: Sequence[str], resumes: Sequence[str]
    ) -> None:
        self._access, self._caller, self._held = access, caller, list(names)
        self._num_running = len(names)
        self._may_run_elsewhere = set(resumes)
        """Sessions that may still run at another coordinator, which then uses their slots."""

    async def note(self, event: Event, index: int = 0) -> None:
        """Must be called before an event of generation `index` is sent. The event that finishes the
        last generation frees the slots, so that the client can make its next request at once."""
        if isinstance(event, Finished):
            self._num_running -= 1
            if self._num_running <= 0 and (freed := self.drop()):
                await freed
        elif isinstance(event, Started) and self._held:
            self._may_run_elsewhere.discard(event.session_id)
            old, self._held[index] = self._held[index], event.session_id
            if old != event.session_id:
                self._access.exchange(self._caller, [old], [event.session_id])

    def keep_none(self) -> None:
        """Must be called if no session of the request runs at another coordinator."""
        self._may_run_elsewhere.clear()

    def drop(self) -> asyncio.Task[None] | None:
        """Frees the slots in the background, but not the slot of a session whose resumption has
        failed. A second call does nothing."""
        names, self._held = self._held, []
        if not names:
            return None
        return self._access.exchange(self._caller, names, kept=self._may_run_elsewhere)


class AccessControl:
    """Identifies and limits callers. All calls must come from one event loop."""

    def __init__(
        self, keys: FileWatch[Mapping[str, Caller]] | None = None, slots: RedisSlots | None = None
    ) -> None:
        """Without `keys`, all callers are `ANYBODY`. Without `slots`, no caller is limited."""
        self._keys, self._store = keys, slots
        self._held: dict[str, Counter[str]] = defaultdict(Counter)
        """Caller's name -> slot -> number of streams that use the slot. While a session is resumed
        and its old stream is still open, two streams use the session's slot."""
        self._empty_until: dict[tuple[Caller, int], float] = {}
        """Caller whose bucket of some depth was empty -> loop time of the next allowed request."""
        self._work: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def asks_for_keys(self) -> bool:
        return self._keys is not None

    def identify(self, authorization: Sequence[str]) -> Caller:
        """Returns the caller of a request. `authorization` has all values of this header. If API
        keys are configured, it must be [`Bearer KEY`]. Raises `Unauthenticated`."""
        if len(authorization) > 1:
            raise Unauthenticated(f"authorization: got {len(authorization)} values; send one")
        if self._keys is None:
            return ANYBODY
        if not authorization:
            raise Unauthenticated("authorization: is missing; send `Bearer` and an API key")
        scheme, _, key = authorization[0].strip().partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("authorization: is not `Bearer`; send `Bearer` and an API key")
        key = key.strip()
        is_key = 0 < len(key) <= limits.API_KEY_CHARS_MAX
        caller = self._keys.current().get(key_hash(key)) if is_key else None
        if caller is None:
            raise Unauthenticated("authorization: this API key does not exist")
        return caller

    def check_call(self, method: str, context: Context) -> str | None:
        """Identifies the caller of a gRPC method, and returns the caller's name (see `Guard`).
        Health checks need no API key. Raises `Unauthenticated`, and `Overloaded` for a method that
        counts as a request if the caller's bucket is empty."""
        metadata = context.invocation_metadata() or ()
        try:
            caller = self.identify(
                [str(value) for key, value in metadata if key == "authorization"]
            )
        except Unauthenticated:
            if method.startswith(HEALTH_PATH):
                return None
            raise
        if method in _COUNTED:
            self.check_rate(caller)
        _CALLER.set(caller)
        return caller.name

    def check_rate(self, caller: Caller, *, may_resume: bool = False) -> None:
        """Raises `Overloaded` if an earlier request found the caller's bucket empty, and the bucket
        is still empty. If the request `may_resume` a session, the bucket may be in debt. Does not
        ask Redis."""
        bucket = caller, RESUME_DEPTH if may_resume else 1
        left_s = self._empty_until.get(bucket, 0.0) - asyncio.get_running_loop().time()
        if left_s > 0:
            raise RateExceeded(caller, math.ceil(left_s * 1e3))
        self._empty_until.pop(bucket, None)

    async def count(self, caller: Caller, resumes: Callable[[], Awaitable[bool]]) -> None:
        """Counts one request of the caller, before the request costs anything. If the bucket is
        empty, `resumes` says whether the request resumes a session. Raises `Overloaded` with the
        time to wait, `StoreUnavailable`, and the errors of `resumes`."""
        if not caller.requests_per_minute or self._store is None:
            return
        try:
            await self._take(self._store, caller, (), 1)
        except RateExceeded:
            if not await resumes():
                raise
            await self._take(self._store, caller, (), RESUME_DEPTH)

    async def _take(
        self, store: RedisSlots, caller: Caller, names: Sequence[str], depth: int
    ) -> None:
        """Calls `RedisSlots.take`, and remembers an empty bucket."""
        asked_at = asyncio.get_running_loop().time()
        try:
            await store.take(caller, names, depth)
        except RateExceeded as error:
            self._empty_until[caller, depth] = asked_at + error.retry_after_ms / 1e3
            raise

    @asynccontextmanager
    async def admit(
        self,
        caller: Caller,
        resumes: Sequence[str] = (),
        num_generations: int = 1,
        *,
        is_counted: bool = False,
    ) -> AsyncIterator[Grant]:
        """Counts one request of the caller unless it `is_counted`, and holds a slot for each
        generation until the context ends. `resumes` has the ids of resumed sessions. If a limit is
        reached, raises `Overloaded` with the time to wait. A request for which too few slots are
        free does not count, unless it was counted before. Raises `StoreUnavailable`. After an
        error, no slot is held."""
        names: list[str] = []
        counts = caller.requests_per_minute > 0 and not is_counted
        if (counts or caller.concurrency) and self._store is not None:
            if caller.concurrency:
                names = [*resumes] or [secrets.token_hex(16) for _ in range(num_generations)]
            depth = COUNTED if is_counted else RESUME_DEPTH if resumes else 1
            try:
                await self._take(self._store, caller, names, depth)
            except BaseException as error:
                if not isinstance(error, Overloaded) and not resumes:
                    # Redis may have given the slots before its answer was lost.
                    self._in_background(caller, names)
                raise
            self._hold(caller, names)
        grant = Grant(self, caller, names, resumes)
        try:
            yield grant
        except NotFound:  # The session runs nowhere.
            grant.keep_none()
            raise
        finally:
            grant.drop()

    def exchange(
        self,
        caller: Caller,
        old: Collection[str],
        new: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> asyncio.Task[None]:
        """Gives up `old` slots, and holds `new` slots. Frees the `old` slots that no other stream
        uses, except those in `kept`. The returned task updates Redis."""
        held = self._held[caller.name]
        held.subtract(old)
        freed = [name for name in old if held[name] <= 0]
        for name in freed:
            held.pop(name, None)
        self._hold(caller, new)
        if not held:
            del self._held[caller.name]
        return self._in_background(caller, [name for name in freed if name not in kept])

    async def close(self) -> None:
        """Frees all slots, and closes the connections to Redis."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        freed = dict(self._held)
        self._held.clear()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._update_store(freed)
        if self._store is not None:
            await self._store.close()

    def _in_background(self, caller: Caller, freed: Collection[str]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._update_store({caller.name: freed}))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _hold(self, caller: Caller, names: Collection[str]) -> None:
        if names:
            self._held[caller.name].update(names)
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while self._held:
            await asyncio.sleep(limits.SLOT_RENEWAL_MS / 1e3)
            await self._update_store(dict.fromkeys(self._held, ()))

    async def _update_store(self, freed: Mapping[str, Collection[str]]) -> None:
        """For each caller in `freed` (name -> slots), renews all held slots, and frees the given
        slots unless a stream holds them again."""
        if self._store is None:
            return
        updates = {}
        for name, slots in freed.items():
            held = [*self._held.get(name, ())]
            updates[name] = held, [slot for slot in slots if slot not in held]
        try:
            await self._store.update(updates)
        except OutriderError as error:  # The slots become free when their leases end.
            _log.info("the slots of callers were not renewed or freed: %s", error)


_TAKE = Script("take_slot")
_KEEP = Script("keep_slots")


class RedisSlots:
    """Slots and buckets in Redis. Every method may raise `StoreUnavailable`."""

    def __init__(self, address: RedisAddress) -> None:
        self._client = new_client(address)
        self._scripts = ScriptRunner(self._client)
        self._prefix = address.key_prefix

    async def take(self, caller: Caller, slots: Sequence[str], depth: int) -> None:
        """Counts a request, and takes the named `slots`. Slots that the caller already holds
        do not count again. `depth` multiplies the size of the bucket, or is `COUNTED`. If the
        bucket is empty or too few slots are free, raises `Overloaded`, and does neither."""
        keys = (self._key(caller.name, "bucket"), self._key(caller.name, "slots"))
        arguments: list[str | int] = [
            caller.requests_per_minute,
            depth,
            caller.concurrency,
            limits.SLOT_LEASE_MS,
            *slots,
        ]
        match await self._scripts.run(_TAKE, (keys, arguments)):
            case [b"taken", _]:
                return
            case [b"rate", int(left_ms)]:
                raise RateExceeded(caller, left_ms)
            case _:
                raise Overloaded(
                    f"the key {caller.name!r} may run {caller.concurrency} generations at a time; "
                    f"there is no room for {len(slots)} more now",
                    limits.SLOT_RETRY_MS,
                    "concurrency",
                )

    async def update(self, slots: Mapping[str, tuple[Collection[str], Collection[str]]]) -> None:
        """Renews and frees slots. `slots`: caller's name -> (slots to renew, slots to free)."""
        calls: list[Call] = []
        for name, (held, free) in slots.items():
            keys = (self._key(name, "slots"),)
            gone, kept = list(free), list(held)
            for start in range(0, max(len(gone), len(kept)), limits.SLOTS_PER_SCRIPT_MAX):
                some, rest = (
                    names[start : start + limits.SLOTS_PER_SCRIPT_MAX] for names in (gone, kept)
                )
                calls.append((keys, [limits.SLOT_LEASE_MS, len(some), *some, *rest]))
        for answer in await self._scripts.run_all(_KEEP, calls):
            if isinstance(answer, Exception):
                raise answer

    async def close(self) -> None:
        """Closes the connections to Redis."""
        await self._scripts.close()
        await self._client.aclose()

    def _key(self, name: str, what: str) -> str:
        return f"{self._prefix}limit:{{{name}}}:{what}"


OPEN = AccessControl()
"""Access control that requires no API key and limits no caller."""
