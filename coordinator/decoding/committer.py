"""Commits: decided tokens go to the store in batches, and only then may be shown.

While one call of the store is under way, the outcomes of all sessions gather for the next, so the
number of calls does not grow with the number of sessions. A store that does not answer stops
only sessions that have reached the bound of uncommitted tokens: it is tried again and again,
and what it missed is sent in one append per session.

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
        """For a change of what the store has of the session."""
        self.behind_since: float | None = None
        """When the store last took tokens, or these were decided; None while it lacks none."""
        self.stirred = False

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()


class Committer:
    """Commits the sessions of one coordinator. For one event loop, where `run` is running."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        random: Callable[[], float],
        on_wanted: Callable[[Mapping[str, bool]], None] = lambda _: None,
    ) -> None:
        """`owner` is this coordinator's name in the store; `random` gives numbers in [0, 1);
        `on_wanted` is told of sessions as `SessionStore.hold_lease` returns them."""
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._owner = owner
        self._random = random
        self._on_wanted = on_wanted
        self._entries: dict[str, _Entry] = {}
        self._dirty: dict[str, None] = {}
        """Ids of sessions with something to append, the longest waiting first."""
        self._work = asyncio.Event()
        self._leaving = asyncio.Event()
        """The lease is to end."""
        self._closing = asyncio.Event()

    @property
    def closing(self) -> bool:
        """Whether no more sessions are taken: after `close`, and after a bug has ended `run`."""
        return self._closing.is_set()

    def add(self, session: Session) -> None:
        """From now on the session's tokens are committed."""
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
        """The session has decided tokens. Costs O(1); does nothing after `close`."""
        if not self.closing:
            self._want(self._entry(session))

    def remove(self, session: Session) -> None:
        """Forgets the session; who waits for it gets `Unavailable`. Removing it again changes
        nothing."""
        entry = self._entries.get(session.session_id)
        if entry is not None and entry.session is session:
            del self._entries[session.session_id]
            self._dirty.pop(session.session_id, None)
            entry.wake()

    async def shown(self, session: Session, length: int) -> int:
        """Waits until the first `length` tokens may be shown, or until `stir`; returns how many may
        be. Raises the session's error if it is lost before."""
        entry = self._entry(session)
        while session.showable_length < length and not entry.stirred:
            await self._change(entry)
        entry.stirred = False
        return session.showable_length

    def stir(self, session: Session) -> None:
        """Ends the wait for what may be shown, or the next one: something else is there to tell.
        Does nothing for a session that was removed."""
        entry = self._entries.get(session.session_id)
        if entry is not None and entry.session is session:
            entry.stirred = True
            entry.wake()

    async def room(self, session: Session, num_tokens: int = 1) -> None:
        """Waits until `num_tokens` more may be decided: until with them at most
        `UNCOMMITTED_TOKENS_MAX` are uncommitted, and the store has not stood still for longer than
        `UNCOMMITTED_MS_MAX`. There is always room if all tokens are committed. Raises the session's
        error if it is lost."""
        entry = self._entry(session)
        self._check_served(entry)
        while entry.behind_since is not None and (
            session.num_uncommitted + num_tokens > UNCOMMITTED_TOKENS_MAX
            or self._loop.time() - entry.behind_since > UNCOMMITTED_MS_MAX / 1000
        ):
            await self._change(entry)
            self._check_served(entry)

    async def finish(self, session: Session, reason: FinishReason) -> None:
        """Decides no more tokens, and returns when the store has all of them and the reason.
        Raises the session's error if it is lost before. May be cancelled and called again; the
        first reason stands."""
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
        """Commits, and holds the owner's lease, until `close`; then tries once more to commit what
        is uncommitted. Whoever still waits for a session gets `Unavailable`; the sessions stay in
        the store for another owner. Raises, as a group, only what is a bug."""
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
        """This coordinator is about to close. Its sessions go on, but a client that asks another
        one for its session gets it there at once."""
        self._leaving.set()

    def close(self) -> None:
        """Ends `run`."""
        self._closing.set()

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless whatever the store lacks is waiting to be sent. To be
        called while no call of the store is under way."""
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
        """Has the session in one of the next calls, if the store lacks anything of it."""
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
            # A round that has been decided asks for the next one first: the target waits for that.
            await asyncio.sleep(0)
            if await self._append_some():
                attempt = 0
            else:
                await self._back_off(attempt)
                attempt += 1

    async def _append_some(self) -> bool:
        """One call of the store; returns whether it was of any use."""
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
        """What the store said of one append; returns whether it was of any use."""
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
        """One call per period, however many sessions there are, until the sessions are handed
        over. A store that does not answer is asked again with the next one: what others take
        under a lease that has lapsed meanwhile is fenced by its epoch."""
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
