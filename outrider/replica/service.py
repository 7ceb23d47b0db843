"""The base of the services of drafts and targets. Coordinators send *items*, each for one round of
a session. Items that arrive during a *step* (a call of the worker) share the next step, so batches
grow with load.

    event loop                                          executor (a thread, or inline)
    accept items, form batches, send answers            run steps, forget sessions, free pages

Only code on the executor touches the worker's state."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider import limits
from outrider.errors import (
    DeadlineExceeded,
    EngineLost,
    OutriderError,
    Overloaded,
    StaleEpoch,
    Unavailable,
    check,
)
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.decayed_average import DecayedSums
from outrider.foundation.logs import about
from outrider.grammar.compiler import Grammar, Grammars
from outrider.grammar.constraint import Constraint
from outrider.interfaces.engine import ModelInfo
from outrider.interfaces.messages import (
    ProposalReply,
    Refused,
    ReplicaDescription,
    RoundHead,
    VerdictReply,
)
from outrider.interfaces.step_costs import StepCosts
from outrider.registry.registry import WINDOW_S, Figures
from outrider.replica.batching_delay import BatchingDelay
from outrider.replica.executors import StepExecutor
from outrider.replica.step_request import (
    CANCELLED_CODE,
    AnswerSender,
    RequestQueue,
    StepFigures,
    StepRequest,
    Unfinished,
    refusal,
)
from outrider.replica.step_watch import StepWatch
from outrider.replica.worker import StepWorker
from outrider.transport.link import Connection, ReplicaService

if TYPE_CHECKING:
    from outrider.replica.step_spans import ObservedSteps

logger = logging.getLogger(__name__)


class _Step(NamedTuple):
    start: float
    items: Sequence[Any]
    answers: Sequence[Any]


STARVED_REST_S = 0.1
"""If a step finds no pages of keys and values for any item, the next step begins at most this much
later. By then, pages of expired or silent sessions may be free."""


class SteppedService(ReplicaService):
    """Serves any number of connections with one worker. Runs items in batches of distinct sessions.
    Tenants take turns, each with its oldest items. If a step has several answers for a connection,
    sends them in one call. All methods must be called on the event loop's thread.

    A role that does more than queue items overrides `submit` and `_forget`."""

    def __init__(
        self,
        worker: StepWorker,
        executor: StepExecutor,
        description: ReplicaDescription,
        seconds: Callable[[int, int], float] = lambda rows, sessions: 0.0,
    ) -> None:
        """At most `description.max_num_seqs` sessions share a step. `seconds(rows, sessions)` is
        the expected duration of a step with this number of tokens and sessions. If it is above 0,
        the step may wait for sessions whose next items are expected soon. An item with a new
        constraint waits until its grammar is compiled, so that no step compiles a grammar."""
        self._worker = worker
        self._executor = executor
        self._description = description
        self._delay = BatchingDelay(seconds, description.max_num_seqs)
        self._observer: ObservedSteps | None = None
        self.num_items = 0
        num_max = limits.SEQUENCES_PER_REPLICA_MAX
        self.sessions: BoundedDict[str, tuple[AnswerSender, float]] = BoundedDict(num_max)
        """For each session, the connection of its last item, and the time of its last item or
        answer. Sessions with the oldest times come first."""
        self._filter = StaleRoundFilter()
        self._grammars = worker.grammars
        self._compiling: set[asyncio.Task[None]] = set()
        self._queue = RequestQueue(description.max_num_seqs)
        self._load: StepLoad | None = None
        self._leaving: BoundedDict[str, bool] = BoundedDict(num_max)
        """Sessions that the worker forgets (True), or whose pages it frees (False), before the next
        step. Beyond `num_max`, drops the oldest entry. This session's pages are freed on demand."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.lost: EngineLost | None = None  # why no more steps can run; None while steps can run
        self._late: Unavailable | None = None  # why items are refused; None unless a step is late
        self._running: Sequence[StepRequest] = ()
        """Requests of the running step; empty once the step is late."""
        self._watch = StepWatch(
            worker.expected, executor.may_compile, self._on_late_step, self._on_hung_step
        )
        self._crashes = 0
        self.health_changed = asyncio.Event()  # set when `healthy` or `lost` may change
        self._num_starved = 0  # value of the worker's `figures.num_starved` after the last step
        self._idle = asyncio.Event()
        self._idle.set()

    def connect(self, send: Callable[[Sequence[Any]], None]) -> Connection:
        return _Connection(self, send)

    @property
    def description(self) -> ReplicaDescription:
        """Describes what the replica runs, also while a step is late."""
        return self._description

    def describe(self) -> ReplicaDescription:
        """See `ReplicaService.describe`. Raises `Unavailable` while a step is late. Coordinators
        use this replica again once it describes itself."""
        if self._late is not None:
            raise self._late
        return self._description

    @property
    def healthy(self) -> bool:
        """False if `STEP_CRASHES_UNHEALTHY` steps in a row crashed, if a step is late, or if no
        more steps can run."""
        is_ready = not self._over and self._late is None
        return is_ready and self._crashes < limits.STEP_CRASHES_UNHEALTHY

    @property
    def figures(self) -> Figures:
        """The replica's load, averaged over about `WINDOW_S`."""
        now = _now()
        return self._load_since(now).figures(now, self._worker.figures)

    def _load_since(self, now: float) -> StepLoad:
        """The load, measured from the first call on: a replica is built outside its event loop."""
        self._load = self._load or StepLoad(self._description.max_num_seqs, now)
        return self._load

    def observe(self, observer: ObservedSteps) -> None:
        """Reports all further steps to `observer`."""
        self._observer = observer
        observer.watch(lambda: len(self._queue.waiting), lambda: self._worker.figures)

    def take(self, item: Any, sender: AnswerSender) -> None:
        """Accepts an item, or refuses it if its round is over. Never waits."""
        self.num_items += 1
        work = self._work(item, sender)
        if self._is_stale(work):
            return
        self.sessions[work.session_id] = (sender, work.arrived_at)
        grammars, head = self._grammars, item.head
        if head.constraint is None or grammars is None:
            self.submit(work)
        elif (compiled := grammars.find(head.constraint_hash, head.tenant)) is not None:
            self.submit(work.compiled(compiled))
        else:
            task = asyncio.create_task(self._compile(grammars, head.constraint, work))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)

    def _is_stale(self, work: StepRequest) -> bool:
        """Whether a request's round is over. If it is, refuses the request. Otherwise notes the
        round as the newest of its session."""
        stale = self._filter.admit(work.item.head)
        if stale is not None:
            if self._observer is not None:
                self._observer.stale()
            self._end(work, stale)
        return stale is not None

    async def _compile(self, grammars: Grammars, constraint: Constraint, work: StepRequest) -> None:
        """Submits a request after its constraint is compiled, unless its round is over by then. If
        the constraint is invalid, the request has the error in place of the grammar."""
        compiled: Grammar | OutriderError
        try:
            compiled = await grammars.prepare(constraint, work.item.head.tenant)
        except Overloaded as error:
            self._refuse(work, error)
            return
        except OutriderError as error:
            logger.info("a constraint cannot be used: %s", error)
            compiled = error
        except Exception:
            logger.exception("a constraint could not be compiled")
            self._refuse(work, OutriderError("the constraint could not be compiled"))
            return
        if not self._is_stale(work):
            self.submit(work.compiled(compiled))

    def submit(self, work: StepRequest) -> None:
        """Queues a request. Refuses it if the queue is full, if a step is late, or if no more steps
        can run."""
        if self._over or self._late is not None:
            reason = self.lost or self._late or Unavailable("this replica is stopping")
            self._refuse(work, reason)
            return
        try:
            self._queue.add(work)
        except Overloaded as error:
            self._refuse(work, error)
            return
        self._delay.arrived(work.session_id, _now())
        self._start()

    def release(self, session_id: str, epoch: int) -> None:
        """Cancels the session's queued requests, and lets the worker forget the session before the
        next step. Does nothing if a newer epoch of the session was seen."""
        if not self._filter.release(session_id, epoch):
            return
        self._cancel(self._queue.drop(session_id))
        self._forget(session_id)
        self.sessions.pop(session_id, None)
        self._delay.forget(session_id)
        self._leaving[session_id] = True
        self._start()

    def disconnect(self, sender: AnswerSender) -> None:
        """Calls `evict` for the sessions whose last item came over this closed connection."""
        self.evict([name for name, (last, _) in self.sessions.items() if last is sender])

    def evict(self, session_ids: Sequence[str]) -> None:
        """Frees the pages of these sessions before the next step."""
        for session_id in session_ids:
            self.sessions.pop(session_id, None)
            self._leaving.setdefault(session_id, False)
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
            await asyncio.wait([self._task])
        self._watch.close()
        self._executor.close(wait=self.lost is None)

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

    async def _run(self) -> None:
        try:
            while not self._over:
                await self._wait_for_work()
                while not self._over and (self._queue.waiting or self._leaving):
                    until = self._delay.hold(_now(), self._queue.rows)
                    while self._delay.awaited and not self._over and _now() < until:
                        await self._wait_for_work(until)
                    if await self._step(self._take()):
                        # Lets the loop send answers before the next step occupies the interpreter.
                        await asyncio.sleep(0)
                    else:
                        await self._wait_for_work(_now() + STARVED_REST_S)
                self._idle.set()
        except Exception as error:
            logger.exception("the loop of steps has failed")
            self._give_up(EngineLost(f"the loop of steps has failed: {error!r}"))
        finally:
            self._idle.set()

    async def _wait_for_work(self, until: float | None = None) -> None:
        """Waits until `submit`, `release`, `evict` or `close` is called, but not beyond `until`."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        self._wake.clear()

    def _take(self) -> list[StepRequest]:
        batch, unwanted, late = self._queue.take(_now())
        for work in unwanted:
            self._done(work, None)
        for work in late:
            self._refuse(work, DeadlineExceeded("the deadline passed before a step began"))
            self._leaving.setdefault(work.session_id, False)
        return batch

    async def _step(self, batch: list[StepRequest]) -> bool:
        """Runs a step, and perhaps a second step with the next items of the same sessions. If the
        step had items and none of them found pages, returns False."""
        leaving, steps = dict(self._leaving), list[_Step]()
        self._leaving.clear()
        run = partial(self._on_executor, leaving, batch, steps, asyncio.get_running_loop().time)
        failure: Exception | None = None
        self._running = batch
        self._watch.begin()
        try:
            await self._executor.run(run)
        except Exception as error:  # noqa: BLE001 - handled below
            failure = error
        self._watch.end()
        was_late, self._running = self._late is not None, ()
        if was_late:
            self._late = None
            self.health_changed.set()
        elif steps:
            self._finish(batch, steps, _now())
        unfinished = [] if steps or was_late else batch
        if isinstance(failure, EngineLost):
            self._give_up(failure, unfinished)
        elif failure is not None:
            self._note_crash(failure, unfinished)
        elif steps and self._crashes:
            self._crashes = 0
            self.health_changed.set()
        num_starved, self._num_starved = self._num_starved, self._worker.figures.num_starved
        if self._num_starved > num_starved:
            # A session may be silent because its coordinator died, or because its release was lost.
            since, waiting = _now() - limits.SILENT_SESSION_MS / 1e3, self._queue.sessions
            silent = takewhile(lambda entry: entry[1][1] <= since, self.sessions.items())
            self.evict([name for name, _ in silent if name not in waiting])
        return not steps or any(answer is not Unfinished.WAITS for answer in steps[0].answers)

    def _finish(self, batch: list[StepRequest], steps: list[_Step], now: float) -> None:
        """Handles the answers of a step, and then the answers of a second step if one has run."""
        first, *second = steps
        self._worker.note_seconds(now - steps[-1].start)
        again = {item.head.session_id for step in second for item in step.items}
        self._answer(batch, first, second[0].start if second else now, again)
        for step in second:
            # When the first step's answers were sent, `on_done` queued the items of this step.
            answers = dict(zip(map(_round_of, step.items), step.answers, strict=True))
            pairs = [
                (work, answers.pop(which))
                for work in self._queue.waiting
                if (which := _round_of(work.item)) in answers
            ]
            works = [work for work, _ in pairs]
            self._queue.remove(works)
            self._answer(works, step._replace(answers=[answer for _, answer in pairs]), now)

    def _requeue(self, works: Sequence[StepRequest]) -> None:
        """Returns requests to the queue. Cancels requests whose session was released meanwhile."""
        released = [work for work in works if self._leaving.get(work.session_id)]
        self._cancel(released)
        self._queue.requeue([work for work in works if work not in released])

    def _note_crash(self, error: Exception, batch: Sequence[StepRequest]) -> None:
        """Handles a crash of a step. If the step had one request, refuses the request. If the step
        had several, each then runs alone, to find the request that causes the crash."""
        sessions = [work.session_id for work in batch]
        logger.error("a step crashed", exc_info=error, extra=about(session_ids=sessions))
        self._crashes += 1
        self.health_changed.set()
        if self._observer is not None:
            self._observer.crashed()
        if len(batch) == 1:
            crash = OutriderError("the step crashed; the replica's log has the traceback")
            self._refuse(batch[0], crash)
            return
        for work in batch:
            work.runs_alone = True
        self._requeue(batch)

    def _give_up(self, lost: EngineLost, batch: Sequence[StepRequest] = ()) -> None:
        logger.critical("no further step can run: %s", lost)
        self.lost = lost
        self.health_changed.set()
        for work in [*batch, *self._queue.waiting]:
            self._refuse(work, lost)
        self._queue.clear()

    def _on_late_step(self, seconds: float) -> None:
        """Refuses the items of the running step and all that wait, so that their sessions move to
        other replicas. The step's answers are dropped."""
        self._late = Unavailable(f"a step has not ended in {seconds:.1f} s")
        logger.warning("no items are taken until the step ends: %s", self._late)
        self.health_changed.set()
        works = [*self._running, *self._queue.waiting]
        self._running = ()
        self._queue.clear()
        for work in works:
            self._refuse(work, self._late)
        self.evict([work.session_id for work in works])

    def _on_hung_step(self, seconds: float) -> None:
        self._give_up(EngineLost(f"a step has not ended in {seconds:.1f} s"))
        if self._task is not None:
            self._task.cancel()

    def _on_executor(
        self,
        leaving: Mapping[str, bool],
        batch: Sequence[StepRequest],
        steps: list[_Step],
        clock: Callable[[], float],
    ) -> None:
        """Runs a step, and adds it to `steps`. If the next items of all its sessions are known, and
        nothing else waits, runs a second step with these items. A quick step takes only 1.3 ms,
        so a call of the executor for each step would cost too much."""
        self._worker.leave(leaving)
        if not batch:
            return
        start, items = clock(), [work.item for work in batch]
        answers = self._run_items(items)
        steps.append(_Step(start, items, answers))
        if self._over or self._queue.waiting or self._leaving:
            return
        now = clock()
        items = [
            work.follow and work.follow(work.item, answer, now - start)
            for work, answer in zip(batch, answers, strict=True)
        ]
        if None not in items:
            # With `is_timed`, the executor sleeps after both steps, so `now - start` is too short.
            if not self._executor.is_timed:
                self._worker.note_seconds(now - start)
            steps.append(_Step(now, items, self._run_items(items)))

    def _run_items(self, items: Sequence[Any]) -> list[Any]:
        try:
            answers = self._worker.step(items)
            check(len(answers) == len(items), f"{len(answers)} answers to {len(items)} items")
        except Exception:
            # After an error, the state of the items' sessions is unknown.
            self._worker.leave({item.head.session_id: True for item in items})
            raise
        return answers

    def _answer(
        self, batch: list[StepRequest], step: _Step, end: float, again: Collection[str] = ()
    ) -> None:
        """Sends the answers of a step, and returns unfinished requests to the queue. A second step
        has already run the next items of the sessions `again`."""
        start, answers = step.start, step.answers
        frames: dict[tuple[AnswerSender, float], list[Any]] = {}
        stamped: list[Any] = []
        num_sharing = sum(answer is not Unfinished.WAITS for answer in answers)
        for work, answer in zip(batch, answers, strict=True):
            if work.started_at is None and answer is not Unfinished.WAITS:
                work.started_at = start
            timed = [_timed(part, work, end, num_sharing) for part in work.progress(answer)]
            if timed and work.session_id in self.sessions:
                self.sessions[work.session_id] = (self.sessions[work.session_id][0], end)
            stamped.append(timed[-1] if timed else work.unfinished or Unfinished.CONTINUES)
            if not work.sender.closed:
                frames.setdefault((work.sender, work.held_s), []).extend(timed)
        for (sender, held_s), frame in frames.items():
            if held_s > end - start:
                sender.hold(frame, held_s)
            else:  # The step was long, for example because it ran a part of a prompt.
                sender.send(frame)
        for work, answer in zip(batch, stamped, strict=True):
            if work.unfinished is None:
                # Must precede `_done`, which submits the next round of a session that runs ahead.
                is_last = isinstance(answer, VerdictReply | ProposalReply)
                if is_last and work.session_id not in again:
                    self._delay.answered(work.session_id, work.item.num_rows, end)
                self._done(work, None if answer is Unfinished.CONTINUES else answer)
        if not batch:
            return
        self._load_since(start).stepped(batch, start, end)
        if self._observer is not None:
            self._observer.stepped(batch, stamped, start, end)
        self._requeue([work for work in batch if work.unfinished is not None])

    def _cancel(self, works: Sequence[StepRequest]) -> None:
        for work in works:
            self._end(work, Refused(work.key, CANCELLED_CODE, "the session was released"))

    def _refuse(self, work: StepRequest, error: OutriderError) -> None:
        self._end(work, refusal(work.key, error))

    def _end(self, work: StepRequest, answer: Refused) -> None:
        work.sender.send([answer])
        self._done(work, answer)

    def _done(self, work: StepRequest, answer: Any) -> None:
        if work.timer is not None:
            work.timer.cancel()
        if work.on_done is not None:
            work.on_done(work, answer)

    def _forget(self, session_id: str) -> None:
        """Drops what a role keeps of an ended session outside the worker."""

    def _work(self, item: Any, sender: AnswerSender) -> StepRequest:
        now, left_ms = _now(), item.head.deadline_ms
        return StepRequest(item, sender, now, now + left_ms / 1e3 if left_ms else math.inf)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _round_of(item: Any) -> Any:
    """Returns the identity of an item. Items with equal identities have the same answer."""
    head = item.head
    return head.key, head.prefix_digest, head.append, getattr(item, "proposal", None)


def _timed(answer: Any, work: StepRequest, end: float, num_sharing: int) -> Any:
    """Sets the times of a verdict or proposal: how long its item waited for its first step, and how
    long the item then took until `end`. `num_sharing` items shared the last step."""
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
    def __init__(self, max_batch: int, now: float) -> None:
        """At most `max_batch` items share a step. All times are on the event loop's clock."""
        self._max_batch = max_batch
        self._sums = DecayedSums(WINDOW_S, now)

    def stepped(self, works: Sequence[StepRequest], start: float, end: float) -> None:
        began = [max(0.0, start - work.arrived_at) for work in works if work.started_at == start]
        places = min(1.0, len(works) / self._max_batch)
        amounts = {
            "steps": 1.0,
            "seconds": end - start,
            "places": places,
            "began": len(began),
            "waited": sum(began),
        }
        self._sums.add(end, amounts)

    def figures(self, now: float, step_figures: StepFigures) -> Figures:
        sums = self._sums
        step_s = sums.mean(now, "seconds", "steps")
        waited_s = sums.mean(now, "waited", "began")
        return Figures(
            busy=min(1.0, sums.rate(now, "seconds")),
            fill=sums.mean(now, "places", "steps"),
            step_ms=None if step_s is None else step_s * 1e3,
            queue_steps=waited_s / step_s if waited_s is not None and step_s else None,
            kv_usage=step_figures.pages.usage,
        )


class _Connection(AnswerSender):
    def __init__(self, service: SteppedService, send: Callable[[Sequence[Any]], None]) -> None:
        super().__init__(send)
        self._service = service

    def receive(self, items: Sequence[Any]) -> None:
        for item in items:
            self._service.take(item, self)

    def close(self) -> None:
        self.closed = True
        self._service.disconnect(self)


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
        dtype_note=info.dtype_note,
        row_coupling=info.row_coupling,
    )


_RELEASED = 2**64  # noted as a released session's newest round; larger than every round


class StaleRoundFilter:
    """Refuses rounds that are older than their session's newest round. Messages that come late or
    twice could otherwise discard what newer rounds have cached, or revive a released session.

    Remembers `RELEASES_REMEMBERED_MAX` sessions. Admits all rounds of forgotten sessions."""

    def __init__(self) -> None:
        self._asked: BoundedDict[str, tuple[int, int]] = BoundedDict(limits.RELEASES_REMEMBERED_MAX)
        """The newest epoch and round of each session. Epochs begin at 1."""

    def admit(self, head: RoundHead) -> Refused | None:
        """Notes a new round, and returns None. Returns the refusal of an old round, with the code
        ABORTED for an old epoch, and CANCELLED for an old round of the same epoch."""
        epoch, latest = self._asked.get(head.session_id, (0, 0))
        if head.epoch < epoch:
            over = StaleEpoch(f"epoch {head.epoch} is over: epoch {epoch} was seen")
            return refusal(head.key, over)
        if head.epoch == epoch and head.round < latest:
            newer = f"round {latest} was requested"
            why = "the session was released" if latest == _RELEASED else newer
            return Refused(head.key, CANCELLED_CODE, f"round {head.round} is over: {why}")
        self._asked[head.session_id] = (head.epoch, head.round)
        return None

    def release(self, session_id: str, epoch: int) -> bool:
        """Ends all rounds of the epoch, future rounds included. If a newer epoch was seen, does
        nothing and returns False."""
        newest, _ = self._asked.get(session_id, (0, 0))
        if newest > epoch:
            return False
        self._asked[session_id] = (epoch, _RELEASED)
        return True
