"""Sessions that this coordinator takes over, from others and from itself."""

from __future__ import annotations

import logging

from coordinator.requests.validation import GenerationParameters
from coordinator.routing.replica_pool import ReplicaPool
from outrider.errors import (
    NotFound,
    OutriderError,
    StaleEpoch,
    StoreUnavailable,
    Unavailable,
)
from outrider.limits import TAKE_OVER_RETRY_MS, TAKE_OVERS_MAX
from outrider.messages import VerifyAnswer, VerifyItem
from outrider.request import ResumeRequest
from outrider.sessions.store import SessionRecord, SessionState, SessionStore, contended

from .recovery import Replays, check_weights
from .running_sessions import Runs
from .session_creation import SessionCreator

_log = logging.getLogger(__name__)


class Place:
    """One of the take-overs that run at a time."""

    def __init__(self, session_id: str, taken: set[Place]) -> None:
        self.session_id = session_id
        self._taken = taken
        taken.add(self)

    def leave(self) -> None:
        """The session runs here now, or will not. Leaving again changes nothing."""
        self._taken.discard(self)


class TakeOvers:
    """Takes sessions over, a bounded number at a time: when a coordinator dies, all of its clients
    ask the others at once, and each of their sessions is read and replayed."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        opener: SessionCreator,
        runs: Runs,
        targets: ReplicaPool[VerifyItem, VerifyAnswer],
        replays: Replays,
    ) -> None:
        """`owner` is this coordinator's name in the store."""
        self._store = store
        self._owner = owner
        self._opener = opener
        self._runs = runs
        self._targets = targets
        self._replays = replays
        self._taken: set[Place] = set()
        self._unsettled: set[str] = set()
        """Sessions of which the store is asked for a take-over."""

    def enter(self, session_id: str) -> Place:
        """A place to take this session over. Raises `Unavailable` where there is none."""
        if len(self._taken) >= TAKE_OVERS_MAX:
            raise Unavailable(
                f"this coordinator takes {TAKE_OVERS_MAX} sessions over already; try again",
                retry_after_ms=TAKE_OVER_RETRY_MS,
            )
        return Place(session_id, self._taken)

    async def claim(
        self, record: SessionRecord, request: ResumeRequest
    ) -> tuple[SessionRecord, GenerationParameters]:
        """A session that this coordinator may go on with under a new epoch, or one that has
        finished. Raises what keeps it from being resumed (`Replays.check`, `check_weights`) before
        anything changes, or afterwards where its tokens have changed since `record` was read, and
        as `SessionStore.take_over`. A session that was, or may have been, taken over by then is
        released."""
        parameters = await self._replays.check(record, request)
        if record.finish_reason is not None:
            return record, parameters
        check_weights(record.session_id, parameters.weights, self._targets)
        found = await self._take_over(record)
        if (found.prefix_digest, len(found.token_ids)) != (
            record.prefix_digest,
            len(record.token_ids),
        ):
            try:
                parameters = await self._replays.check(found, request)
            except BaseException:
                self._opener.release(found.session_id, found.epoch)
                raise
        return found, parameters

    async def cancel(self, record: SessionRecord) -> None:
        """Ends a session as cancelled that runs nowhere; a finished one is left as it is. Raises
        `Unavailable` for one that another coordinator has, and where the store does not answer."""
        if record.finish_reason is not None:
            return
        found = await self._take_over(record)
        if found.finish_reason is None:
            try:
                await self._opener.cancel_now(found.session_id, found.epoch, found.counters)
            except StaleEpoch:
                raise contended(found.session_id) from None

    async def release_wanted(self, session_id: str) -> None:
        """Releases a session that another coordinator was asked for, if the store counts it as
        this one's and it does not run here: a failover has lost its release, and the lease keeps it
        from others. Where the store does not answer nothing is done: a session that is still wanted
        is named again."""
        if self._is_here(session_id) or self._runs.is_closing:
            return
        try:
            record = await self._store.load(session_id)
        except OutriderError as error:
            _log.debug("wanted session %s was not read: %r", session_id, error)
            return
        is_ours = record.owner == self._owner and record.state is SessionState.RUNNING
        if is_ours and not self._is_here(session_id):
            self._runs.wait_for_client(session_id, record.epoch, record.counters)

    def _is_here(self, session_id: str) -> bool:
        """Whether the session runs here, or soon will, or the store is told of its end."""
        return (
            self._runs.has(session_id)
            or self._is_unsettled(session_id)
            or any(place.session_id == session_id for place in self._taken)
        )

    def _is_unsettled(self, session_id: str) -> bool:
        return session_id in self._unsettled or self._opener.is_telling(session_id)

    async def _take_over(self, seen: SessionRecord) -> SessionRecord:
        """See `SessionStore.take_over`. Where it is not known whether the session was taken over,
        it is released: else it would belong to this coordinator, which does not run it, for as long
        as that holds its lease. A take-over waits for the release, or end, that is on its way: it
        may be given the same epoch, and the release would end it. Raises `Unavailable`
        meanwhile."""
        session_id = seen.session_id
        if self._is_unsettled(session_id):
            raise contended(session_id)
        self._unsettled.add(session_id)
        is_sent = False

        def note() -> None:
            nonlocal is_sent
            is_sent = True

        try:
            return await self._store.take_over(seen, self._owner, note)
        except BaseException as error:
            is_refused = isinstance(error, NotFound | Unavailable) and not isinstance(
                error, StoreUnavailable
            )
            if is_sent and not is_refused:
                self._opener.release(session_id, seen.epoch + 1)
            raise
        finally:
            self._unsettled.discard(session_id)
