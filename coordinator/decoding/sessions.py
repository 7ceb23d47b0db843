"""Opens, takes over and ends a coordinator's sessions. Repeats failed calls to the store."""

import asyncio
import logging
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from coordinator.decoding.committer import back_off
from coordinator.decoding.loop import COMMIT_GRACE_S, SessionRun
from coordinator.decoding.resumption import check_known
from coordinator.decoding.stored_bytes import StoredBytes
from coordinator.requests.validation import GenerationParameters, ParametersWriter
from coordinator.routing.replica_pool import SessionContext, TargetPool
from coordinator.routing.target_client import TargetClient
from outrider import errors, limits
from outrider.config.deployment import CoordinatorConfig
from outrider.foundation.fair_turns import FairQueue, FairThreads
from outrider.interfaces.messages import VerdictReply
from outrider.interfaces.request import ResumeRequest
from outrider.sessions.state import Session
from outrider.sessions.store import (
    Counters,
    Finish,
    FinishReason,
    SessionRecord,
    SessionStore,
    SharedText,
    contended,
    released,
)
from outrider.speculation.proposal import EncodedProposal

_log = logging.getLogger(__name__)

LOGPROBS_BYTES = 32
"""Reading this many bytes of stored log-probabilities takes as long as reading one token."""

T = TypeVar("T")
StoreCall = asyncio.Task[errors.OutriderError | None]
"""A task that repeats a call to the store until the store answers. Its result is the store's
refusal, or the last error before the task gave up; None if the call succeeded."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Idempotency key of one answer of a request."""

    name: str
    digest: str
    session_id: str = ""
    """Id of the session that generates the answer; empty if no session has begun."""

    @property
    def value(self) -> str:
        """What the store keeps under `name`."""
        return self.session_id and f"{self.session_id} {self.digest}"

    def with_session_of(self, value: str) -> Self:
        """Returns this key with the session id of a stored `value`. Raises `BadRequest` if the
        value has the digest of a different request."""
        session_id, _, digest = value.partition(" ")
        if value and digest != self.digest:
            raise errors.BadRequest(
                "Idempotency-Key",
                "was used with a different request; repeat that request byte for byte, or use "
                "another key",
            )
        return replace(self, session_id=session_id)


class KeyTaken(errors.OutriderError):
    """The idempotency key of a new session already belongs to another session."""

    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"the idempotency key belongs to session {key.session_id}")
        self.key = key


class OwnedSessions:
    """The sessions of one coordinator. A session has at most one *run* (a `SessionRun`) at a time.
    When the run ends, the store gets the session's end or its *release*. After a release, any
    coordinator may resume the session."""

    def __init__(
        self,
        store: SessionStore,
        owner: str,
        targets: TargetPool,
        random_bits: Callable[[int], int],
        config: CoordinatorConfig,
    ) -> None:
        self._replays = FairThreads(1, "replay")  # `taking_over` limits how many wait.
        self._store = store
        self.owner = owner
        self.targets = targets
        self.random_bits = random_bits
        self._config = config
        self._writer = ParametersWriter()
        # `--max-sessions` limits how many sessions wait for places.
        self._openings = FairQueue(range(limits.OPENINGS_MAX))
        self._endings = FairQueue(range(limits.ENDINGS_MAX))
        self._closings = FairQueue(range(limits.CLOSINGS_MAX))
        self.stored = StoredBytes(config.resume_grace_ms)
        self._background: set[asyncio.Task[object]] = set()
        self.running: dict[str, SessionRun] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._store_calls: dict[str, StoreCall] = {}
        """Session id -> newest task that tells the store of the session's release or end."""
        self._taking: list[str] = []
        """Ids of sessions that are being taken over, one entry for each client that resumes."""
        self._num_taking: Counter[str] = Counter()
        """Tenant -> number of its entries in `_taking`."""
        self._unsettled: set[str] = set()
        """Ids of sessions for which a call of `SessionStore.take_over` runs."""
        self.scored_ids: set[str] = set()
        self._closing = asyncio.Event()
        self._lease_ends = False

    def in_background(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Starts a task, for which `end_background` waits."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def open(
        self, tenant: str, parameters: GenerationParameters, key: RequestKey | None = None
    ) -> Session:
        """Creates a session in the store, and stores its id under the `key`. Raises `KeyTaken` if
        the key has another session, and `Overloaded` if the store has no room. If the store does
        not answer, it may have created the session. This session is cancelled in the background, so
        the next attempt has a new id."""
        stored = self._writer.write(parameters, tenant)
        for tries_left in reversed(range(limits.OPEN_TRIES_MAX)):
            new = self._record(tenant, parameters, *stored, parameters.prompt)
            try:
                async with self._openings.turn(tenant):
                    self.stored.check(tenant)
                    await self._create(new, parameters)
                break
            except errors.StoreUnavailable as error:
                if not tries_left:
                    raise
                _log.info("a session could not be opened, %d tries left: %r", tries_left, error)
                await asyncio.sleep(limits.COMMIT_RETRY_MS_MIN / 1e3)
        if key is not None:
            claimed = replace(key, session_id=new.session_id).value
            self.stored.hold_key(tenant, key.name)
            try:
                kept = await self._store.claim_key(key.name, claimed, key.value)
            except BaseException:
                self.wait_for_client(new)
                raise
            if kept != claimed:
                self.store_cancellation(new)
                raise KeyTaken(key.with_session_of(kept))
        return Session(new)

    async def _create(self, new: SessionRecord, parameters: GenerationParameters) -> None:
        self.stored.hold(new, parameters)
        opening = asyncio.create_task(self._store.open(new))
        try:
            await asyncio.shield(opening)
        except (asyncio.CancelledError, errors.StoreUnavailable):
            self.in_background(self._abandon(opening, new))
            raise
        except errors.OutriderError:
            self.stored.end_early(new)
            raise

    async def score(
        self,
        tenant: str,
        parameters: GenerationParameters,
        given: Sequence[int],
        scored: Sequence[int],
        deadline: float,
        audits: bool = False,
    ) -> AsyncGenerator[tuple[tuple[int, ...], VerdictReply]]:
        """Lets the target score the tokens `scored` after the tokens `given`, in a session that is
        never stored. Yields parts of `scored` with their verdicts. Sends each part as a proposal,
        because the target runs proposals even if their tokens are cached. Appends the part to the
        session after the verdict. Raises `TimeoutError` at the deadline, and the target's error."""
        session = Session(self._record(tenant, parameters, "", None, tuple(given)))
        context = SessionContext(session, parameters, deadline)
        target = TargetClient(self.targets, context, self._config, audits)
        self.scored_ids.add(session.session_id)
        try:
            for index, start in enumerate(range(0, len(scored), limits.NUM_DRAFT_TOKENS_MAX)):
                part = tuple(scored[start : start + limits.NUM_DRAFT_TOKENS_MAX])
                proposal = EncodedProposal(part).without_q(parameters.rule)
                async with asyncio.timeout_at(deadline):
                    reply = await target.verify(index, proposal)
                yield part, reply
                session.decide(part, Counters())
                target.settle(reply, session.length)
        finally:
            target.close()
            self.scored_ids.discard(session.session_id)

    def _record(
        self,
        tenant: str,
        parameters: GenerationParameters,
        stored: str,
        shared: SharedText | None,
        token_ids: tuple[int, ...],
    ) -> SessionRecord:
        return SessionRecord.new(
            f"{self.random_bits(128):032x}",
            tenant,
            self.owner,
            parameters.seed,
            parameters.rule,
            stored,
            token_ids,
            shared,
        )

    def end(self, run: SessionRun, *, resumable: bool, is_gone: bool = False) -> None:
        """Ends a run, unless it has ended already. If the client `is_gone`, the session can be
        resumed for `resume_grace_ms`. The same holds if the session is `resumable` and its end
        could not be stored."""
        if self.running.get(run.session_id) is run:
            is_gone = is_gone and self._config.resume_grace_ms > 0
            self._free(run, self._close(run, resumable, is_gone))

    async def _end_run(self, run: SessionRun, *, hands_over: bool) -> None:
        tenant = run.session.record.tenant
        async with self._endings.turn(tenant):
            await run.stop(hands_over=hands_over)
        async with self._closings.turn(tenant):
            await run.close()

    async def _close(self, run: SessionRun, resumable: bool, is_gone: bool) -> None:
        await self._end_run(run, hands_over=is_gone)
        self.stored.end(run.session)
        if run.is_recorded:
            return
        if is_gone:
            self.wait_for_client(run.record)
        elif run.session.error is None and not self._closing.is_set():
            # The end is not stored, and no other coordinator has taken the session over.
            if resumable:
                self.wait_for_client(run.record)
            else:
                self.store_cancellation(run.record)

    async def end_earlier_runs(self, record: SessionRecord) -> None:
        """Ends a session's earlier runs after the take-over that returned `record`. Raises
        `StaleEpoch` if a later take-over has already begun a run."""
        session_id = record.session_id
        while True:
            run = self.running.get(session_id)
            if run is not None:
                if run.session.epoch >= record.epoch:
                    raise errors.StaleEpoch(f"session {session_id} was resumed by another stream")
                # The new run counts its bytes.
                self._free(run, self._end_run(run, hands_over=True))
            ending = self._ending.get(session_id)
            if ending is None:
                return
            await asyncio.wait([ending])

    def _free(self, run: SessionRun, closing: Coroutine[None, None, None]) -> None:
        session_id = run.session_id
        del self.running[session_id]
        ending = self._ending[session_id] = self.in_background(closing)
        ending.add_done_callback(lambda _: self._ending.pop(session_id, None))

    def wait_for_client(self, record: SessionRecord) -> None:
        """Releases a session, so that any coordinator can resume it. Cancels the session if no
        client resumes it within `resume_grace_ms`. If this coordinator closes earlier, the session
        stays unfinished until its record expires."""
        self.stored.end_early(record)
        self.in_background(self._wait(record))

    async def _wait(self, record: SessionRecord) -> None:
        await self._release(record)
        try:
            async with asyncio.timeout(self._config.resume_grace_ms / 1e3):
                await self._closing.wait()
        except TimeoutError:
            await self.store_cancellation(record, released(self.owner))

    @contextmanager
    def taking_over(self, session_id: str, tenant: str) -> Iterator[None]:
        """Counts a session as being taken over. Raises `Unavailable` if `TAKE_OVERS_MAX` take-overs
        already run. Without this limit, all clients of a dead coordinator would resume at once. As
        many places again are for tenants with few take-overs, so that no tenant takes all."""
        num, own = len(self._taking), self._num_taking[tenant]
        has_few = own < limits.TAKE_OVERS_OF_TENANT_MIN and num < 2 * limits.TAKE_OVERS_MAX
        if num >= limits.TAKE_OVERS_MAX and not has_few:
            raise errors.Unavailable(
                f"this coordinator is taking over {limits.TAKE_OVERS_MAX} sessions already; "
                "try again",
                retry_after_ms=limits.TAKE_OVER_RETRY_MS,
            )
        self._taking.append(session_id)
        self._num_taking[tenant] += 1
        try:
            yield
        finally:
            self._taking.remove(session_id)
            self._num_taking[tenant] -= 1
            self._num_taking += Counter()  # Removes entries that are 0.

    async def claim(
        self, record: SessionRecord, request: ResumeRequest
    ) -> tuple[SessionRecord, GenerationParameters]:
        """Takes over the session of a stored `record`, unless it is finished. Returns the record
        with the new epoch, and the session's parameters. Runs `check_known` before the take-over,
        and again after it if the stored tokens have changed meanwhile. Raises `Incompatible` if no
        target has the session's weights, `Unavailable` if no target is known or expected, and the
        errors of `check_known` and `SessionStore.take_over`."""
        parameters = await self.replay(record, lambda: check_known(record, request))
        if record.finish_reason is not None:
            return record, parameters
        if self.targets.newest(parameters.weights) is None:
            starts = self.targets.starts
            if self.targets.replicas:
                raise errors.Incompatible(
                    f"session_id: {record.session_id} was decoded with the weights "
                    f"{parameters.weights}, which no target here has"
                )
            if not starts.expected:
                raise errors.Unavailable(f"no target is known; {starts}")
            # The session's first round waits for the target that is being started.
        taken_over = await self._take_over(record)
        if (taken_over.prefix_digest, len(taken_over.token_ids)) != (
            record.prefix_digest,
            len(record.token_ids),
        ):
            try:
                parameters = await self.replay(taken_over, lambda: check_known(taken_over, request))
            except BaseException:
                self._release(taken_over)
                raise
        if taken_over.finish_reason is None:
            self.stored.hold(taken_over, parameters)
        return taken_over, parameters

    async def replay(self, record: SessionRecord, call: Callable[[], T]) -> T:
        """Runs `call`, which reads all tokens of a session. For a long session, uses a thread, at
        which tenants take turns."""
        size = len(record.token_ids) + len(record.logprobs) // LOGPROBS_BYTES
        if size <= limits.REPLAY_TOKENS_INLINE:
            return call()
        return await self._replays.run(record.tenant, call)

    async def cancel(self, record: SessionRecord) -> None:
        """Takes over a session that does not run here, and cancels it, unless it is finished. If
        the owner's lease has not ended, asks the owner to cancel the session, and raises
        `Unavailable`. If the store does not answer within `CANCEL_WAIT_S`, raises
        `StoreUnavailable`, and repeats the call to the store in the background."""
        if record.finish_reason is not None:
            return
        taken_over = await self._take_over(record, cancels=True)
        if taken_over.finish_reason is not None:
            return
        task = self.store_cancellation(taken_over)
        await asyncio.wait([task], timeout=limits.CANCEL_WAIT_S)
        if not task.done() or task.cancelled():
            raise errors.StoreUnavailable(
                f"session {taken_over.session_id} will be cancelled when the session store answers"
            )
        error = task.result()
        if error is not None:
            is_stale = isinstance(error, errors.StaleEpoch)
            raise contended(taken_over.session_id) if is_stale else error

    def end_wanted(self, wanted: Mapping[str, bool]) -> None:
        """Handles other coordinators' requests to cancel (True) or release (False) sessions."""
        for session_id, cancels in wanted.items():
            run = self.running.get(session_id)
            if cancels and run is not None:
                run.cancel()
            else:
                self.in_background(self.release_wanted(session_id))

    async def release_wanted(self, session_id: str) -> None:
        """Handles another coordinator's request to take over a session. Releases the session again
        if it does not run here, but the store still names this coordinator as its owner. (A
        failover of the store has then lost the first release.) If the store does not answer, the
        next renewal of the lease will report the request again."""
        if self._is_here(session_id) or self._closing.is_set():
            return
        try:
            record = await self._store.load(session_id)
        except errors.OutriderError:
            return
        is_ours = record.owner == self.owner and record.finish_reason is None
        if is_ours and not self._is_here(session_id):
            self.wait_for_client(record)

    def close(self) -> None:
        """Cancels all runs. Does not wait for the thread of `replay`."""
        self._replays.close()
        self._closing.set()
        for run in self.running.values():
            run.cancel()

    async def end_background(self) -> None:
        """Waits up to `COMMIT_GRACE_S` for the background tasks, and then cancels them. Afterwards,
        failed calls to the store are not repeated."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=COMMIT_GRACE_S)
            for task in late:
                task.cancel()
        self._lease_ends = True

    async def _take_over(self, seen: SessionRecord, *, cancels: bool = False) -> SessionRecord:
        """Calls `SessionStore.take_over`. If the call fails, but the store may have done the
        take-over, releases the session, and with `cancels` also cancels it: the former owner, which
        may not know yet that it has lost the session, can no longer do so. Raises `Unavailable`
        while an earlier call to the store takes over, releases or ends the session. The earlier
        call may have the same epoch as the new run. If it reached the store after the take-over, it
        would end the new run."""
        session_id = seen.session_id
        if self._is_unsettled(session_id):
            raise contended(session_id)
        self._unsettled.add(session_id)
        sent = asyncio.Event()
        try:
            return await self._store.take_over(seen, self.owner, sent.set, cancels)
        except BaseException as error:
            is_refused = isinstance(error, errors.NotFound | errors.Unavailable) and not isinstance(
                error, errors.StoreUnavailable
            )
            if sent.is_set() and not is_refused:
                taken = replace(seen, epoch=seen.epoch + 1)
                self._release(taken)
                if cancels:
                    self.store_cancellation(taken, released(self.owner))
            raise
        finally:
            self._unsettled.discard(session_id)

    def _is_here(self, session_id: str) -> bool:
        """Whether the session runs, begins or ends here, or a call to the store about it runs."""
        places = (self.running, self._ending, self._taking)
        return self._is_unsettled(session_id) or any(session_id in place for place in places)

    def _is_unsettled(self, session_id: str) -> bool:
        return session_id in self._unsettled or session_id in self._store_calls

    async def wait_for_store(self, session_id: str) -> None:
        """If the store has not yet answered a call that releases or ends the session, waits up to
        `TAKE_OVER_RETRY_MS` for the answer (`_take_over` says why)."""
        if session_id in self._store_calls:
            await asyncio.wait(
                [self._store_calls[session_id]], timeout=limits.TAKE_OVER_RETRY_MS / 1e3
            )

    def _release(self, record: SessionRecord) -> StoreCall:
        session_id, epoch = record.session_id, record.epoch
        return self._call_store(
            session_id, lambda: self._store.release(session_id, epoch, self.owner)
        )

    def store_cancellation(self, record: SessionRecord, owner: str = "") -> StoreCall:
        """Cancels a session that does not run here. The store refuses if the session's owner is
        not `owner`, by default this coordinator."""
        self.stored.end_early(record)
        end = Finish(
            record.session_id,
            record.epoch,
            owner or self.owner,
            None,
            FinishReason.CANCELLED,
            record.counters,
        )
        return self._call_store(record.session_id, lambda: self._store.finish(end))

    async def _abandon(self, opening: asyncio.Task[None], new: SessionRecord) -> None:
        await asyncio.wait([opening])
        await self.store_cancellation(new)

    def _call_store(self, session_id: str, call: Callable[[], Awaitable[object]]) -> StoreCall:
        """Starts a task that repeats a call until the store answers. Calls about the same session
        run one after the other. The task gives up when this coordinator's lease ends. While more
        than `UNSTORED_ENDS_MAX` sessions have such tasks, the task gives up after
        `ABANDON_TRIES_MAX` calls."""
        before = self._store_calls.get(session_id)

        async def repeat() -> errors.OutriderError | None:
            if before is not None:
                await asyncio.wait([before])
            attempt = 0
            while True:
                try:
                    await call()
                except errors.StoreUnavailable as error:
                    is_full = len(self._store_calls) > limits.UNSTORED_ENDS_MAX
                    if self._lease_ends or (is_full and attempt + 1 >= limits.ABANDON_TRIES_MAX):
                        _log.warning("session %s: release or end not stored: %r", session_id, error)
                        return error
                except errors.OutriderError as error:
                    return error
                else:
                    return None
                await back_off(attempt, self.random)
                attempt += 1

        def forget(task: StoreCall) -> None:
            if self._store_calls.get(session_id) is task:
                del self._store_calls[session_id]

        task = self._store_calls[session_id] = self.in_background(repeat())
        task.add_done_callback(forget)
        return task

    def random(self) -> float:
        """Returns a random number in [0, 1)."""
        return self.random_bits(53) / 2**53
