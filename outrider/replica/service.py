"""The base of the draft's and the target's service. Runs one step at a time, over all items that
wait.

    event loop                                          executor (a thread, or inline)
    take, release, form a batch, send answers           the worker's step, release, park

Only code on the executor touches the worker's state. Items that arrive during a step wait for the
next step, so batches grow with load."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.decayed_average import DecayedSums
from outrider.engine.interface import ModelInfo
from outrider.engine.step_costs import StepCosts
from outrider.errors import (
    DeadlineExceeded,
    EngineLost,
    OutriderError,
    Overloaded,
    StaleEpoch,
    Unavailable,
    check,
)
from outrider.grammar.compiler import Grammar, Grammars
from outrider.grammar.constraint import Constraint
from outrider.limits import (
    RELEASES_REMEMBERED_MAX,
    SEQUENCES_PER_REPLICA_MAX,
    SILENT_SESSION_MS,
    STEP_CRASHES_UNHEALTHY,
    STEP_S_MAX,
)
from outrider.messages import ProposalReply, Refused, ReplicaDescription, RoundHead, VerdictReply
from outrider.newest import Newest
from outrider.registry.registry import NO_FIGURES, WINDOW_S, Figures
from outrider.replica.batching_delay import BatchingDelay
from outrider.replica.executors import StepExecutor
from outrider.replica.step_request import (
    CANCELLED_CODE,
    Answers,
    AnswerSender,
    RequestQueue,
    StepFigures,
    StepRequest,
    Unfinished,
    refusal,
    undrawn,
)
from outrider.replica.worker import StepWorker
from outrider.telemetry.logs import about
from outrider.transport.link import Connection

if TYPE_CHECKING:
    from outrider.telemetry.step_spans import ObservedSteps

logger = logging.getLogger(__name__)


class _Step(NamedTuple):
    start: float
    items: Sequence[Any]
    answers: Sequence[Any]


STARVED_REST_S = 0.1
"""If no item of a step found pages, the next step begins at the latest after this time. By then, a
passed deadline or a silent session may have freed pages."""


class SteppedService:
    """Serves any number of streams with one worker. Queues items, and runs them in order of
    arrival, in batches of distinct sessions. Sends all answers of a step to a connection in one
    call. All methods must be called on the event loop's thread.

    A role that does more than queue items overrides `submit` and `_forget`."""

    def __init__(
        self,
        worker: StepWorker,
        executor: StepExecutor,
        description: ReplicaDescription,
        note_seconds: Callable[[float], None] | None = None,
        batching_delay: BatchingDelay | None = None,
    ) -> None:
        """At most `description.max_num_seqs` sessions share a step. `note_seconds` gets the time of
        each step that ran items, on the executor's thread or while no step runs. With
        `batching_delay`, a step may wait for sessions whose next items are expected soon. An item
        with a new constraint waits until the constraint's grammar is compiled, so that no step
        compiles a grammar."""
        self._worker = worker
        self._executor = executor
        self._description = description
        self._note_seconds = note_seconds
        self._batching_delay = batching_delay
        self._observer: ObservedSteps | None = None
        self.num_items = 0
        self.sessions = SessionTracker()
        self._filter = StaleRoundFilter()
        self._grammars = worker.grammars
        self._compiling: set[asyncio.Task[None]] = set()
        self._queue = RequestQueue(description.max_num_seqs)
        self._load: StepLoad | None = None
        self._releases: dict[str, int] = {}
        """Sessions to forget before the next step, each with its newest released epoch."""
        self._parked: dict[str, None] = {}
        """Sessions to park before the next step."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.lost: EngineLost | None = None
        """Why no more steps can run; None while steps can run."""
        self._crashes = 0
        self.health_changed = asyncio.Event()
        """Set when `healthy` or `lost` may have changed. The task that waits for it clears it."""
        self._num_starved = 0
        """Value of the worker's `figures.num_starved` after the last step."""
        self._idle = asyncio.Event()
        self._idle.set()

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Connection:
        """See `ReplicaService.connect`."""
        return _Connection(self, send)

    def describe(self) -> ReplicaDescription:
        """See `ReplicaService.describe`."""
        return self._description

    @property
    def healthy(self) -> bool:
        """False if `STEP_CRASHES_UNHEALTHY` steps in a row crashed, or no more steps can run."""
        stopped = self._over or (self._task is not None and self._task.done())
        return self._crashes < STEP_CRASHES_UNHEALTHY and not stopped

    @property
    def figures(self) -> Figures:
        """The replica's load, averaged over about `WINDOW_S`."""
        if self._load is None:
            return NO_FIGURES
        return self._load.figures(asyncio.get_running_loop().time(), self._worker.figures)

    def observe(self, observer: ObservedSteps) -> None:
        """Reports all further steps to `observer`."""
        self._observer = observer
        observer.watch(lambda: len(self._queue), lambda: self._worker.figures)

    def take(self, item: Any, sender: AnswerSender) -> None:
        """Accepts an item of a stream, or refuses it if its round is over. Never waits."""
        self.num_items += 1
        work = self._work(item, sender)
        if self._is_stale(work):
            return
        loop = asyncio.get_running_loop()
        self.sessions.hear(item.head.session_id, sender, loop.time())
        if work.deadline is not None:
            work.timer = loop.call_at(work.deadline.ends_at, self._tell_undrawn, work)
        constraint = item.head.constraint
        if constraint is None or self._grammars is None:
            self.submit(work)
            return
        compiled = self._grammars.find(item.head.constraint_hash, item.head.tenant)
        if compiled is not None:
            self.submit(work.compiled(compiled))
            return
        task = asyncio.create_task(self._compile(self._grammars, constraint, work))
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    def _is_stale(self, work: StepRequest) -> bool:
        """Whether the round of a request is over. If it is, refuses the request. Otherwise notes
        the round as its session's newest."""
        stale = self._filter.admit(work.item.head)
        if stale is not None:
            if self._observer is not None:
                self._observer.stale()
            work.tell(stale)
            self._done(work, stale)
        return stale is not None

    async def _compile(self, grammars: Grammars, constraint: Constraint, work: StepRequest) -> None:
        """Submits a request after its constraint is compiled. If the constraint is invalid, the
        request gets the error in place of the grammar. If the round is over by then, refuses the
        request."""
        compiled: Grammar | OutriderError
        try:
            compiled = await grammars.prepare(constraint, work.item.head.tenant)
        except Overloaded as error:
            self._refuse(work, error)
            return
        except OutriderError as error:
            logger.info("a constraint cannot be used here: %s", error)
            compiled = error
        except Exception:
            logger.exception("a constraint could not be compiled")
            self._refuse(work, OutriderError("the constraint could not be compiled"))
            return
        if not self._is_stale(work):
            self.submit(work.compiled(compiled))

    def submit(self, work: StepRequest) -> None:
        """Queues a request, or refuses it if the queue is full or no more steps can run."""
        if self._over:
            self._refuse(work, self.lost or Unavailable("this replica is stopping"))
            return
        try:
            is_new = self._queue.add(work)
        except Overloaded as error:
            self._refuse(work, error)
            return
        if not is_new and work.timer is not None:
            work.timer.cancel()
        if self._batching_delay is not None:
            now = asyncio.get_running_loop().time()
            self._batching_delay.arrived(work.session_id, now)
        self._start()

    def release(self, session_id: str, epoch: int) -> None:
        """Cancels the session's queued requests, and lets the worker forget the session before the
        next step. Does nothing if a newer epoch of the session was seen. If more than
        `SEQUENCES_PER_REPLICA_MAX` sessions are released between two steps, the oldest of these
        releases are dropped. The worker forgets their sessions when others need the room."""
        if not self._filter.release(session_id, epoch):
            return
        self._forget(session_id)
        self.sessions.forget(session_id)
        if epoch <= self._releases.get(session_id, 0):
            return  # Already released.
        for work in self._queue.of_session(session_id, epoch):
            self._cancel(work)
        self._releases[session_id] = epoch
        if self._batching_delay is not None:
            self._batching_delay.forget(session_id)
        if len(self._releases) > SEQUENCES_PER_REPLICA_MAX:
            del self._releases[next(iter(self._releases))]
        self._start()

    def park(self, session_ids: Sequence[str]) -> None:
        """Frees the slots of these sessions before the next step. Called for sessions whose
        connection has closed, and for silent sessions while pages are short."""
        if session_ids:
            self._parked.update(dict.fromkeys(session_ids))
            self._start()

    async def drain(self) -> None:
        """Returns when no item waits and no step runs, so that a stop loses no answer."""
        while self._compiling:
            await asyncio.wait(self._compiling)
        await self._idle.wait()

    async def close(self) -> None:
        """Drops waiting requests, waits for the running step, and closes the executor. If the
        engine is lost, does not wait, because the step may hang."""
        for task in self._compiling:
            task.cancel()
        if self._grammars is not None:
            self._grammars.close()
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._executor.close(wait=self.lost is None)

    def check_integrity(self) -> None:
        """See `StepWorker.check_integrity`."""
        self._worker.check_integrity()

    @property
    def _over(self) -> bool:
        return self._closing or self.lost is not None

    def _start(self) -> None:
        if self._over:
            return
        self._idle.clear()
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="steps")
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        try:
            while not self._over:
                await self._wake.wait()
                self._wake.clear()
                while not self._over and (self._queue or self._releases or self._parked):
                    if self._batching_delay is not None:
                        await self._gather(self._batching_delay)
                    if await self._step(self._take()):
                        # Lets the loop send answers before the next step occupies the interpreter.
                        await asyncio.sleep(0)
                    else:
                        await self._rest()
                self._idle.set()
        finally:
            self._idle.set()

    async def _gather(self, batching_delay: BatchingDelay) -> None:
        until = batching_delay.hold(asyncio.get_running_loop().time(), self._queue.rows)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while batching_delay.awaited and not self._over:
                    await self._wake.wait()
                    self._wake.clear()

    async def _rest(self) -> None:
        """Waits until an event may free pages, but at most `STARVED_REST_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STARVED_REST_S):
                await self._wake.wait()
                self._wake.clear()

    def _take(self) -> list[StepRequest]:
        batch, unwanted, late = self._queue.take(asyncio.get_running_loop().time())
        for work in unwanted:
            self._done(work, None)
        for work in late:
            self._refuse(work, DeadlineExceeded("the deadline passed before a step was free"))
            self._parked[work.session_id] = None
        return batch

    async def _step(self, batch: list[StepRequest]) -> bool:
        """Runs a step. If the step had items and none of them found pages, returns False."""
        releases, self._releases = self._releases, {}
        parked, self._parked = list(self._parked), {}
        if not batch and not releases and not parked:
            return True
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            step, second = await self._run_on_executor(releases, parked, batch)
        except EngineLost as lost:
            self._give_up(lost, batch)
            return True
        except Exception:
            sessions = [work.session_id for work in batch]
            logger.exception(
                "a step of %d items crashed", len(batch), extra=about(session_ids=sessions)
            )
            self._crashes += 1
            self.health_changed.set()
            if self._observer is not None:
                self._observer.crashed()
            if len(batch) > 1:
                for work in batch:
                    work.runs_alone = True  # So only the item that causes the crash fails.
                self._put_back(batch)
            else:
                crash = OutriderError("the step crashed; the replica's log has the traceback")
                for work in batch:
                    self._refuse(work, crash)
            return True
        end = loop.time()
        if batch and self._crashes:
            self._crashes = 0
            self.health_changed.set()
        if isinstance(second, _Step):
            self._finish(batch, step.answers, start, second.start, second.items)
            found = dict(zip(map(_round_of, second.items), second.answers, strict=True))
            later = self._queue.claim(lambda work: _round_of(work.item) in found)
            answers = [found[_round_of(work.item)] for work in later]
            self._finish(later, answers, second.start, end)
        else:
            self._finish(batch, step.answers, start, end)
            if second is not None:
                self._give_up(second)
        num_starved, self._num_starved = self._num_starved, self._worker.figures.num_starved
        if self._num_starved > num_starved:
            # If a session has long been silent, its coordinator may have died, or its release was
            # lost.
            since = loop.time() - SILENT_SESSION_MS / 1e3
            self.park(self.sessions.fall_silent(since, self._queue.sessions))
        return not batch or any(answer is not Unfinished.WAITS for answer in step.answers)

    def _finish(
        self,
        batch: list[StepRequest],
        answers: Sequence[Any],
        start: float,
        end: float,
        later: Sequence[Any] = (),
    ) -> None:
        """Handles the answers of a step. `later` has the items of a second step that has run."""
        if batch and not later and self._note_seconds is not None:
            self._note_seconds(end - start)
        self._answer(batch, answers, start, end, {item.head.session_id for item in later})
        self._put_back([work for work in batch if work.unfinished is not None])

    def _put_back(self, works: Sequence[StepRequest]) -> None:
        """Returns requests to the queue. Cancels those whose session was released meanwhile."""
        for work in works:
            if work.item.head.epoch <= self._releases.get(work.session_id, 0):
                self._cancel(work)
        self._queue.put_back(works)

    def _give_up(self, lost: EngineLost, batch: Sequence[StepRequest] = ()) -> None:
        logger.critical("no further step can run: %s", lost)
        self.lost = lost
        self.health_changed.set()
        waiting = batch or self._take()
        while waiting:
            for work in waiting:
                self._refuse(work, lost)
            waiting = self._take()

    async def _run_on_executor(
        self, releases: dict[str, int], parked: list[str], batch: list[StepRequest]
    ) -> tuple[_Step, _Step | EngineLost | None]:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(STEP_S_MAX) as limit:
                return await self._executor.run(
                    lambda: self._on_executor(releases, parked, batch, clock)
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLost(f"a step has not ended in {STEP_S_MAX} s") from None

    def _on_executor(
        self,
        releases: dict[str, int],
        parked: list[str],
        batch: Sequence[StepRequest],
        clock: Callable[[], float],
    ) -> tuple[_Step, _Step | EngineLost | None]:
        """Runs a step, and perhaps a second step with the next items of the same sessions. Returns
        `EngineLost` in place of the second step if it loses the engine."""
        for session_id in releases:
            self._worker.release(session_id)
        if parked:
            self._worker.park(parked)
        start, items = clock(), [work.item for work in batch]
        if not items:
            return _Step(start, [], []), None
        step = _Step(start, items, self._run_items(items))
        if self._has_news:
            return step, None
        if all(map(_is_ahead, step.answers)):
            # A second step follows at once, because handing a step to the executor takes a good
            # part of a quick step's time. A third step does not follow, because new items wait
            # meanwhile: an emulated engine sleeps for the time of all these steps together.
            return _Step(start, items, self._run_items(items)), None
        return step, None if self._executor.is_timed else self._next_rounds(batch, step, clock())

    def _next_rounds(
        self, batch: Sequence[StepRequest], step: _Step, now: float
    ) -> _Step | EngineLost | None:
        """Runs the next rounds of all sessions in `batch` right after a step, if they are known.
        Between two steps, the event loop and the hand-over to the executor take 1.3 ms."""
        pairs = zip(batch, step.answers, strict=True)
        items = [work.follow and work.follow(answer, now - step.start) for work, answer in pairs]
        if None in items:
            return None
        if self._note_seconds is not None:
            self._note_seconds(now - step.start)
        try:
            return _Step(now, items, self._run_items(items))
        except EngineLost as lost:
            return lost
        except Exception:
            # The event loop gets the answers of the first step, and submits these rounds again.
            logger.exception("a second step of %d items crashed", len(items))
            return None

    def _run_items(self, items: Sequence[Any]) -> list[Any]:
        try:
            answers = self._worker.step(items)
            check(len(answers) == len(items), f"{len(answers)} answers to {len(items)} items")
        except Exception:
            for item in items:  # The state of the items' sessions is unknown.
                self._worker.release(item.head.session_id)
            raise
        return answers

    @property
    def _has_news(self) -> bool:
        return bool(self._over or self._queue or self._releases or self._parked)

    def _answer(
        self,
        batch: list[StepRequest],
        answers: Sequence[Any],
        start: float,
        end: float,
        again: Collection[str],
    ) -> None:
        """Sends the answers. The next items of the sessions `again` have run already."""
        frames: dict[tuple[AnswerSender, float], list[Any]] = {}
        stamped: list[Any] = []
        num_sharing = sum(answer is not Unfinished.WAITS for answer in answers)
        for work, answer in zip(batch, answers, strict=True):
            if work.started_at is None and answer is not Unfinished.WAITS:
                work.started_at = start
            parts: tuple[Any, ...] = ()
            work.unfinished = None
            if isinstance(answer, Answers):
                parts, work.answered = answer.answers, not answer.waited_for
                work.unfinished = Unfinished.CONTINUES if answer.more else None
            else:
                work.answered = work.answered or work.item.gives_way
                if isinstance(answer, Unfinished):
                    work.unfinished = answer
                else:
                    parts = (answer,)
            timed = [_timed(part, work, end, num_sharing) for part in parts]
            if timed:
                self.sessions.answer(work.session_id, end)
            stamped.append(timed[-1] if timed else work.unfinished or Unfinished.CONTINUES)
            for sender in work.senders:
                frames.setdefault((sender, work.held_s), []).extend(timed)
        for (sender, held_s), frame in frames.items():
            # After a longer step, for example with a part of a prompt, answers wait no longer.
            if held_s > end - start:
                sender.hold(frame, held_s)
            else:
                sender.send(frame)
        delay = self._batching_delay
        for work, answer in zip(batch, stamped, strict=True):
            if work.unfinished is None:
                # Before `_done`, because that submits the next round of a session that runs ahead.
                is_last = isinstance(answer, VerdictReply | ProposalReply)
                if delay is not None and is_last and work.session_id not in again:
                    delay.answered(work.session_id, work.item.num_rows, end)
                self._done(work, None if answer is Unfinished.CONTINUES else answer)
        if not batch:
            return
        if self._load is None:
            self._load = StepLoad(self._description.max_num_seqs, start)
        self._load.stepped(batch, start, end)
        if delay is not None:
            delay.took(end - start, sum(work.item.num_rows for work in batch), len(batch))
        if self._observer is not None:
            self._observer.stepped(batch, stamped, start, end)

    def _tell_undrawn(self, work: StepRequest) -> None:
        """Called at the end of the time limit for drafting. If no token is drawn yet, tells the
        callers and prevents draws. The item's prefix still runs. The empty proposal that follows
        then reports how many tokens the replica holds."""
        if work.cancelled or work.deadline is None or not work.deadline.close_undrawn():
            return
        work.answered = True
        work.tell(undrawn(work.key))

    def _cancel(self, work: StepRequest) -> None:
        work.cancelled = True
        work.tell(Refused(work.key, CANCELLED_CODE, "the session was released"))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical("no further step can run after this error", exc_info=task.exception())
        self.health_changed.set()

    def _refuse(self, work: StepRequest, error: OutriderError) -> None:
        answer = refusal(work.key, error)
        work.tell(answer)
        self._done(work, answer)

    def _done(self, work: StepRequest, answer: Any) -> None:
        if work.timer is not None:
            work.timer.cancel()
        if work.on_done is not None:
            work.on_done(work, answer)

    def _forget(self, session_id: str) -> None:
        """Drops what a role keeps of an ended session outside the worker."""

    def _work(self, item: Any, sender: AnswerSender) -> StepRequest:
        now, left_ms = asyncio.get_running_loop().time(), item.head.deadline_ms
        return StepRequest(item, [sender], now, now + left_ms / 1e3 if left_ms else math.inf)


def _is_ahead(answer: Any) -> bool:
    """Whether the item of an answer continues, and no caller waits for its next answer."""
    calm = isinstance(answer, Answers) and not answer.answers and not answer.waited_for
    return calm and answer.more


def _round_of(item: Any) -> Any:
    """Items for which this is equal have the same answer."""
    head = item.head
    return head.key, head.prefix_digest, head.append, getattr(item, "proposal", None)


def _timed(answer: Any, work: StepRequest, end: float, num_sharing: int) -> Any:
    """Adds two times to a verdict or proposal: how long its item waited for the first step, and how
    long the item then took until `end`. `num_sharing` items shared the item's last step."""
    if not isinstance(answer, VerdictReply | ProposalReply):
        return answer
    started_at = end if work.started_at is None else work.started_at
    queue_ms = max(0.0, started_at - work.arrived_at) * 1000
    compute_ms = (end - started_at) * 1000
    timed = replace(answer, queue_ms=queue_ms, compute_ms=compute_ms)
    if isinstance(timed, ProposalReply):
        timed = replace(timed, work_ms=compute_ms / num_sharing)
    return timed


class StepLoad:
    """Load of a replica, computed from its steps."""

    def __init__(self, max_batch: int, now: float) -> None:
        """At most `max_batch` items share a step. All times are on the event loop's clock."""
        self._max_batch = max_batch
        self._sums = DecayedSums(WINDOW_S, now)

    def stepped(self, works: Sequence[StepRequest], start: float, end: float) -> None:
        began = [max(0.0, start - work.arrived_at) for work in works if work.started_at == start]
        self._sums.add(
            end,
            {
                "steps": 1.0,
                "seconds": end - start,
                "places": min(1.0, len(works) / self._max_batch),
                "began": len(began),
                "waited": sum(began),
            },
        )

    def figures(self, now: float, step_figures: StepFigures) -> Figures:
        sums, pages = self._sums, step_figures.pages
        step_s = sums.mean(now, "seconds", "steps")
        waited_s = sums.mean(now, "waited", "began")
        return Figures(
            busy=min(1.0, sums.rate(now, "seconds")),
            fill=sums.mean(now, "places", "steps"),
            step_ms=None if step_s is None else step_s * 1e3,
            queue_steps=waited_s / step_s if waited_s is not None and step_s else None,
            kv_usage=None if pages is None else pages.usage,
        )


class _Connection(AnswerSender):
    def __init__(self, service: SteppedService, send: Callable[[Sequence[Any]], None]) -> None:
        super().__init__(send)
        self._service = service

    def receive(self, items: Sequence[Any]) -> None:
        for item in items:
            self._service.take(item, self)

    def close(self) -> None:
        """Drops requests that only this stream waits for, and frees the slots of its sessions."""
        self.closed = True
        self._service.park(self._service.sessions.leave(self))


def describe_model(
    info: ModelInfo, max_num_seqs: int, costs: StepCosts | None
) -> ReplicaDescription:
    """Describes a replica that runs a model, with at most `max_num_seqs` sessions in a step."""
    return ReplicaDescription(
        model=info.name,
        weights_fingerprint=info.weights_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        max_num_seqs=max_num_seqs,
        step_costs=costs,
        numerics=info.numerics,
        features=info.features,
    )


class SessionTracker:
    """Remembers the last `SEQUENCES_PER_REPLICA_MAX` sessions: for each, the connection of its last
    item, and the time of its last item or answer."""

    def __init__(self) -> None:
        self._heard: Newest[str, tuple[AnswerSender, float]] = Newest(SEQUENCES_PER_REPLICA_MAX)

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, session_id: str, sender: AnswerSender, now: float) -> None:
        self._heard[session_id] = (sender, now)

    def answer(self, session_id: str, now: float) -> None:
        """Notes an answer. Ignores unknown sessions."""
        if session_id in self._heard:
            self._heard[session_id] = (self._heard[session_id][0], now)

    def forget(self, session_id: str) -> None:
        self._heard.pop(session_id, None)

    def leave(self, sender: AnswerSender) -> list[str]:
        """Forgets and returns the sessions whose last item came over this closed connection."""
        gone = [name for name, (last, _) in self._heard.items() if last is sender]
        for name in gone:
            del self._heard[name]
        return gone

    def fall_silent(self, since: float, waiting: Collection[str]) -> list[str]:
        """Forgets and returns the sessions that are silent since this time and not `waiting`."""
        silent: list[str] = []
        for name, (_, active_at) in self._heard.items():
            if active_at > since:
                break
            if name not in waiting:
                silent.append(name)
        for name in silent:
            del self._heard[name]
        return silent


_RELEASED = 2**64
"""Stands for the newest round of a released session. Larger than every round."""


class StaleRoundFilter:
    """Refuses rounds that are older than their session's newest round. Messages that come late or
    twice could otherwise discard what newer rounds have cached, or revive a released session.

    Remembers the last `RELEASES_REMEMBERED_MAX` sessions. Old rounds of other sessions pass."""

    def __init__(self) -> None:
        self._asked: Newest[str, tuple[int, int]] = Newest(RELEASES_REMEMBERED_MAX)

    def admit(self, head: RoundHead) -> Refused | None:
        """Notes the round. If the round is old, returns its refusal instead: ABORTED for an old
        epoch, CANCELLED for an old round of the same epoch."""
        asked = self._asked.get(head.session_id)
        if asked is not None:
            epoch, latest = asked
            if head.epoch < epoch:
                over = StaleEpoch(f"epoch {head.epoch} is over: epoch {epoch} was seen")
                return refusal(head.key, over)
            if head.epoch == epoch and head.round < latest:
                newer = f"round {latest} was asked for"
                why = "the session was released" if latest == _RELEASED else newer
                return Refused(head.key, CANCELLED_CODE, f"round {head.round} is over: {why}")
        self._asked[head.session_id] = (head.epoch, head.round)
        return None

    def release(self, session_id: str, epoch: int) -> bool:
        """Ends all rounds of the epoch, future rounds included. If a newer epoch was seen, does
        nothing and returns False."""
        asked = self._asked.get(session_id)
        if asked is not None and asked[0] > epoch:
            return False
        self._asked[session_id] = (epoch, _RELEASED)
        return True
