"""A coordinator's sessions from opening to end, and their take-over from other coordinators. The
store may be silent at each step."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from coordinator.decoding.loop import COMMIT_GRACE_S, SessionRun
from coordinator.decoding.resumption import check_known
from coordinator.requests.validation import GenerationParameters
from coordinator.routing.replica_pool import ReplicaPool, SessionContext
from coordinator.routing.target_client import TargetClient
from outrider import limits
from outrider.backoff import backoff
from outrider.config import CoordinatorConfig
from outrider.errors import (
    BadRequest,
    Incompatible,
    NotFound,
    OutriderError,
    StaleEpoch,
    StoreUnavailable,
    Unavailable,
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
"""Size of a stored log-probability, which takes as long to read as a token."""

T = TypeVar("T")
Told = asyncio.Task[OutriderError | None]
"""A call to the store that is repeated until it is answered. Returns the refusal, the error with
which it was given up, or None."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Idempotency key of one of the texts that a request asks for."""

    name: str
    """Its name in the store."""
    digest: str
    session_id: str = ""
    """The session of the request; empty = none yet."""

    @property
    def value(self) -> str:
        """What the store keeps under `name`."""
        return self.session_id and f"{self.session_id} {self.digest}"

    def found(self, value: str) -> Self:
        """The key with the session that the store has. Raises `BadRequest` if that session belongs
        to another request."""
        session_id, _, digest = value.partition(" ")
        if value and digest != self.digest:
            raise BadRequest(
                "Idempotency-Key",
                "was used with a different request; repeat that one, byte by byte, or use another "
                "key",
            )
        return replace(self, session_id=session_id)


class KeyTaken(OutriderError):
    """Another session was stored under the key before the one just opened."""

    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"the request has session {key.session_id}")
        self.key = key


class OwnedSessions:
    """The sessions of one coordinator. A session runs here at most once at a time. Take-overs are
    bounded: when a coordinator dies, all of its clients turn to the others at once. For each
    session that stops running here, the store gets a release or an end."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        targets: ReplicaPool,
        random_bits: Callable[[int], int],
        config: CoordinatorConfig,
    ) -> None:
        """`owner` is the coordinator's name in the store; `random_bits(n)` gives n random bits."""
        self._replays = ThreadPoolExecutor(1, "replay")
        self._store = store
        self.owner = owner
        self.targets = targets
        self.random_bits = random_bits
        self._config = config
        self._background: set[asyncio.Task[Any]] = set()
        self.running: dict[str, SessionRun] = {}
        """Before a session is added, an earlier run of it must have ended (`vacate`)."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._telling: dict[str, Told] = {}
        """By session, the newest call that reports its release or end."""
        self._taking: list[str] = []
        """Sessions that are being taken over; twice in here if two clients ask for one."""
        self._unsettled: set[str] = set()
        """Sessions with a take-over call to the store under way."""
        self.scored_ids: set[str] = set()
        """Ids of the sessions of `scoring`."""
        self._closing = asyncio.Event()
        self._lease_ends = False

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task; `end_background` waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def open(
        self, tenant: str, parameters: GenerationParameters, key: RequestKey | None = None
    ) -> Session:
        """Creates a session in the store, and stores it under the `key`. Raises `KeyTaken` if the
        key has another session. Each attempt uses a new session id, as a silent store may have
        created the session of the last one."""
        for tries_left in reversed(range(limits.OPEN_TRIES_MAX)):
            new = self._record(tenant, parameters, parameters.to_json(), parameters.prompt)
            opening = asyncio.create_task(self._store.open(new))
            try:
                await asyncio.shield(opening)
            except (asyncio.CancelledError, StoreUnavailable) as error:
                self.in_background(self._abandon(opening, new))
                if isinstance(error, asyncio.CancelledError) or not tries_left:
                    raise
                _log.info("a session could not be opened, %d tries left: %r", tries_left, error)
                await asyncio.sleep(limits.COMMIT_RETRY_MS_MIN / 1e3)
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

    @contextmanager
    def scoring(
        self, tenant: str, parameters: GenerationParameters, token_ids: tuple[int, ...],
        deadline: float, audits: bool = False,
    ) -> Iterator[TargetClient]:  # fmt: skip
        """A target that scores more tokens (`TargetClient.judge`) after `token_ids`, in a session
        that is never stored."""
        session = Session(self._record(tenant, parameters, "", token_ids))
        context = SessionContext(session, parameters, deadline)
        target = TargetClient(self.targets, context, self._config, audits)
        self.scored_ids.add(session.session_id)
        try:
            yield target
        finally:
            target.close()
            self.scored_ids.discard(session.session_id)

    def _record(
        self, tenant: str, parameters: GenerationParameters, stored: str, token_ids: tuple[int, ...]
    ) -> SessionRecord:
        return SessionRecord.new(
            f"{self.random_bits(128):032x}", tenant, self.owner, parameters.seed, parameters.rule,
            stored, token_ids,
        )  # fmt: skip

    def end(self, run: SessionRun, *, resumable: bool, is_gone: bool = False) -> None:
        """Ends a run, unless it has ended. `is_gone`: the client left and may come back, so the
        session waits for the client. A `resumable` session also waits if the store does not take
        its end."""
        if self.running.get(run.session_id) is run:
            is_gone = is_gone and self._config.resume_grace_ms > 0
            self._free(run, self._close(run, resumable, is_gone))

    async def _close(self, run: SessionRun, resumable: bool, is_gone: bool) -> None:
        await (run.hand_over() if is_gone else run.close())
        if run.is_recorded:
            return
        if is_gone:
            self.wait_for_client(run.record)
        elif run.session.error is None and not self._closing.is_set():
            # The store did not take the end, and no other owner took the session over.
            if resumable:
                self.wait_for_client(run.record)
            else:
                self.give_up(run.record)

    async def vacate(self, record: SessionRecord) -> None:
        """Ends this coordinator's own run of a session that was taken over under a newer epoch.
        Raises `StaleEpoch` if another stream has resumed it since."""
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

    def _free(self, run: SessionRun, closing: Coroutine[Any, Any, None]) -> None:
        session_id = run.session_id
        del self.running[session_id]
        ending = self._ending[session_id] = self.in_background(closing)
        ending.add_done_callback(lambda _: self._ending.pop(session_id, None))

    def wait_for_client(self, record: SessionRecord) -> None:
        """Releases a session whose client is gone, so that it may be resumed anywhere, and records
        it as cancelled after the grace period. If this coordinator closes first, the others have
        to."""
        self.in_background(self._wait(record))

    async def _wait(self, record: SessionRecord) -> None:
        await self._release(record)
        try:
            async with asyncio.timeout(self._config.resume_grace_ms / 1e3):
                await self._closing.wait()
        except TimeoutError:
            await self.give_up(record, released(self.owner))

    @contextmanager
    def taking_over(self, session_id: str) -> Iterator[None]:
        """Counts a session as being taken over. Raises `Unavailable` if too many are."""
        if len(self._taking) >= limits.TAKE_OVERS_MAX:
            raise Unavailable(
                f"this coordinator is taking over {limits.TAKE_OVERS_MAX} sessions already; "
                "try again",
                retry_after_ms=limits.TAKE_OVER_RETRY_MS,
            )
        self._taking.append(session_id)
        try:
            yield
        finally:
            self._taking.remove(session_id)

    async def claim(
        self, record: SessionRecord, request: ResumeRequest
    ) -> tuple[SessionRecord, GenerationParameters]:
        """Takes a session over, unless it is finished. Returns the record under its new epoch, and
        the parameters. Raises like `SessionStore.take_over` and `check_known`, and `Incompatible`
        if no target has its weights. The checks come first. If the tokens changed after `record`
        was read, `check_known` runs again; if it fails, the session is released."""
        parameters = await self.replay(record, lambda: check_known(record, request))
        if record.finish_reason is not None:
            return record, parameters
        if self.targets.newest(parameters.weights) is None:
            if not self.targets.replicas:
                raise Unavailable("no target is known")
            raise Incompatible(
                f"session_id: {record.session_id} was decoded by a target with other weights "
                f"({parameters.weights}) than any here"
            )
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
        """Makes a call that reads all tokens of a session. For a long session it runs on a thread,
        one call at a time."""
        size = len(record.token_ids) + len(record.logprobs) // LOGPROBS_BYTES
        if size <= limits.REPLAY_TOKENS_INLINE:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._replays, call)

    async def cancel(self, record: SessionRecord) -> None:
        """Records a session that runs nowhere as cancelled; does nothing if it is finished. Raises
        `Unavailable` if another coordinator owns it, which is then told, or if the store does not
        answer within `CANCEL_WAIT_S`. In this case, or if the caller is cancelled, the call to the
        store is repeated in the background."""
        if record.finish_reason is not None:
            return
        found = await self._take_over(record, cancels=True)
        if found.finish_reason is not None:
            return
        task = self.give_up(found)
        await asyncio.wait([task], timeout=limits.CANCEL_WAIT_S)
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
        """Releases a session that another coordinator wants, if the store lists it as this one's
        but it does not run here: a failover of the store has lost its release. If the store does
        not answer now, a later renewal of the lease reports the session again."""
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
        """Cancels all runs. Does not wait for a replay on its thread."""
        self._replays.shutdown(wait=False, cancel_futures=True)
        self._closing.set()
        for run in self.running.values():
            run.cancel()

    async def end_background(self) -> None:
        """Waits up to `COMMIT_GRACE_S` for the background tasks. After that no call to the store is
        repeated, as the lease is about to end."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=COMMIT_GRACE_S)
            for task in late:
                task.cancel()
        self._lease_ends = True

    async def _take_over(self, seen: SessionRecord, *, cancels: bool = False) -> SessionRecord:
        """Calls `SessionStore.take_over`. If the outcome is not known, releases the session, which
        may belong to this coordinator without running here. Raises `Unavailable` while a release or
        end of the session is under way: that call may carry the epoch of the take-over, and so end
        the new run."""
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
        """Whether the session runs, begins or ends here, or has a call to the store under way."""
        places = (self.running, self._ending, self._taking)
        return self._is_unsettled(session_id) or any(session_id in place for place in places)

    def _is_unsettled(self, session_id: str) -> bool:
        return session_id in self._unsettled or session_id in self._telling

    async def told(self, session_id: str) -> None:
        """Waits, at most `TAKE_OVER_RETRY_MS`, until a release or end of the session that is under
        way has reached the store. If the store has lost the session's epoch and given it a second
        time, a release that arrives late would end a new run."""
        if session_id in self._telling:
            await asyncio.wait([self._telling[session_id]], timeout=limits.TAKE_OVER_RETRY_MS / 1e3)

    def _release(self, record: SessionRecord) -> Told:
        """Releases a session that does not run here, so that any coordinator may take it over."""
        session_id, epoch = record.session_id, record.epoch
        return self._tell(session_id, lambda: self._store.release(session_id, epoch, self.owner))

    def give_up(self, record: SessionRecord, owner: str = "") -> Told:
        """Records a session that does not run as cancelled, unless it was taken over. `owner` is
        the owner that the store lists, by default this coordinator."""
        end = Finish(
            record.session_id, record.epoch, owner or self.owner, None, FinishReason.CANCELLED,
            record.counters,
        )  # fmt: skip
        return self._tell(record.session_id, lambda: self._store.finish(end))

    async def _abandon(self, opening: asyncio.Task[None], new: SessionRecord) -> None:
        """Waits for a session to be opened, and records it as cancelled."""
        await asyncio.wait([opening])
        await self.give_up(new)

    def _tell(self, session_id: str, call: Callable[[], Awaitable[object]]) -> Told:
        """Calls the store, after earlier calls about the session have ended."""
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
        """Repeats a call to the store until it answers or this coordinator's lease, which keeps
        others from the session, ends. Gives up after `ABANDON_TRIES_MAX` calls if more than
        `UNTOLD_SESSIONS_MAX` sessions wait for such calls."""
        if before is not None:
            await asyncio.wait([before])
        attempt = 0
        while True:
            try:
                await call()
            except StoreUnavailable as error:
                is_full = len(self._telling) > limits.UNTOLD_SESSIONS_MAX
                if self._lease_ends or (is_full and attempt + 1 >= limits.ABANDON_TRIES_MAX):
                    _log.warning("the store was not told of session %s: %r", session_id, error)
                    return error
            except OutriderError as error:
                return error
            else:
                return None
            wait_ms = backoff(
                limits.COMMIT_RETRY_MS_MIN, limits.COMMIT_RETRY_MS_MAX, attempt, self.random
            )
            attempt += 1
            await asyncio.sleep(wait_ms / 1e3)

    def random(self) -> float:
        """In [0, 1)."""
        return self.random_bits(53) / 2**53
