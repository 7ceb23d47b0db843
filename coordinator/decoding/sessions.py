"""Sessions from their opening to their end: created in a store that may not answer, run, given up,
and taken over from other coordinators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from coordinator.decoding.loop import COMMIT_GRACE_S, SessionRun
from coordinator.decoding.recovery import check_known, check_weights
from coordinator.requests.validation import GenerationParameters
from coordinator.routing.replica_pool import ReplicaPool
from outrider.backoff import backoff
from outrider.errors import (
    BadRequest,
    NotFound,
    OutriderError,
    StaleEpoch,
    StoreUnavailable,
    Unavailable,
)
from outrider.limits import (
    ABANDON_TRIES_MAX,
    CANCEL_WAIT_S,
    COMMIT_RETRY_MS_MAX,
    COMMIT_RETRY_MS_MIN,
    OPEN_TRIES_MAX,
    REPLAY_TOKENS_INLINE,
    TAKE_OVER_RETRY_MS,
    TAKE_OVERS_MAX,
    UNTOLD_SESSIONS_MAX,
)
from outrider.request import ResumeRequest
from outrider.sessions.state import Session
from outrider.sessions.store import (
    Finish,
    FinishReason,
    SessionRecord,
    SessionStore,
    contended,
    released,
)

_log = logging.getLogger(__name__)

LOGPROBS_BYTES = 32
"""Of one stored log-probability, about; it takes as long to read as a token."""

T = TypeVar("T")
Told = asyncio.Task[OutriderError | None]
"""Ends once the store has answered: with its refusal, or why it was given up; with None where the
call has succeeded."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """By which a request that is made again is known, of one of the texts that it asks for."""

    name: str
    """In the store."""
    digest: str
    """Of the request."""
    session_id: str = ""
    """The session that the request has; empty = none yet."""

    @property
    def value(self) -> str:
        """What the store keeps under the name."""
        return self.session_id and f"{self.session_id} {self.digest}"

    def found(self, value: str) -> RequestKey:
        """With what the store has. Raises `BadRequest` where that is of another request."""
        session_id, _, digest = value.partition(" ")
        if value and digest != self.digest:
            raise BadRequest(
                "Idempotency-Key",
                "has been given with another request; repeat that one, byte by byte, or give "
                "another key",
            )
        return replace(self, session_id=session_id)


class KeyTaken(OutriderError):
    """A key has another session than the one that was opened for it."""

    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"the request has session {key.session_id}")
        self.key = key


class OwnedSessions:
    """The sessions of one coordinator. They are opened, and run: each once, and none begins before
    the one before it is closed. Others are taken over, a bounded number at a time: when a
    coordinator dies, all of its clients ask the others at once, and each of their sessions is read
    and replayed. The store is told of those that run no more."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        targets: ReplicaPool,
        random_bits: Callable[[int], int],
        resume_grace_s: float,
    ) -> None:
        """`owner` is the coordinator's name in the store, `random_bits(n)` gives n fresh random
        bits. A session whose client is gone may be resumed for so many seconds before it counts as
        cancelled."""
        self._replays = ThreadPoolExecutor(1, "replay")
        self._store = store
        self.owner = owner
        self.targets = targets
        self.random_bits = random_bits
        self._resume_grace_s = resume_grace_s
        self._background: set[asyncio.Task[Any]] = set()
        self.running: dict[str, SessionRun] = {}
        """Each was opened just now, or there was room for it (`vacate`)."""
        self._ending: dict[str, asyncio.Task[bool]] = {}
        """What closes runs that are not among them any more."""
        self._telling: dict[str, Told] = {}
        """By session the newest call that tells the store of its release or end."""
        self._taking: list[str] = []
        """Sessions that are being taken over; one may be twice, for two clients."""
        self._unsettled: set[str] = set()
        """Sessions of which the store is asked for a take-over."""
        self._closing = asyncio.Event()
        self._lease_ends = False

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins work that nothing waits for before `end_background`."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def open(
        self, tenant: str, parameters: GenerationParameters, key: RequestKey | None = None
    ) -> Session:
        """A session that the store has, also under the `key`: raises `KeyTaken` where that has
        another one by now than it says. Each try opens another one: whether a store that did not
        answer has opened the one before is not known."""
        for tries_left in reversed(range(OPEN_TRIES_MAX)):
            new = SessionRecord.new(
                f"{self.random_bits(128):032x}", tenant, self.owner, parameters.seed,
                parameters.rule, parameters.to_json(), parameters.prompt,
            )  # fmt: skip
            opening = asyncio.create_task(self._store.open(new))
            try:
                await asyncio.shield(opening)
            except (asyncio.CancelledError, StoreUnavailable) as error:
                self.in_background(self._abandon(opening, new))
                if isinstance(error, asyncio.CancelledError) or not tries_left:
                    raise
                _log.info("a session could not be opened, %d tries left: %r", tries_left, error)
                await asyncio.sleep(COMMIT_RETRY_MS_MIN / 1e3)
            else:
                break
        if key is not None:
            claimed = replace(key, session_id=new.session_id).value
            try:
                found = await self._store.claim_key(key.name, claimed, key.value)
            except BaseException:
                self.wait_for_client(new)
                raise
            if found != claimed:
                self.give_up(new)
                raise KeyTaken(key.found(found))
        return Session(new)

    def unstored(
        self, tenant: str, parameters: GenerationParameters, token_ids: tuple[int, ...]
    ) -> Session:
        """A session of these tokens, which a target scores more of, and the store never has."""
        return Session(
            SessionRecord.new(
                f"{self.random_bits(128):032x}", tenant, self.owner, parameters.seed,
                parameters.rule, "", token_ids,
            )
        )  # fmt: skip

    def end(self, run: SessionRun, is_gone: bool = False) -> None:
        """The client has its last event, or an error, or is gone: frees what the session holds,
        unless it was handed over."""
        if self.running.get(run.session_id) is not run:
            return
        if is_gone and self._resume_grace_s > 0:
            self.wait_for_client(run.record, self._free(run, run.hand_over()))
        else:
            self._free(run, self._close(run))

    async def _close(self, run: SessionRun) -> bool:
        """A run whose end the store did not take is given up as one whose client is gone."""
        had_ended = await run.close()
        if run.is_unrecorded and not self._closing.is_set():
            self.wait_for_client(run.record)
        return had_ended

    async def vacate(self, record: SessionRecord) -> None:
        """Ends what runs here of a session that was taken over under a newer epoch. Raises
        `StaleEpoch` where another stream has done that meanwhile."""
        session_id = record.session_id
        while True:
            run = self.running.get(session_id)
            if run is not None:
                if run.session.epoch >= record.epoch:
                    raise StaleEpoch(f"session {session_id} was resumed by another stream")
                self._free(run, run.hand_over())
            ending = self._ending.get(session_id)
            if ending is None:
                return
            await asyncio.wait([ending])

    def _free(self, run: SessionRun, closing: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        session_id = run.session_id
        del self.running[session_id]
        ending = self._ending[session_id] = self.in_background(closing)
        ending.add_done_callback(lambda _: self._ending.pop(session_id, None))
        return ending

    def wait_for_client(
        self, record: SessionRecord, ending: asyncio.Task[bool] | None = None
    ) -> None:
        """Nothing is decoded for a client that is gone. It may come back, to any coordinator: the
        session is released from this one's lease. Else it counts as cancelled. Where this
        coordinator closes, that is left to others."""
        self.in_background(self._wait(record, ending))

    async def _wait(self, record: SessionRecord, ending: asyncio.Task[bool] | None) -> None:
        if ending is not None and await ending:
            return
        await self._release(record)
        try:
            async with asyncio.timeout(self._resume_grace_s):
                await self._closing.wait()
        except TimeoutError:
            await self.give_up(record, released(self.owner))

    @contextmanager
    def taking_over(self, session_id: str) -> Iterator[None]:
        """This session is being taken over, until it runs here or will not. Raises `Unavailable`
        where too many are."""
        if len(self._taking) >= TAKE_OVERS_MAX:
            raise Unavailable(
                f"this coordinator takes {TAKE_OVERS_MAX} sessions over already; try again",
                retry_after_ms=TAKE_OVER_RETRY_MS,
            )
        self._taking.append(session_id)
        try:
            yield
        finally:
            self._taking.remove(session_id)

    async def claim(
        self, record: SessionRecord, request: ResumeRequest
    ) -> tuple[SessionRecord, GenerationParameters]:
        """A session that this coordinator may go on with under a new epoch, or one that has
        finished. Raises what keeps it from being resumed (`check_known`, `check_weights`) before
        anything changes, or afterwards where its tokens have changed since `record` was read, and
        as `SessionStore.take_over`. A session that was, or may have been, taken over by then is
        released."""
        parameters = await self.replay(record, lambda: check_known(record, request))
        if record.finish_reason is not None:
            return record, parameters
        check_weights(record.session_id, parameters.weights, self.targets)
        found = await self._take_over(record)
        if (found.prefix_digest, len(found.token_ids)) != (
            record.prefix_digest,
            len(record.token_ids),
        ):
            try:
                parameters = await self.replay(found, lambda: check_known(found, request))
            except BaseException:
                self._release(found)
                raise
        return found, parameters

    async def replay(self, record: SessionRecord, call: Callable[[], T]) -> T:
        """What the call returns or raises, which reads a session's tokens. Of a long session it is
        made on a thread; one at a time, as they would only compete with the event loop."""
        size = len(record.token_ids) + len(record.logprobs) // LOGPROBS_BYTES
        if size <= REPLAY_TOKENS_INLINE:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._replays, call)

    async def cancel(self, record: SessionRecord) -> None:
        """Ends a session as cancelled that runs nowhere; a finished one is left as it is. Raises
        `Unavailable` for one that another coordinator has, which is told to end it, and where the
        store does not answer for `CANCEL_WAIT_S`: then, and where the caller is cancelled, it is
        still asked to record it."""
        if record.finish_reason is not None:
            return
        found = await self._take_over(record, cancels=True)
        if found.finish_reason is not None:
            return
        task = self.give_up(found)
        await asyncio.wait([task], timeout=CANCEL_WAIT_S)
        if not task.done() or task.cancelled():
            raise StoreUnavailable(
                f"session {found.session_id} is recorded as cancelled once the session store "
                "answers"
            )
        error = task.result()
        if error is not None:
            is_stale = isinstance(error, StaleEpoch)
            raise contended(found.session_id) if is_stale else error

    async def release_wanted(self, session_id: str) -> None:
        """Releases a session that another coordinator was asked for, if the store counts it as
        this one's and it does not run here: a failover has lost its release, and the lease keeps it
        from others. Where the store does not answer nothing is done: a session that is still wanted
        is named again."""
        if self._is_here(session_id) or self._closing.is_set():
            return
        try:
            record = await self._store.load(session_id)
        except OutriderError:
            return
        is_ours = record.owner == self.owner and record.finish_reason is None
        if is_ours and not self._is_here(session_id):
            self.wait_for_client(record)

    def close(self) -> None:
        """Cancels what runs. A replay on its thread is not waited for."""
        self._replays.shutdown(wait=False, cancel_futures=True)
        self._closing.set()
        for run in self.running.values():
            run.cancel()

    async def end_background(self) -> None:
        """Waits for what was begun, for `COMMIT_GRACE_S`; then no call of the store is repeated any
        more: the coordinator's lease is about to end."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=COMMIT_GRACE_S)
            for task in late:
                task.cancel()
        self._lease_ends = True

    async def _take_over(self, seen: SessionRecord, *, cancels: bool = False) -> SessionRecord:
        """See `SessionStore.take_over`. Where it is not known whether the session was taken over,
        it is released: else it would belong to this coordinator, which does not run it, for as long
        as that holds its lease. A take-over waits for the release, or end, that is on its way: it
        may be given the same epoch, and the release would end it. Raises `Unavailable`
        meanwhile."""
        session_id = seen.session_id
        if self._is_unsettled(session_id):
            raise contended(session_id)
        self._unsettled.add(session_id)
        sent = asyncio.Event()
        try:
            return await self._store.take_over(seen, self.owner, sent.set, cancels)
        except BaseException as error:
            is_refused = isinstance(error, NotFound | Unavailable) and not isinstance(
                error, StoreUnavailable
            )
            if sent.is_set() and not is_refused:
                self._release(replace(seen, epoch=seen.epoch + 1))
            raise
        finally:
            self._unsettled.discard(session_id)

    def _is_here(self, session_id: str) -> bool:
        """Whether the session runs here, or soon will, or is being closed, or the store is told of
        its end."""
        places = (self.running, self._ending, self._taking)
        return self._is_unsettled(session_id) or any(session_id in place for place in places)

    def _is_unsettled(self, session_id: str) -> bool:
        return session_id in self._unsettled or session_id in self._telling

    async def told(self, session_id: str) -> None:
        """Waits until the store has been told of the session's release or end, but no longer than
        `TAKE_OVER_RETRY_MS`. Under an epoch that the store has lost, and gives once more, that
        would hit the session that runs then."""
        if session_id in self._telling:
            await asyncio.wait([self._telling[session_id]], timeout=TAKE_OVER_RETRY_MS / 1e3)

    def _release(self, record: SessionRecord) -> Told:
        """Lets any coordinator take a session over that runs nowhere now."""
        session_id, epoch = record.session_id, record.epoch
        return self._tell(session_id, lambda: self._store.release(session_id, epoch, self.owner))

    def give_up(self, record: SessionRecord, owner: str = "") -> Told:
        """Records a session that runs nowhere as cancelled, unless another stream goes on with
        it. `owner` is whom the store has it under, by default this coordinator."""
        end = Finish(
            record.session_id, record.epoch, owner or self.owner, None, FinishReason.CANCELLED,
            record.counters,
        )  # fmt: skip
        return self._tell(record.session_id, lambda: self._store.finish(end))

    async def _abandon(self, opening: asyncio.Task[None], new: SessionRecord) -> None:
        """Records a session as cancelled that nobody wants, once its opening has ended."""
        await asyncio.wait([opening])
        await self.give_up(new)

    def _tell(self, session_id: str, call: Callable[[], Awaitable[object]]) -> Told:
        """Calls the store behind what it is being told of the session already."""
        before = self._telling.get(session_id)
        task = self._telling[session_id] = self.in_background(
            self._insist(session_id, call, before)
        )

        def told(task: Told) -> None:
            if self._telling.get(session_id) is task:
                del self._telling[session_id]

        task.add_done_callback(told)
        return task

    async def _insist(
        self,
        session_id: str,
        call: Callable[[], Awaitable[object]],
        before: asyncio.Task[Any] | None,
    ) -> OutriderError | None:
        """Calls the store until it has answered, for as long as this coordinator lives: a session
        that it owned but does not run would be kept from others by its lease. Gives up after
        `ABANDON_TRIES_MAX` calls where it insists for more than `UNTOLD_SESSIONS_MAX` sessions."""
        if before is not None:
            await asyncio.wait([before])
        attempt = 0
        while True:
            try:
                await call()
            except StoreUnavailable as error:
                is_full = len(self._telling) > UNTOLD_SESSIONS_MAX
                if self._lease_ends or (is_full and attempt + 1 >= ABANDON_TRIES_MAX):
                    _log.warning("the store was not told of session %s: %r", session_id, error)
                    return error
            except OutriderError as error:
                return error
            else:
                return None
            wait_ms = backoff(COMMIT_RETRY_MS_MIN, COMMIT_RETRY_MS_MAX, attempt, self.random)
            attempt += 1
            await asyncio.sleep(wait_ms / 1e3)

    def random(self) -> float:
        """In [0, 1)."""
        return self.random_bits(53) / 2**53
