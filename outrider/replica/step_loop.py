"""The loop of a replica's steps: which requests share a step, and what a step means for them.

A driver (`outrider.replica.drivers`) calls the methods of a `StepLoop` again and again:

    receive         takes what has arrived
    schedule        frees pages, chooses requests, and admits them
    launch          begins the step on the engine
    report          forms the answers of the step before, while the engine computes; or before
                    `launch`, if callers wait for an answer
    receive         takes what has arrived since
    wait            prepares what is known of the next step, waits for the engine, and computes
                    verdicts or proposals
    postprocess     forms the sessions' next requests

Between two steps, the engine waits for `postprocess`, `receive` and `schedule`. So these do no more
than the next step needs. A `StepLoop` has no thread and no clock. All times are seconds on the
event loop's clock."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from outrider import limits
from outrider.errors import DeadlineExceeded, EngineLost, OutriderError, check
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.logs import about
from outrider.foundation.values import completed
from outrider.interfaces.messages import (
    Item,
    Prefix,
    ProposalReply,
    Refused,
    RoundAnswer,
    VerdictReply,
)
from outrider.replica.batching_delay import BatchingDelay
from outrider.replica.step_request import (
    RequestQueue,
    StepAnswer,
    StepFigures,
    StepRequest,
    Unfinished,
    refusal,
)
from outrider.replica.step_watch import ExpectedStep

logger = logging.getLogger(__name__)
Prepared = TypeVar("Prepared")

STARVED_REST_S = 0.1
"""If a step finds no pages of keys and values for any item, the next step begins at most this much
later. By then, pages of expired or silent sessions may be free."""


class Worker(ABC, Generic[Item, Prepared]):
    """Runs the steps of one engine: the `Verifier` of a target (`target_service/verifier.py`), or
    the `Proposer` of a draft (`draft_service/service.py`)."""

    figures: StepFigures

    @abstractmethod
    def prepare(self, requests: Sequence[StepRequest[Item]]) -> Sequence[Prepared]:
        """Admits the items of a step, or answers them. The items are of distinct sessions, and in
        order of arrival."""

    @abstractmethod
    def launch(self, prepared: Sequence[Prepared]) -> Callable[[], Sequence[StepAnswer]]:
        """Begins to run the admitted items. Returns a function that ends this, and answers each
        item. If an item causes an error, only this item gets `Refused`. Both raise `EngineLost` if
        no more steps can run. Between the two calls, no other methods but `expect`, `expected`
        and `learn` may be called."""

    def expect(self, item: Item) -> None:
        """Validates an item that will probably be in the next step. May be called while a step
        runs. The tokens that the item appends may change until `prepare`."""

    def learn(self, session_id: str, learned: Prefix) -> None:
        """Lets the look-up, if there is one, learn the first tokens of a session that has ended.
        May be called while a step runs, before `leave`."""

    @abstractmethod
    def leave(self, session_ids: Mapping[str, bool]) -> None:
        """Frees the slots of sessions. Forgets a session if it is over (value True)."""

    @abstractmethod
    def note_seconds(self, seconds: float) -> None:
        """Notes the time of the last step."""

    @abstractmethod
    def expected(self) -> ExpectedStep:
        """Returns what is expected of the last step that was prepared. Any thread may call this."""


class Arrival(NamedTuple, Generic[Item]):
    work: StepRequest[Item]


class Release(NamedTuple):
    """The session is over."""

    session_id: str
    learned: Prefix | None = None
    """The tokens that a look-up may learn."""


class Eviction(NamedTuple):
    """These sessions' pages are no longer needed."""

    session_ids: Sequence[str]


class Withdrawal(NamedTuple):
    """No caller wants the answers to requests that arrived before, which are of these sessions."""

    session_ids: Sequence[str]


Message = Arrival[Item] | Release | Eviction | Withdrawal


class Progress(NamedTuple, Generic[Item]):
    """What has become of a request."""

    work: StepRequest[Item]
    answers: Sequence[RoundAnswer]
    unfinished: Unfinished | None = None
    """Why the request stays in the queue; None if it has ended."""
    held_s: float = 0.0
    """How long the answers may wait to share a message with others."""
    then: StepRequest[Item] | None = None
    """The session's next request, which was formed from the answer and is in the queue."""

    @property
    def result(self) -> RoundAnswer | Unfinished:
        """The last answer. If there is none, why the request has none."""
        return self.answers[-1] if self.answers else self.unfinished or Unfinished.CONTINUES


class Step(Generic[Item, Prepared]):
    """One turn of the loop. Has no requests if none is due."""

    def __init__(self, started_at: float, num_received: int) -> None:
        self.started_at, self.num_received = started_at, num_received
        self.works: Sequence[StepRequest[Item]] = ()
        self.prepared: Sequence[Prepared] = ()
        self.results: Callable[[], Sequence[StepAnswer]] = tuple  # what `Worker.launch` returned
        self.answers: Sequence[StepAnswer] = ()
        self.failure: Exception | None = None


@dataclass(frozen=True)
class Outcome(Generic[Item]):
    """What the event loop must know of a turn of the loop."""

    started_at: float
    ended_at: float
    ended: Sequence[Progress[Item]]
    """Requests that ended without an answer of the engine."""
    progress: Sequence[Progress[Item]]
    """The requests of the step, unless it crashed."""
    expected: ExpectedStep | None
    """What was expected of the step; None if the turn had no step."""
    failure: Exception | None
    """Why the step crashed. After `EngineLost`, no more steps can run."""
    is_starved: bool
    """Whether a request found no pages."""
    num_received: int
    """Number of messages that the loop has received so far."""
    is_idle: bool
    """Whether no request is left."""


class Continuation(Generic[Item]):
    """What a role makes of a session's requests. This base class only queues them, for drafts.
    Targets have `RunAheads` (`target_service/run_ahead.py`)."""

    def arrived(self, work: StepRequest[Item], steps: StepLoop[Item, Prepared]) -> None:
        """Takes a request from a coordinator. Must call `enqueue` or `end` of `steps` with it."""
        steps.enqueue(work)

    def answered(
        self, work: StepRequest[Item], answer: RoundAnswer | None, now: float
    ) -> tuple[StepRequest[Item] | None, float]:
        """Called when a request ends, with its last answer. Returns the session's next request
        (None = the coordinator sends it), and how long the answer may wait for others, s."""
        return None, 0.0

    def foresee(self, work: StepRequest[Item]) -> Item | None:
        """Called while a step runs, with each of its requests. Returns the session's next item, if
        it is known except for what the step will say."""
        return None

    def forget(self, session_id: str) -> None:
        """Drops what is known of a session. The caller drops its requests."""


class StepLoop(Generic[Item, Prepared]):
    """Owns the queue of requests, and all state that changes from step to step. Only one thread at
    a time may call it."""

    def __init__(
        self,
        worker: Worker[Item, Prepared],
        max_num_seqs: int,
        seconds: Callable[[int, int], float] = lambda rows, sessions: 0.0,
        continuation: Continuation[Item] | None = None,
    ) -> None:
        """At most `max_num_seqs` sessions share a step. `seconds(rows, sessions)` is the expected
        duration of a step with this number of tokens and sessions. If it is above 0, the step may
        wait for sessions whose next items are expected soon (`BatchingDelay`)."""
        self.worker = worker
        self.due_at = math.inf
        """When `schedule` must be called next, if nothing arrives before."""
        self.queue = RequestQueue[Item](max_num_seqs)
        self._continuation = continuation or Continuation[Item]()
        self._delay = BatchingDelay(seconds, max_num_seqs)
        self._held_until: float | None = None  # None unless the next step waits for sessions
        self._rests_until = -math.inf
        self._running: dict[str, StepRequest[Item]] = {}
        """The requests of the step by session, except those that are no longer wanted."""
        self._unreported: Callable[[], Outcome[Item]] | None = None
        self.is_awaited = False
        """Whether callers wait for answers that `report` would return. If not, their sessions go on
        by themselves."""
        self._leaving: BoundedDict[str, bool] = BoundedDict(limits.SEQUENCES_PER_REPLICA_MAX)
        """Sessions that the worker forgets (True), or whose pages it frees (False), before the next
        step. Beyond the limit, drops the oldest entry. Its pages are freed on demand."""
        self._ended: list[Progress[Item]] = []
        self._num_received = 0
        self._has_received = False  # whether a message came after the last outcome
        self._num_starved = 0  # value of the worker's `figures.num_starved` after the last step

    def receive(self, message: Message[Item]) -> None:
        """Takes a message. Messages must come in the order in which they were sent. While a step
        runs, this changes neither pages nor engine. If the session of a running request is
        released, or the request is cancelled or withdrawn, what the step says of it is dropped. All
        other messages take effect when the step has ended."""
        self._num_received += 1
        self._has_received = True
        self._rests_until = -math.inf
        match message:
            case Arrival(work):
                self._continuation.arrived(work, self)
            case Release(session_id, learned):
                if learned is not None:
                    self.worker.learn(session_id, learned)
                self.queue.drop(session_id)
                self._running.pop(session_id, None)
                self._continuation.forget(session_id)
                self._delay.forget(session_id)
                self._leaving[session_id] = True
            case Eviction(session_ids):
                self._evict(session_ids)
            case Withdrawal(session_ids):
                for work in (*self.queue.waiting, *self._running.values()):
                    self._continuation.forget(work.session_id)
                self.queue.clear()
                self._running.clear()
                self._evict(session_ids)

    def enqueue(self, work: StepRequest[Item]) -> None:
        """Lets a request wait for a step."""
        if self._running:
            self._expect(work.item)
        self.queue.add(work)
        self._delay.arrived(work.session_id, work.arrived_at)

    def _expect(self, item: Item) -> None:
        with suppress(Exception):  # The step with this item will raise it again.
            self.worker.expect(item)

    def end(
        self,
        work: StepRequest[Item],
        answers: Sequence[RoundAnswer] = (),
        then: StepRequest[Item] | None = None,
    ) -> None:
        """Ends a request that is not in the queue without a step, with these answers. `then` is the
        session's next request, if it was enqueued."""
        self._ended.append(Progress(work, answers, then=then))

    def cancel(self, work: StepRequest[Item], answers: Sequence[RoundAnswer]) -> None:
        """Ends a request that waits or runs."""
        if self._running.get(work.session_id) is work:
            del self._running[work.session_id]
        else:
            self.queue.remove([work])
        self.end(work, answers)

    def schedule(self, now: float) -> Step[Item, Prepared]:
        """Begins a step. If no step is due, the step has no requests, and only frees pages."""
        step = Step[Item, Prepared](now, self._num_received)
        if self._is_due(now):
            step.works, unwanted, late = self.queue.take(now)
            for work in unwanted:
                self._end(work, now)
            for work in late:
                error = DeadlineExceeded("the deadline passed before a step began")
                self._end(work, now, refusal(work.key, error))
                self._leaving.setdefault(work.session_id, False)
            self._running = {work.session_id: work for work in step.works}
        leaving = dict(self._leaving)
        self._leaving.clear()
        try:
            if leaving:
                self.worker.leave(leaving)
            if step.works:
                step.prepared = self.worker.prepare(step.works)
        except Exception as error:  # noqa: BLE001 - `postprocess` handles it
            step.failure = error
        return step

    def _is_due(self, now: float) -> bool:
        """Whether a step with requests begins now. Otherwise sets `due_at`."""
        self.due_at = math.inf
        if not self.queue.waiting:
            self._held_until = None
            return False
        if now < self._rests_until:
            self.due_at = self._rests_until
            return False
        if self._held_until is None:
            self._held_until = self._delay.hold(now, self.queue.rows)
        if self._delay.awaited and now < self._held_until:
            self.due_at = self._held_until
            return False
        self._held_until = None
        return True

    def launch(self, step: Step[Item, Prepared]) -> None:
        """Begins to run a step with requests."""
        if step.failure is not None:
            return
        try:
            step.results = self.worker.launch(step.prepared)
        except Exception as error:  # noqa: BLE001 - `postprocess` handles it
            step.failure = error

    def wait(self, step: Step[Item, Prepared]) -> None:
        """Prepares what is known of the next step, and waits until this step has run."""
        if step.failure is not None:
            return
        try:
            for work in self._running.values():
                if (item := self._continuation.foresee(work)) is not None:
                    self._expect(item)
            step.answers = step.results()
            num, wanted = len(step.answers), len(step.works)
            check(num == wanted, f"{num} answers to {wanted} items")
        except Exception as error:  # noqa: BLE001 - `postprocess` handles it
            step.failure = error

    def postprocess(self, step: Step[Item, Prepared], now: float) -> None:
        """Ends a step. `report` must be called before the next step ends."""
        check(self._unreported is None, "the step before was not reported")
        progress: list[Progress[Item]] = []
        if step.failure is not None:
            self._note_failure(step, now)
        elif step.works:
            self.worker.note_seconds(now - step.started_at)
            progress = self._note_answers(step, now)
        self._running = {}
        if step.works and self.queue.waiting:
            is_rest = self._num_received == step.num_received and bool(progress)
            is_rest = is_rest and all(one.unfinished is Unfinished.WAITS for one in progress)
            self._rests_until = now + STARVED_REST_S if is_rest else -math.inf
            self.due_at = max(now, self._rests_until)
        if step.works and self._leaving:
            self.due_at = now  # Frees the pages even if no step follows.
        num_starved, self._num_starved = self._num_starved, self.worker.figures.num_starved
        ended, self._ended = self._ended, []
        is_idle = not self.queue.waiting
        if step.works or step.failure or ended or (is_idle and self._has_received):
            self._has_received = False
            self.is_awaited = any(one.answers and not one.then for one in (*ended, *progress))
            outcome = Outcome(
                step.started_at,
                now,
                ended,
                progress,
                self.worker.expected() if step.works else None,
                step.failure,
                self._num_starved > num_starved,
                self._num_received,
                is_idle,
            )
            self._unreported = partial(_with_times, outcome, step.answers)

    def report(self) -> Outcome[Item] | None:
        """Returns what the event loop must know of the step that has ended last. Returns None if
        this is nothing, or if it was returned before."""
        unreported, self._unreported, self.is_awaited = self._unreported, None, False
        return None if unreported is None else unreported()

    def _note_failure(self, step: Step[Item, Prepared], now: float) -> None:
        """Handles a crash of a step. If the step had one request, refuses the request. If the step
        had several, each then runs alone, to find the request that causes the crash."""
        sessions = [work.session_id for work in step.works]
        # After an error, the state of the items' sessions is unknown.
        self.worker.leave(dict.fromkeys(sessions, True))
        if isinstance(step.failure, EngineLost):
            return
        logger.error("a step crashed", exc_info=step.failure, extra=about(session_ids=sessions))
        crash = OutriderError("the step crashed; the replica's log has the traceback")
        wanted = [work for work in step.works if self._is_wanted(work)]
        for work in wanted:
            work.runs_alone = True
            if len(step.works) == 1:
                self._end(work, now, refusal(work.key, crash))
        if len(step.works) > 1:
            self.queue.requeue(wanted)

    def _is_wanted(self, work: StepRequest[Item]) -> bool:
        """Whether a request of the step is still wanted."""
        return self._running.get(work.session_id) is work

    def _note_answers(self, step: Step[Item, Prepared], now: float) -> list[Progress[Item]]:
        """Notes the answers of a step. Forms the sessions' next requests, and returns unfinished
        requests to the queue."""
        progress: list[Progress[Item]] = []
        for work, answer in zip(step.works, step.answers, strict=True):
            if not self._is_wanted(work):
                continue
            if work.started_at is None and answer is not Unfinished.WAITS:
                work.started_at = step.started_at
            answers = work.progress(answer)
            if work.unfinished is not None:
                progress.append(Progress(work, answers, work.unfinished))
                continue
            last = answers[-1] if answers else None
            then, held_s = self._continuation.answered(work, last, now)
            if then is not None:
                self.queue.add(then)
            elif isinstance(last, VerdictReply | ProposalReply) and not self.queue.has(work):
                self._delay.answered(work.session_id, work.item.num_rows, now)
            if held_s <= now - step.started_at:
                held_s = 0.0  # The step was long, for example because it ran a part of a prompt.
            progress.append(Progress(work, answers, None, held_s, then))
        self.queue.requeue([one.work for one in progress if one.unfinished is not None])
        return progress

    def _end(self, work: StepRequest[Item], now: float, answer: Refused | None = None) -> None:
        self._continuation.answered(work, answer, now)
        self.end(work, () if answer is None else (answer,))

    def _evict(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._leaving.setdefault(session_id, False)


def _with_times(outcome: Outcome[Item], answers: Sequence[StepAnswer]) -> Outcome[Item]:
    """Sets the times of the verdicts and proposals in a step's outcome: how long an item waited for
    its first step, and how long it then took until the end. Returns the outcome. `answers` are
    those of all items that shared the step. Nothing has read the times so far."""
    num_sharing = sum(answer is not Unfinished.WAITS for answer in answers)
    end = outcome.ended_at
    for work, own, *_ in outcome.progress:
        started_at = end if work.started_at is None else work.started_at
        queue_ms = max(0.0, started_at - work.arrived_at) * 1000
        compute_ms = (end - started_at) * 1000
        for answer in own:
            if isinstance(answer, VerdictReply):
                completed(answer, queue_ms=queue_ms, compute_ms=compute_ms)
            elif isinstance(answer, ProposalReply):
                work_ms = compute_ms / num_sharing
                completed(answer, queue_ms=queue_ms, compute_ms=compute_ms, work_ms=work_ms)
    return outcome
