"""An in-memory `SessionStore` that follows all rules of `outrider.sessions.store`: the model for
the Redis store, and its replacement in tests. It never fails, and can be set back to a snapshot,
like a server that lost its last writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.errors import DataLoss, InvariantError, OutriderError, StaleEpoch, Unavailable
from outrider.sessions.redis_store import RedisStore
from outrider.sessions.store import (
    Append,
    Finish,
    SessionRecord,
    SessionStore,
    contended,
    not_found,
    released,
    verified,
)


@dataclass(frozen=True, slots=True)
class StoredSession:
    """One session with the store's own state."""

    record: SessionRecord
    expires_ms: float
    rewrite: bool = False
    """The tokens may be a former owner's and count as none: see `SessionStore`."""
    pending: tuple[int, ...] = ()
    """Tokens that were sent again, with more to follow ..."""
    pending_logprobs: str = ""
    """... and their log-probabilities."""

    @property
    def length(self) -> int:
        return len(self.pending if self.rewrite else self.record.token_ids)


class TwinStore(SessionStore):
    """A `SessionStore` on a clock of the caller's (milliseconds, any origin)."""

    lease_ms = RedisStore.lease_ms
    session_ttl_ms = RedisStore.session_ttl_ms
    finished_ttl_ms = RedisStore.finished_ttl_ms

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._sessions: dict[str, StoredSession] = {}
        self._leases: dict[str, tuple[float, dict[str, bool]]] = {}
        """By owner: end, and sessions that others asked for since, and whether to cancel them."""
        self._keys: dict[str, tuple[float, str]] = {}
        """Expiry and value by key."""

    def snapshot(self) -> dict[str, StoredSession]:
        """A copy of all sessions."""
        return dict(self._sessions)

    def restore(self, snapshot: dict[str, StoredSession]) -> None:
        """Goes back to a snapshot, as a server that lost its last writes in a crash. Leases have
        run out meanwhile."""
        self._sessions = dict(snapshot)
        self._leases.clear()

    async def open(self, session: SessionRecord) -> None:
        self._drop_expired()
        kept = self._sessions.get(session.session_id)
        if kept is not None:
            old = kept.record
            if _request(old) != _request(session):
                raise InvariantError(f"another session has the id {session.session_id}")
            return
        expires_ms = self._now_ms() + self.session_ttl_ms
        self._sessions[session.session_id] = StoredSession(session, expires_ms)

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        return [self._append(append) for append in appends]

    def _append(self, append: Append) -> int | OutriderError:
        try:
            kept = self._admit(append.session_id, append.epoch, append.owner)
        except OutriderError as error:
            return error
        length = kept.length
        if length == append.expected_length and append.token_ids:
            kept = _extended(kept, append)
            length += len(append.token_ids)
        self._sessions[append.session_id] = self._touched(kept)
        return length

    async def hold_lease(self, owner: str) -> Mapping[str, bool]:
        now_ms = self._now_ms()
        self._leases = {name: one for name, one in self._leases.items() if one[0] > now_ms}
        _, wanted = self._leases.get(owner, (0, {}))
        self._leases[owner] = now_ms + self.lease_ms, {}
        return wanted

    async def end_lease(self, owner: str) -> None:
        self._leases.pop(owner, None)

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        kept = self._admit(session_id, epoch, owner, reopens=False)
        if kept.record.finish_reason is None:
            kept = replace(kept, record=replace(kept.record, owner=released(owner)))
        self._sessions[session_id] = kept

    async def take_over(
        self,
        seen: SessionRecord,
        owner: str,
        on_sent: Callable[[], None] = lambda: None,
        cancels: bool = False,
    ) -> SessionRecord:
        session_id = seen.session_id
        if seen.finish_reason is None and seen.owner != owner:
            ends_ms, wanted = self._leases.get(seen.owner, (0, {}))
            left_ms = ends_ms - self._now_ms()
            if left_ms > 0:
                wanted[session_id] = cancels or wanted.get(session_id, False)
                raise Unavailable("has an owner", retry_after_ms=max(int(left_ms), 1))
        on_sent()
        kept = self._find(session_id)
        if kept is None:
            raise not_found(session_id)
        if kept.record.finish_reason is None:
            if (kept.record.epoch, kept.record.owner) != (seen.epoch, seen.owner):
                raise contended(session_id)
            record = replace(kept.record, epoch=seen.epoch + 1, owner=owner)
            kept = self._sessions[session_id] = self._touched(
                StoredSession(record, kept.expires_ms)
            )
        return verified(kept.record)

    async def finish(self, finish: Finish) -> int:
        kept = self._admit(finish.session_id, finish.epoch, finish.owner)
        fits = finish.length is None or (not kept.rewrite and finish.length == kept.length)
        if fits and kept.record.finish_reason is None:
            record = replace(kept.record, finish_reason=finish.reason, counters=finish.counters)
            expires_ms = self._now_ms() + self.finished_ttl_ms
            kept = replace(kept, record=record, expires_ms=expires_ms)
        self._sessions[finish.session_id] = kept
        return kept.length

    async def load(self, session_id: str) -> SessionRecord:
        kept = self._find(session_id)
        if kept is None:
            raise not_found(session_id)
        return verified(kept.record)

    async def claim_key(self, key: str, value: str = "", replaces: str = "") -> str:
        expires_ms, found = self._keys.get(key, (0.0, ""))
        if expires_ms <= self._now_ms():
            found = ""
        if value and found in ("", replaces):
            found = value
        if found:
            self._keys[key] = self._now_ms() + self.session_ttl_ms, found
        return found

    async def close(self) -> None:
        """Nothing is open."""

    def _find(self, session_id: str) -> StoredSession | None:
        kept = self._sessions.get(session_id)
        if kept is not None and kept.expires_ms <= self._now_ms():
            del self._sessions[session_id]
            return None
        return kept

    def _admit(
        self, session_id: str, epoch: int, owner: str, reopens: bool = True
    ) -> StoredSession:
        """The session for a write of (epoch, owner), not stored yet; a finished one runs again
        under a higher epoch, if the write `reopens` it. Raises `StaleEpoch`, `DataLoss`."""
        kept = self._find(session_id)
        if kept is None:
            raise DataLoss(f"session {session_id} is not stored any more")
        record = kept.record
        if is_stale(epoch, owner, record):
            raise StaleEpoch(f"session {session_id} is at epoch {record.epoch}")
        is_raised = epoch > record.epoch and (reopens or record.finish_reason is None)
        return _raised(kept, epoch, owner) if is_raised else kept

    def _drop_expired(self) -> None:
        now_ms = self._now_ms()
        for session_id in [k for k, kept in self._sessions.items() if kept.expires_ms <= now_ms]:
            del self._sessions[session_id]

    def _touched(self, kept: StoredSession) -> StoredSession:
        if kept.record.finish_reason is not None:
            return kept
        return replace(kept, expires_ms=self._now_ms() + self.session_ttl_ms)


def is_stale(epoch: int, owner: str, record: SessionRecord) -> bool:
    """Whether a write under (epoch, owner) comes from a former owner of the session."""
    return epoch < record.epoch or (epoch == record.epoch and owner != record.owner)


def _request(record: SessionRecord) -> tuple[object, ...]:
    return (
        record.tenant, record.owner, record.seed, record.rule, record.parameters,
        record.prompt_length,
    )  # fmt: skip


def _raised(kept: StoredSession, epoch: int, owner: str) -> StoredSession:
    record = replace(kept.record, epoch=epoch, owner=owner, finish_reason=None)
    return StoredSession(record, kept.expires_ms, rewrite=True)


def _extended(kept: StoredSession, append: Append) -> StoredSession:
    record = kept.record
    token_ids, logprobs = record.token_ids, record.logprobs
    if kept.rewrite:
        token_ids, logprobs = kept.pending, kept.pending_logprobs
    token_ids, logprobs = token_ids + tuple(append.token_ids), logprobs + append.logprobs
    if kept.rewrite and append.more_follow:
        return replace(kept, pending=token_ids, pending_logprobs=logprobs)
    record = replace(
        record,
        token_ids=token_ids,
        logprobs=logprobs,
        prefix_digest=append.prefix_digest,
        draft=append.draft,
        target=append.target,
        counters=append.counters,
    )
    return StoredSession(record, kept.expires_ms)
