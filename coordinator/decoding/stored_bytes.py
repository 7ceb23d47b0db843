"""Bounds the memory that each tenant's sessions take in the session store.

Without a bound, one tenant could fill the store, and then no tenant's request could begin. A
running session counts with the bytes that it may come to have. An ended session counts with the
bytes that it has, until the store forgets it. Each coordinator counts the sessions that it runs or
has ended. So the coordinators divide each tenant's share among them.

Most sessions end long before they have all the bytes that they may come to have. So a tenant may
exceed its share while the store has room:

| the store is full to | sessions of a tenant above its share | sessions of other tenants |
| --- | --- | --- |
| `STORE_SHARED_FROM` | no new ones | |
| `STORE_PAUSED_FROM` | also, the running ones wait | |
| `STORE_FULL_SHARE` | | no new ones |
"""

import asyncio
import heapq
import math
from collections import Counter
from dataclasses import dataclass

from coordinator.requests.validation import GenerationParameters
from outrider import limits
from outrider.errors import Overloaded
from outrider.sessions.state import Session
from outrider.sessions.store import SessionRecord, SharedText, StoreMemory

SESSION_BYTES = 2048
"""Memory of the store for a session without tokens, of which Redis' keys take about half."""
TOKEN_BYTES = 4
LOGPROB_BYTES = 32
KEY_BYTES = 512
"""Memory of the store for the value of an idempotency key."""
_RETRY_MS = 5_000


@dataclass(frozen=True, slots=True)
class _Held:
    tenant: str
    num_bytes: int
    shared: tuple[str, int] | None = None
    """Digest and length of the shared text."""
    until: float = math.inf
    """Loop time at which the store forgets it; infinity while the session runs."""
    epoch: int = 0


class StoredBytes:
    """Counts the bytes of one coordinator's sessions in the store. A shared text counts once."""

    def __init__(self, resume_grace_ms: int) -> None:
        self._kept_s = resume_grace_ms / 1e3 + limits.FINISHED_TTL_S
        self._memory, self._num_coordinators = StoreMemory(), 1
        self._num_written = 0
        """Bytes of sessions that were opened since `_memory` was learned."""
        self._learned = asyncio.Event()
        self._held: dict[str, _Held] = {}
        """By session id, and by name of an idempotency key."""
        self._ends: list[tuple[float, str]] = []
        """A heap of times at which the store forgets something. An entry counts only if `_held`
        has the same time."""
        self._totals: Counter[str] = Counter()
        self._uses: Counter[str] = Counter()
        """Digest of a shared text -> number of entries in `_held` that have it."""

    def learn(self, memory: StoreMemory, num_coordinators: int) -> None:
        """Sets the store's memory, and the number of coordinators that use the store."""
        self._memory, self._num_coordinators, self._num_written = memory, num_coordinators, 0
        self._learned.set()
        self._learned.clear()

    def of(self, tenant: str) -> int:
        """Returns the bytes of a tenant."""
        self._forget_ended()
        return self._totals[tenant]

    def _forget_ended(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._ends and self._ends[0][0] <= now:
            until, name = heapq.heappop(self._ends)
            if name in self._held and self._held[name].until == until:
                self._drop(name)

    @property
    def _share(self) -> int:
        """The bytes of each tenant's share at this coordinator. 0 if they are unknown."""
        return int(self._memory.most * limits.STORE_TENANT_SHARE) // self._num_coordinators

    def _is_above_share(self, tenant: str) -> bool:
        """Always false for the tenant without a name, because it has the store for itself."""
        return bool(tenant and self._share and self.of(tenant) > self._share)

    def check(self, tenant: str) -> None:
        """Raises `Overloaded` if the tenant's next session has no room in the store."""
        most, used = self._memory.most, self._memory.used + self._num_written
        if most and used > most * limits.STORE_FULL_SHARE:
            raise Overloaded(
                f"the session store is almost full, with {used} of {most} bytes (maxmemory of "
                "Redis); try again later",
                _RETRY_MS,
                "store_memory",
            )
        if used >= most * limits.STORE_SHARED_FROM and self._is_above_share(tenant):
            raise Overloaded(
                f"your sessions may take {self._share} bytes of this coordinator's session store "
                f"(a {round(1 / limits.STORE_TENANT_SHARE)}th of Redis' maxmemory, divided by the "
                "number of coordinators), because the store is filling up; running sessions count "
                f"with their max_tokens, and ended sessions count for {limits.FINISHED_TTL_S} s; "
                "try again later",
                _RETRY_MS,
                "tenant_store_memory",
            )

    async def room(self, tenant: str) -> None:
        """Waits while the tenant's running sessions must not take more memory, because other
        tenants have sessions, too."""
        while (
            self._memory.used >= self._memory.most * limits.STORE_PAUSED_FROM
            and self._is_above_share(tenant)
            and self._totals.total() > self._totals[tenant]
        ):
            await self._learned.wait()

    def hold(self, record: SessionRecord, parameters: GenerationParameters) -> None:
        """Counts a session that runs from now on."""
        num_tokens = record.prompt_length + parameters.max_tokens
        num_bytes = SESSION_BYTES + len(record.parameters) + TOKEN_BYTES * num_tokens
        self._num_written += num_bytes - TOKEN_BYTES * parameters.max_tokens
        if parameters.logprobs is not None:
            num_bytes += LOGPROB_BYTES * parameters.max_tokens * (1 + parameters.logprobs)
        shared = _size(record.shared)
        self._put(record.session_id, _Held(record.tenant, num_bytes, shared, epoch=record.epoch))

    def end(self, session: Session) -> None:
        """Counts a session with the bytes that it has, until the store has forgotten it."""
        num_bytes = SESSION_BYTES + TOKEN_BYTES * session.length + sum(map(len, session.logprobs))
        self._end(session.record, session.epoch, num_bytes)

    def end_early(self, record: SessionRecord) -> None:
        """Like `end`, for a session that has not begun to run."""
        held = self._held.get(record.session_id)
        if held is not None and held.until == math.inf:
            num_bytes = SESSION_BYTES + TOKEN_BYTES * record.prompt_length
            self._end(record, record.epoch, num_bytes)

    def hold_key(self, tenant: str, name: str) -> None:
        """Counts an idempotency key."""
        until = asyncio.get_running_loop().time() + limits.KEY_TTL_S
        self._put(name, _Held(tenant, KEY_BYTES, until=until))

    def _end(self, record: SessionRecord, epoch: int, num_bytes: int) -> None:
        held = self._held.get(record.session_id)
        if held is not None and held.epoch > epoch:  # It was resumed here, and runs.
            return
        until = asyncio.get_running_loop().time() + self._kept_s
        shared = _size(record.shared)
        self._put(record.session_id, _Held(record.tenant, num_bytes, shared, until, epoch))

    def _put(self, name: str, held: _Held) -> None:
        self._forget_ended()
        self._drop(name)
        self._held[name] = held
        self._totals[held.tenant] += held.num_bytes
        if held.shared is not None:
            digest, length = held.shared
            self._uses[digest] += 1
            if self._uses[digest] == 1:
                self._totals[held.tenant] += length
        if held.until < math.inf:
            heapq.heappush(self._ends, (held.until, name))

    def _drop(self, name: str) -> None:
        if (held := self._held.pop(name, None)) is None:
            return
        self._totals[held.tenant] -= held.num_bytes
        if held.shared is not None:
            digest, length = held.shared
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest]
                self._totals[held.tenant] -= length
        if not self._totals[held.tenant]:
            del self._totals[held.tenant]


def _size(shared: SharedText | None) -> tuple[str, int] | None:
    return None if shared is None else (shared.digest, len(shared.text))
