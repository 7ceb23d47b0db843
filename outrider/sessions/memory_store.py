"""Sessions kept in this process: the twin of the Redis store, for tests and simulations.

The rules are those of `outrider.sessions.store`; this store never fails to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.errors import OutriderError
from outrider.sessions.lifetimes import DEFAULT_LIFETIMES, Lifetimes
from outrider.sessions.refusals import leased, missing, not_found, stale, taken, verified
from outrider.sessions.state import FIRST_EPOCH
from outrider.sessions.store import (
    Append,
    CacheState,
    Counters,
    Finish,
    NewSession,
    SessionRecord,
    SessionState,
)
from outrider.tokens import TokenSequence


@dataclass(frozen=True, slots=True)
class KeptSession:
    """One session with what only the store knows of it."""

    record: SessionRecord
    lease_until_ms: float
    expires_ms: float
    rewrite: bool = False
    """The tokens may be a former owner's and count as none: see `SessionStore`."""

    @property
    def length(self) -> int:
        """The stored length in tokens."""
        return 0 if self.rewrite else len(self.record.token_ids)


class MemoryStore:
    """A `SessionStore` on a clock of the caller's (milliseconds, any origin)."""

    def __init__(
        self, now_ms: Callable[[], float], lifetimes: Lifetimes = DEFAULT_LIFETIMES
    ) -> None:
        self._now_ms = now_ms
        self._lifetimes = lifetimes
        self._sessions: dict[str, KeptSession] = {}

    def snapshot(self) -> dict[str, KeptSession]:
        """All that is stored now; later calls do not change it."""
        return dict(self._sessions)

    def restore(self, snapshot: dict[str, KeptSession]) -> None:
        """Goes back to a snapshot, as a server does that lost its last writes in a crash."""
        self._sessions = dict(snapshot)

    async def open(self, session: NewSession) -> None:
        """See `SessionStore.open`."""
        self._drop_expired()
        kept = self._sessions.get(session.session_id)
        if kept is not None:
            old = kept.record
            if (
                old.tenant, old.owner, old.seed, old.rule, old.parameters, old.prompt_length
            ) != (
                session.tenant, session.owner, session.seed, session.rule, session.parameters,
                len(session.prompt_ids),
            ):  # fmt: skip
                raise taken(session.session_id)
            return
        record = SessionRecord(
            session_id=session.session_id,
            tenant=session.tenant,
            epoch=FIRST_EPOCH,
            owner=session.owner,
            state=SessionState.RUNNING,
            seed=session.seed,
            rule=session.rule,
            parameters=session.parameters,
            prompt_length=len(session.prompt_ids),
            token_ids=tuple(session.prompt_ids),
            prefix_digest=TokenSequence(session.prompt_ids).digest(),
            draft=CacheState(),
            target=CacheState(),
            counters=Counters(),
            logprobs="",
            finish_reason=None,
        )
        now_ms = self._now_ms()
        self._sessions[session.session_id] = KeptSession(
            record, now_ms + self._lifetimes.lease_ms, now_ms + self._lifetimes.session_ttl_ms
        )

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        """See `SessionStore.append`."""
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

    async def renew(self, owner: str, sessions: Sequence[tuple[str, int]]) -> list[str]:
        """See `SessionStore.renew`."""
        lost = []
        for session_id, epoch in sessions:
            kept = self._find(session_id)
            if kept is not None and epoch > kept.record.epoch:
                kept = self._raised(kept, epoch, owner)
            if kept is None or (kept.record.epoch, kept.record.owner) != (epoch, owner):
                lost.append(session_id)
            elif kept.record.state is SessionState.RUNNING:
                lease_until_ms = self._now_ms() + self._lifetimes.lease_ms
                kept = replace(kept, lease_until_ms=lease_until_ms)
                self._sessions[session_id] = self._touched(kept)
        return lost

    async def take_over(self, session_id: str, owner: str) -> SessionRecord:
        """See `SessionStore.take_over`."""
        kept = self._find(session_id)
        if kept is None:
            raise not_found(session_id)
        if kept.record.state is SessionState.RUNNING:
            now_ms = self._now_ms()
            if kept.record.owner != owner and kept.lease_until_ms > now_ms:
                raise leased(session_id, int(kept.lease_until_ms - now_ms))
            kept = KeptSession(
                replace(kept.record, epoch=kept.record.epoch + 1, owner=owner),
                now_ms + self._lifetimes.lease_ms,
                kept.expires_ms,
            )
            self._sessions[session_id] = self._touched(kept)
        return verified(kept.record)

    async def finish(self, finish: Finish) -> int:
        """See `SessionStore.finish`."""
        kept = self._admit(finish.session_id, finish.epoch, finish.owner)
        fits = finish.length in (None, kept.length)
        if fits and kept.record.state is SessionState.RUNNING:
            record = replace(
                kept.record,
                state=SessionState.FINISHED,
                finish_reason=finish.reason,
                counters=finish.counters,
            )
            kept = KeptSession(
                record,
                lease_until_ms=0,
                expires_ms=self._now_ms() + self._lifetimes.finished_ttl_ms,
                rewrite=kept.rewrite,
            )
        self._sessions[finish.session_id] = kept
        return kept.length

    async def load(self, session_id: str) -> SessionRecord:
        """See `SessionStore.load`."""
        kept = self._find(session_id)
        if kept is None:
            raise not_found(session_id)
        return verified(kept.record)

    async def close(self) -> None:
        """Nothing is open."""

    def _find(self, session_id: str) -> KeptSession | None:
        kept = self._sessions.get(session_id)
        if kept is not None and kept.expires_ms <= self._now_ms():
            del self._sessions[session_id]
            return None
        return kept

    def _admit(self, session_id: str, epoch: int, owner: str) -> KeptSession:
        """The session as a write of (epoch, owner) finds it, not stored yet. Raises `StaleEpoch`,
        `DataLoss`."""
        kept = self._find(session_id)
        if kept is None:
            raise missing(session_id)
        record = kept.record
        if is_stale(epoch, owner, record):
            raise stale(session_id, epoch, record.epoch)
        return self._raised(kept, epoch, owner) if epoch > record.epoch else kept

    def _drop_expired(self) -> None:
        now_ms = self._now_ms()
        for session_id in [k for k, kept in self._sessions.items() if kept.expires_ms <= now_ms]:
            del self._sessions[session_id]

    def _raised(self, kept: KeptSession, epoch: int, owner: str) -> KeptSession:
        """The session under an epoch that the store has lost."""
        record = replace(
            kept.record,
            epoch=epoch,
            owner=owner,
            state=SessionState.RUNNING,
            finish_reason=None,
        )
        lease_until_ms = self._now_ms() + self._lifetimes.lease_ms
        return KeptSession(record, lease_until_ms, kept.expires_ms, rewrite=True)

    def _touched(self, kept: KeptSession) -> KeptSession:
        if kept.record.state is not SessionState.RUNNING:
            return kept
        return replace(kept, expires_ms=self._now_ms() + self._lifetimes.session_ttl_ms)


def is_stale(epoch: int, owner: str, record: SessionRecord) -> bool:
    """Whether a write under (epoch, owner) comes from a former owner of the session."""
    return epoch < record.epoch or (epoch == record.epoch and owner != record.owner)


def _extended(kept: KeptSession, append: Append) -> KeptSession:
    """The session with the tokens of an append that fits."""
    record = kept.record
    record = replace(
        record,
        token_ids=(() if kept.rewrite else record.token_ids) + tuple(append.token_ids),
        logprobs=("" if kept.rewrite else record.logprobs) + append.logprobs,
        prefix_digest=append.prefix_digest,
        draft=append.draft,
        target=append.target,
        counters=append.counters,
    )
    return replace(kept, record=record, rewrite=False)
