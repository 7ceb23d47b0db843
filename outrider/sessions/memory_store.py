"""Sessions kept in this process, for simulations: a store that always answers and loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.errors import OutriderError, StaleEpoch
from outrider.limits import SESSION_LEASE_MS
from outrider.sessions.store import (
    Append,
    Finish,
    SessionRecord,
    SessionStore,
    contended,
    leased,
    not_found,
    released,
    stale,
)


class MemoryStore(SessionStore):
    """A `SessionStore` on a clock of the caller's (milliseconds, any origin)."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._records: dict[str, SessionRecord] = {}
        self._lease_ends_ms: dict[str, float] = {}

    async def open(self, session: SessionRecord) -> None:
        self._records.setdefault(session.session_id, session)

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        return [self._append(append) for append in appends]

    def _append(self, append: Append) -> int | OutriderError:
        try:
            record = self._owned(append.session_id, append.epoch, append.owner)
        except StaleEpoch as error:
            return error
        if len(record.token_ids) == append.expected_length:
            record = self._records[append.session_id] = replace(
                record,
                token_ids=record.token_ids + append.token_ids,
                logprobs=record.logprobs + append.logprobs,
                prefix_digest=append.prefix_digest,
                draft=append.draft,
                target=append.target,
                counters=append.counters,
            )
        return len(record.token_ids)

    async def hold_lease(self, owner: str) -> Sequence[str]:
        self._lease_ends_ms[owner] = self._now_ms() + SESSION_LEASE_MS
        return ()

    async def end_lease(self, owner: str) -> None:
        self._lease_ends_ms.pop(owner, None)

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        record = self._owned(session_id, epoch, owner)
        if record.finish_reason is None:
            self._records[session_id] = replace(record, owner=released(owner))

    async def take_over(
        self, seen: SessionRecord, owner: str, on_sent: Callable[[], None] = lambda: None
    ) -> SessionRecord:
        left_ms = self._lease_ends_ms.get(seen.owner, 0) - self._now_ms()
        if seen.owner != owner and seen.finish_reason is None and left_ms > 0:
            raise leased(seen.session_id, int(left_ms))
        on_sent()
        record = await self.load(seen.session_id)
        if record.finish_reason is not None:
            return record
        if (record.epoch, record.owner) != (seen.epoch, seen.owner):
            raise contended(seen.session_id)
        record = replace(record, epoch=seen.epoch + 1, owner=owner)
        self._records[seen.session_id] = record
        return record

    async def finish(self, finish: Finish) -> int:
        record = self._owned(finish.session_id, finish.epoch, finish.owner)
        length = len(record.token_ids)
        if record.finish_reason is None and finish.length in (None, length):
            self._records[finish.session_id] = replace(
                record, finish_reason=finish.reason, counters=finish.counters
            )
        return length

    async def load(self, session_id: str) -> SessionRecord:
        if session_id not in self._records:
            raise not_found(session_id)
        return self._records[session_id]

    async def close(self) -> None:
        """Nothing is open."""

    def _owned(self, session_id: str, epoch: int, owner: str) -> SessionRecord:
        record = self._records[session_id]
        if (record.epoch, record.owner) != (epoch, owner):
            raise stale(session_id, epoch, record.epoch)
        return record
