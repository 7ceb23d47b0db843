"""Commits decided tokens to the session store. Clients see only committed tokens.

While a call to the store runs, the committer collects the outcomes of all sessions for the next
call. If a call fails, the next call repeats its tokens and adds the tokens decided meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice

from outrider import limits
from outrider.errors import OutriderError, StoreUnavailable, Unavailable, check
from outrider.foundation.backoff import backoff
from outrider.sessions.state import Session
from outrider.sessions.store import Append, FinishReason, SessionStore

_log = logging.getLogger(__name__)


async def back_off(attempt: int, random: Callable[[], float]) -> None:
    """Waits before retry number `attempt` of a failed call to the store."""
    wait_ms = backoff(limits.COMMIT_RETRY_MS_MIN, limits.COMMIT_RETRY_MS_MAX, attempt, random)
    await asyncio.sleep(wait_ms / 1e3)


class SessionCommits:
    """Commits the tokens of one session. If the store has refused the session, the async methods
    raise `Session.error`. If the session was removed, they raise `Unavailable`."""

    def __init__(self, committer: "Committer", session: Session) -> None:
        self.session = session
        self._committer = committer
        self._clock = asyncio.get_running_loop().time
        self._changed = asyncio.Event()
        self._behind_since: float | None = None
        """The later of two times: when the first uncommitted token was decided, and when the store
        last took tokens. None if all tokens are committed."""

    @property
    def is_current(self) -> bool:
        """False after `remove`."""
        return self._committer.sessions.get(self.session.session_id) is self

    def notify(self) -> None:
        """Queues the uncommitted tokens. Must be called after `Session.decide`."""
        if self.session.has_news and self.is_current:
            if self._behind_since is None:
                self._behind_since = self._clock()
            self._committer.dirty[self.session.session_id] = None
            self._committer.has_work.set()

    def remove(self) -> None:
        """Removes the session from the committer. Idempotent."""
        if self.is_current:
            del self._committer.sessions[self.session.session_id]
            self._committer.dirty.pop(self.session.session_id, None)
            self.wake()

    async def room(self, num_tokens: int = 1) -> None:
        """Waits while `num_tokens` more tokens would raise the number of uncommitted tokens above
        `UNCOMMITTED_TOKENS_MAX`, or while the store has taken no token for `UNCOMMITTED_MS_MAX`."""
        self._check_served()
        while not self.has_room(num_tokens):
            await self.change()
            self._check_served()

    def has_room(self, num_tokens: int) -> bool:
        """Whether `room` would return at once."""
        if self.session.num_uncommitted + num_tokens > limits.UNCOMMITTED_TOKENS_MAX:
            return False
        behind_since = self._behind_since
        most_s = limits.UNCOMMITTED_MS_MAX / 1000
        return behind_since is None or self._clock() - behind_since <= most_s

    async def finish(self, reason: FinishReason) -> None:
        """Ends the session. Returns when the store has all tokens and the finish reason."""
        session, attempt = self.session, 0
        self._check_served()
        if session.finish_reason is None:
            session.finish(reason)
        self.notify()
        while True:
            while session.num_uncommitted > 0:
                await self.change()
                self._check_served()
            answer: int | OutriderError
            try:
                answer = await self._committer.store.finish(session.ending())
            except StoreUnavailable:
                await back_off(attempt, self._committer.random)
                attempt += 1
                self._check_served()
                continue
            except OutriderError as error:
                answer = error
            self._check_served()
            self.apply(answer)
            self._check_served()
            if session.num_uncommitted == 0:
                return

    def apply(self, answer: int | OutriderError) -> bool:
        """Handles the store's answer: the stored length, or an error. Returns whether the store
        took tokens or an error has ended the session."""
        session, before = self.session, self.session.acknowledged_length
        try:
            if isinstance(answer, OutriderError):
                raise answer
            session.acknowledge(answer)
        except OutriderError as error:
            session.supersede(error)
            self._committer.dirty.pop(session.session_id, None)
        is_progress = session.error is not None or session.acknowledged_length > before
        if is_progress:
            self._behind_since = None
        self.notify()
        self.wake()
        return is_progress

    def _check_served(self) -> None:
        if self.session.error is not None:
            raise self.session.error
        if not self.is_current:
            raise Unavailable(f"session {self.session.session_id} is not served here any more")

    async def change(self) -> None:
        """Waits for the next `wake`, for example after the store's next answer."""
        self._check_served()
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()
        self._changed.clear()


class Committer:
    """Commits the tokens of one coordinator's sessions, as long as `run` runs. Not thread-safe."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        random: Callable[[], float],
        on_wanted: Callable[[Mapping[str, bool]], None] = lambda _: None,
    ) -> None:
        """`owner` is this coordinator's name in the store. `random` returns numbers in [0, 1).
        `on_wanted` gets the sessions that others want to take over (`SessionStore.hold_lease`)."""
        self.store = store
        self._owner = owner
        self.random = random
        self._on_wanted = on_wanted
        self.sessions: dict[str, SessionCommits] = {}
        self.dirty: dict[str, None] = {}
        """Ids of the sessions with tokens to append, as a queue."""
        self.has_work = asyncio.Event()
        self._leaving = asyncio.Event()
        self._closing = asyncio.Event()
        self._is_store_away = False
        """Whether the last call that appends tokens has got no answer."""

    @property
    def closing(self) -> bool:
        """Whether `close` was called or a bug has ended `run`. `add` then refuses sessions."""
        return self._closing.is_set()

    def add(self, session: Session) -> SessionCommits:
        """Starts committing the tokens of a session. Raises `Unavailable` after `close`."""
        if self.closing:
            raise Unavailable("this coordinator is shutting down")
        check(session.session_id not in self.sessions, f"{session.session_id} was added twice")
        commits = self.sessions[session.session_id] = SessionCommits(self, session)
        commits.notify()
        return commits

    @property
    def leaving(self) -> bool:
        return self._leaving.is_set()

    async def run(self) -> None:
        """Commits tokens and renews this coordinator's lease until `close` is called. Then appends
        the remaining tokens as long as the store answers, ends the lease, and removes all sessions.
        Raises an exception group if a bug ends the commits."""
        try:
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(self._append_all()),
                    tasks.create_task(self._hold_lease()),
                    tasks.create_task(self._renew_all()),
                ]
                await self._closing.wait()
                for task in work:
                    task.cancel()
            while self.dirty and await self._append_some():
                pass
            await self._end_lease()
        finally:
            self._closing.set()
            for commits in list(self.sessions.values()):
                commits.remove()

    def hand_over(self) -> None:
        """Ends this coordinator's lease. The sessions run here until taken over."""
        self._leaving.set()

    def close(self) -> None:
        """Ends `run`."""
        self._closing.set()

    def check_integrity(self) -> None:
        """Raises `InvariantError` if the queue is not the set of sessions with tokens to append.
        Must not be called while a call to the store runs."""
        for session_id, commits in self.sessions.items():
            session = commits.session
            session.check_integrity()
            is_queued = session_id in self.dirty
            check(session.has_news == is_queued, f"{session_id}: {session.has_news=}, {is_queued=}")
        removed = self.dirty.keys() - self.sessions.keys()
        check(not removed, f"removed sessions are still queued: {removed}")

    async def _append_all(self) -> None:
        attempt = 0
        while True:
            await self.has_work.wait()
            # Lets decode loops send their next rounds first, because the target waits for rounds.
            await asyncio.sleep(0)
            if await self._append_some():
                attempt = 0
            else:
                await back_off(attempt, self.random)
                attempt += 1

    async def _append_some(self) -> bool:
        """Appends the tokens of up to `APPENDS_PER_CALL_MAX` queued sessions. Returns False if the
        store did not answer, or if it took no tokens and refused no session."""
        batch: list[tuple[SessionCommits, Append]] = []
        for session_id in list(islice(self.dirty, limits.APPENDS_PER_CALL_MAX)):
            del self.dirty[session_id]
            commits = self.sessions[session_id]
            append = commits.session.next_append()
            if append is not None:
                batch.append((commits, append))
        if not self.dirty:
            self.has_work.clear()
        if not batch:
            return True
        try:
            answers = await self.store.append([append for _, append in batch])
        except (StoreUnavailable, asyncio.CancelledError) as error:
            for commits, _ in batch:
                commits.notify()
            if isinstance(error, asyncio.CancelledError):
                raise
            if not self._is_store_away:
                _log.warning("no tokens are committed for now: %s", error)
            self._is_store_away = True
            return False
        except OutriderError as error:
            answers = [error] * len(batch)
        if self._is_store_away:
            _log.warning("tokens are committed again")
            self._is_store_away = False
        progress = [
            commits.apply(answer)
            for (commits, _), answer in zip(batch, answers, strict=True)
            if commits.is_current and commits.session.error is None
        ]
        return any(progress) or not progress

    async def _hold_lease(self) -> None:
        """Renews this coordinator's lease every `SESSION_LEASE_RENEWAL_MS`, and ends it after
        `hand_over`. If the store does not answer, the lease may run out, and other coordinators may
        take sessions over. The store then refuses this coordinator's appends as stale."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._leaving.is_set():
            try:
                wanted = await self.store.hold_lease(self._owner)
                if wanted:
                    self._on_wanted(wanted)
            except StoreUnavailable as error:
                _log.debug("the lease was not renewed: %r", error)
            except OutriderError:
                _log.exception("the lease was not renewed")
            due = max(due + limits.SESSION_LEASE_RENEWAL_MS / 1000, loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._leaving.wait()
        await self._end_lease()

    async def _renew_all(self) -> None:
        """Keeps sessions alive that wait for a target or a replica for a long time. If the store
        does not answer, `SESSION_RESERVE_S` leaves time for further tries."""
        while True:
            await asyncio.sleep(limits.SESSION_RENEWAL_S)
            try:
                await self.store.renew(
                    [commits.session.record for commits in self.sessions.values()]
                )
            except OutriderError as error:
                _log.info("the time to live of sessions was not renewed: %r", error)

    async def _end_lease(self) -> None:
        try:
            await self.store.end_lease(self._owner)
        except OutriderError as error:
            _log.info("the lease was not ended, and will run out: %r", error)
