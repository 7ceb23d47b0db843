"""Commits decided tokens to the store in batches. Clients may see tokens only once committed.

While one call to the store runs, the outcomes of all sessions are collected for the next call, so
the number of calls does not grow with the number of sessions. If the store does not answer, the
call is repeated, and what the store missed is sent in one append per session. Until then only
sessions that reach the limit on uncommitted tokens wait.

Time comes from the running event loop alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice

from outrider.backoff import backoff
from outrider.errors import InvariantError, OutriderError, StoreUnavailable, Unavailable, check
from outrider.limits import (
    APPENDS_PER_CALL_MAX,
    COMMIT_RETRY_MS_MAX,
    COMMIT_RETRY_MS_MIN,
    SESSION_LEASE_RENEWAL_MS,
    UNCOMMITTED_MS_MAX,
    UNCOMMITTED_TOKENS_MAX,
)
from outrider.sessions.state import Session
from outrider.sessions.store import Append, FinishReason, SessionStore

_log = logging.getLogger(__name__)


class _Entry:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.waiters: list[asyncio.Future[None]] = []
        """Each waits for any change of what the store has of the session."""
        self.behind_since: float | None = None
        """The later of two times: when the store last took tokens, and when the oldest that it
        lacks were decided. None while it lacks none."""
        self.stirred = False

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()


class Committer:
    """Commits the sessions of one coordinator, on one event loop, while `run` runs."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        random: Callable[[], float],
        on_wanted: Callable[[Mapping[str, bool]], None] = lambda _: None,
    ) -> None:
        """`owner` is this coordinator's name in the store; `random` gives numbers in [0, 1);
        `on_wanted` is called with the sessions that `SessionStore.hold_lease` returns."""
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._owner = owner
        self._random = random
        self._on_wanted = on_wanted
        self._entries: dict[str, _Entry] = {}
        self._dirty: dict[str, None] = {}
        """Ids of sessions with something to append, those that wait longest first."""
        self._work = asyncio.Event()
        self._leaving = asyncio.Event()
        """Set when the lease is to end."""
        self._closing = asyncio.Event()

    @property
    def closing(self) -> bool:
        """Whether no more sessions are accepted: after `close`, or after a bug ended `run`."""
        return self._closing.is_set()

    def add(self, session: Session) -> None:
        """Starts committing the tokens of a session."""
        if self.closing:
            raise Unavailable("this coordinator is shutting down")
        check(session.session_id not in self._entries, f"{session.session_id} was added twice")
        self._entries[session.session_id] = _Entry(session)
        self.notify(session)

    @property
    def leaving(self) -> bool:
        """Whether `hand_over` was called."""
        return self._leaving.is_set()

    def notify(self, session: Session) -> None:
        """Call when the session has decided tokens. O(1); does nothing after `close`."""
        if not self.closing:
            self._want(self._entry(session))

    def remove(self, session: Session) -> None:
        """Forgets the session. Calls that wait for it raise `Unavailable`. Idempotent."""
        entry = self._entries.get(session.session_id)
        if entry is not None and entry.session is session:
            del self._entries[session.session_id]
            self._dirty.pop(session.session_id, None)
            entry.wake()

    async def shown(self, session: Session, length: int) -> int:
        """Waits until the first `length` tokens may be shown, or until `stir`. Returns how many may
        be shown. Raises the session's error if it is lost before that."""
        entry = self._entry(session)
        while session.showable_length < length and not entry.stirred:
            await self._change(entry)
        entry.stirred = False
        return session.showable_length

    def stir(self, session: Session) -> None:
        """Makes the current call of `shown`, or the next one, return at once. Does nothing for a
        removed session."""
        entry = self._entries.get(session.session_id)
        if entry is not None and entry.session is session:
            entry.stirred = True
            entry.wake()

    async def room(self, session: Session, num_tokens: int = 1) -> None:
        """Waits until `num_tokens` more may be decided: with them at most `UNCOMMITTED_TOKENS_MAX`
        are uncommitted, and the store has taken tokens within `UNCOMMITTED_MS_MAX`. Returns at once
        if all tokens are committed. Raises the session's error if it is lost."""
        entry = self._entry(session)
        self._check_served(entry)
        while entry.behind_since is not None and (
            session.num_uncommitted + num_tokens > UNCOMMITTED_TOKENS_MAX
            or self._loop.time() - entry.behind_since > UNCOMMITTED_MS_MAX / 1000
        ):
            await self._change(entry)
            self._check_served(entry)

    async def finish(self, session: Session, reason: FinishReason) -> None:
        """Ends the session: returns when the store has all of its tokens and the reason. Raises the
        session's error if it is lost before that. May be cancelled and called again; the first
        reason is kept."""
        entry, attempt = self._entry(session), 0
        if session.finish_reason is None and session.error is None:
            session.finish(reason)
        self._check_served(entry)
        self.notify(session)
        while True:
            while session.num_uncommitted > 0:
                await self._change(entry)
                self._check_served(entry)
            try:
                stored_length = await self._store.finish(session.ending())
            except StoreUnavailable:
                await self._back_off(attempt)
                attempt += 1
                self._check_served(entry)
                continue
            except OutriderError as error:
                self._lose(entry, error)
                raise
            self._check_served(entry)
            self._apply(entry, stored_length)
            self._check_served(entry)
            if session.num_uncommitted == 0:
                return

    async def run(self) -> None:
        """Commits and renews the owner's lease until `close`, then tries once more to commit the
        rest. Calls that still wait for a session raise `Unavailable`; the sessions stay in the
        store for another owner. Raises only for bugs, with an exception group."""
        try:
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(self._append_all()),
                    tasks.create_task(self._hold_lease()),
                ]
                await self._closing.wait()
                for task in work:
                    task.cancel()
            while self._dirty and await self._append_some():
                pass
            await self._end_lease()
        finally:
            self._closing.set()
            for entry in list(self._entries.values()):
                self.remove(entry.session)

    def hand_over(self) -> None:
        """Ends the lease, as this coordinator is about to close. Its sessions go on, but another
        coordinator may take any of them over at once."""
        self._leaving.set()

    def close(self) -> None:
        """Ends `run`."""
        self._closing.set()

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless everything that the store lacks is queued. Call it only
        while no call to the store is running."""
        for session_id, entry in self._entries.items():
            entry.session.check_integrity()
            check(entry.session.has_news == (session_id in self._dirty), f"{session_id} forgotten")
        check(self._dirty.keys() <= self._entries.keys(), "a removed session is to be appended")

    def _entry(self, session: Session) -> _Entry:
        entry = self._entries.get(session.session_id)
        if entry is not None and entry.session is session:
            return entry
        if self.closing:
            raise Unavailable("this coordinator is shutting down")
        raise InvariantError(f"session {session.session_id} was not added to the committer")

    def _current(self, entry: _Entry) -> bool:
        return self._entries.get(entry.session.session_id) is entry

    def _check_served(self, entry: _Entry) -> None:
        if entry.session.error is not None:
            raise entry.session.error
        if not self._current(entry):
            raise Unavailable(f"session {entry.session.session_id} is not served here any more")

    async def _change(self, entry: _Entry) -> None:
        self._check_served(entry)
        waiter = self._loop.create_future()
        entry.waiters.append(waiter)
        await waiter

    def _want(self, entry: _Entry) -> None:
        """Queues the session for one of the next calls, if the store lacks anything of it."""
        if entry.session.has_news:
            if entry.behind_since is None:
                entry.behind_since = self._loop.time()
            self._dirty[entry.session.session_id] = None
            self._work.set()

    def _lose(self, entry: _Entry, error: OutriderError) -> None:
        if entry.session.error is None:
            entry.session.supersede(error)
        self._dirty.pop(entry.session.session_id, None)
        entry.wake()

    async def _back_off(self, attempt: int) -> None:
        wait_ms = backoff(COMMIT_RETRY_MS_MIN, COMMIT_RETRY_MS_MAX, attempt, self._random)
        await asyncio.sleep(wait_ms / 1e3)

    async def _append_all(self) -> None:
        attempt = 0
        while True:
            await self._work.wait()
            # Lets the decode loop ask for its next round first: the target waits for that.
            await asyncio.sleep(0)
            if await self._append_some():
                attempt = 0
            else:
                await self._back_off(attempt)
                attempt += 1

    async def _append_some(self) -> bool:
        """Makes one call to the store. Returns whether it made progress."""
        batch = list(self._take_batch())
        if not batch:
            return True
        try:
            answers = await self._store.append([append for _, append in batch])
        except (StoreUnavailable, asyncio.CancelledError) as error:
            for entry, _ in batch:
                if self._current(entry):
                    self._want(entry)
            if isinstance(error, asyncio.CancelledError):
                raise
            return False
        except OutriderError as error:
            answers = [error] * len(batch)
        progress = [
            self._apply(entry, answer)
            for (entry, _), answer in zip(batch, answers, strict=True)
            if self._current(entry) and entry.session.error is None
        ]
        return any(progress) or not progress

    def _take_batch(self) -> Iterable[tuple[_Entry, Append]]:
        for session_id in list(islice(self._dirty, APPENDS_PER_CALL_MAX)):
            del self._dirty[session_id]
            entry = self._entries[session_id]
            append = entry.session.next_append()
            if append is not None:
                yield entry, append
        if not self._dirty:
            self._work.clear()

    def _apply(self, entry: _Entry, answer: int | OutriderError) -> bool:
        """Handles the store's answer to one append. Returns whether it made progress."""
        session, before = entry.session, entry.session.acknowledged_length
        try:
            if isinstance(answer, OutriderError):
                raise answer
            session.acknowledge(answer)
        except OutriderError as error:
            self._lose(entry, error)
            return True
        is_progress = session.acknowledged_length > before
        if is_progress:
            entry.behind_since = None
        self._want(entry)
        entry.wake()
        return is_progress

    async def _hold_lease(self) -> None:
        """Renews the lease of all sessions once per period, until they are handed over. If the
        store does not answer, the next call is made when due. If the lease lapses before that,
        epochs fence the sessions that others take over."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._leaving.is_set():
            try:
                wanted = await self._store.hold_lease(self._owner)
                if wanted:
                    self._on_wanted(wanted)
            except StoreUnavailable as error:
                _log.debug("the lease was not renewed: %r", error)
            except OutriderError:
                _log.exception("the lease was not renewed")
            due = max(due + SESSION_LEASE_RENEWAL_MS / 1000, loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._leaving.wait()
        await self._end_lease()

    async def _end_lease(self) -> None:
        try:
            await self._store.end_lease(self._owner)
        except OutriderError as error:
            _log.info("the lease is left to run out: %r", error)
