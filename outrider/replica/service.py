"""The base of the services of drafts and targets. Coordinators send *items*, each for one round of
a session. Items that arrive during a *step* share the next step, so batches grow with load.

    event loop (`SteppedService`)          driver, usually a thread (`StepLoop`)
    receives, decodes and refuses items    takes messages, admits items
        messages ->                        runs a step, forms the sessions' next requests
    sends answers                          <- outcomes, while the next step runs

Neither waits for the other. Only the driver touches the state of the `StepLoop`, and only the event
loop ends requests. If a step hangs, the event loop refuses its requests."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Generic

from outrider import limits
from outrider.errors import EngineLost, OutriderError, Overloaded, StaleEpoch, Unavailable
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.decayed_average import DecayedSums
from outrider.grammar.compiler import Grammars
from outrider.grammar.constraint import Constraint
from outrider.interfaces.engine import ModelInfo
from outrider.interfaces.messages import (
    Item,
    Prefix,
    Refused,
    ReplicaDescription,
    RoundAnswer,
    RoundHead,
)
from outrider.interfaces.step_costs import StepCosts
from outrider.registry.registry import WINDOW_S, Figures
from outrider.replica.drivers import StepDriver
from outrider.replica.step_loop import (
    Arrival,
    Eviction,
    Message,
    Outcome,
    Prepared,
    Progress,
    Release,
    StepLoop,
    Withdrawal,
)
from outrider.replica.step_request import (
    CANCELLED_CODE,
    AnswerSender,
    StepFigures,
    StepRequest,
    refusal,
)
from outrider.replica.step_watch import StepWatch
from outrider.transport.link import Connection, ReplicaService

if TYPE_CHECKING:
    from outrider.replica.step_spans import ObservedSteps

logger = logging.getLogger(__name__)


class SteppedService(ReplicaService[Item], Generic[Item]):
    """Serves any number of connections with one `StepLoop`, which runs items in batches of distinct
    sessions. If a step has several answers for a connection, sends them in one call. All methods
    must be called on the event loop's thread.

    A request is open from its arrival until its end. Only this class ends requests: progress of a
    request that is no longer open is dropped."""

    def __init__(
        self,
        steps: StepLoop[Item, Prepared],
        driver: StepDriver,
        description: ReplicaDescription,
        grammars: Grammars | None = None,
    ) -> None:
        """An item with a new constraint waits until `grammars` have compiled it, so that no step
        compiles a grammar. Without `grammars`, constraints are not compiled."""
        self._driver, self._description, self._grammars = driver, description, grammars
        self._begin = partial(driver.start, steps, self._hear, self._steps_ended)
        self._queue, self._worker = steps.queue, steps.worker
        self._send: Callable[[Message[Item]], None] | None = None
        """What `driver.start` has returned. Lets the thread of the steps call `StepLoop.receive`.
        None before the first message."""
        self._num_sent = 0
        self._observer: ObservedSteps | None = None
        self.num_items = 0
        self.sessions: BoundedDict[str, tuple[AnswerSender, float]] = BoundedDict(
            limits.SEQUENCES_PER_REPLICA_MAX
        )
        """For each session, the connection of its last item, and the time of its last item or
        answer. Sessions with the oldest times come first."""
        self._open: dict[str, dict[StepRequest[Item], None]] = {}
        """The open requests of each session, the oldest first."""
        self._num_open = 0
        self._filter = StaleRoundFilter()
        self._compiling: set[asyncio.Task[None]] = set()
        self._load: StepLoad | None = None
        self._closing = False
        self.lost: EngineLost | None = None  # why no more steps can run; None while steps can run
        self._late: Unavailable | None = None  # why items are refused; None unless a step is late
        self._late_since = -math.inf  # when the late step began
        self._watch = StepWatch(
            steps.worker.expected,
            lambda: driver.running_since,
            driver.may_compile,
            self._on_late_step,
            self._on_hung_step,
        )
        self._crashes = 0
        self.health_changed = asyncio.Event()  # set when `healthy` or `lost` may change
        self._idle, self._ended = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def connect(self, send: Callable[[Sequence[RoundAnswer]], None]) -> Connection[Item]:
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

    def take(self, item: Item, sender: AnswerSender) -> None:
        """Accepts an item, or refuses it if its round is over. Never waits."""
        self.num_items += 1
        work = self._work(item, sender)
        if self._is_stale(work):
            return
        self.sessions[work.session_id] = (sender, work.arrived_at)
        grammars, head = self._grammars, item.head
        if head.constraint is not None and grammars is not None:
            work.grammar = grammars.find(head.constraint_hash, head.tenant)
            if work.grammar is None:
                task = asyncio.create_task(self._compile(grammars, head.constraint, work))
                self._compiling.add(task)
                task.add_done_callback(self._compiling.discard)
                return
        self.submit(work)

    def _work(self, item: Item, sender: AnswerSender) -> StepRequest[Item]:
        now, left_ms = _now(), item.head.deadline_ms
        return StepRequest(item, sender, now, now + left_ms / 1e3 if left_ms else math.inf)

    def _is_stale(self, work: StepRequest[Item]) -> bool:
        """Whether a request's round is over. If it is, refuses the request. Otherwise notes the
        round as the newest of its session."""
        stale = self._filter.admit(work.item.head)
        if stale is not None:
            if self._observer is not None:
                self._observer.stale()
            self._end(work, stale)
        return stale is not None

    async def _compile(
        self, grammars: Grammars, constraint: Constraint, work: StepRequest[Item]
    ) -> None:
        """Submits a request after its constraint is compiled, unless its round is over by then. If
        the constraint is invalid, the request has the error in place of the grammar."""
        try:
            work.grammar = await grammars.prepare(constraint, work.item.head.tenant)
        except Overloaded as error:
            self._refuse(work, error)
            return
        except OutriderError as error:
            logger.info("a constraint cannot be used: %s", error)
            work.grammar = error
        except Exception:
            logger.exception("a constraint could not be compiled")
            self._refuse(work, OutriderError("the constraint could not be compiled"))
            return
        if not self._is_stale(work):
            self.submit(work)

    def submit(self, work: StepRequest[Item]) -> None:
        """Opens a request. Refuses it if too many requests wait, if a step is late, or if no more
        steps can run."""
        if self._over or self._late is not None:
            reason = self.lost or self._late or Unavailable("this replica is stopping")
            self._refuse(work, reason)
        elif self._is_full():
            most = limits.STREAM_QUEUE_ITEMS_MAX
            self._refuse(work, Overloaded(f"{most} items wait for a step of this replica"))
        else:
            self._note_open(work)
            self._post(Arrival(work))

    def _is_full(self) -> bool:
        most = limits.STREAM_QUEUE_ITEMS_MAX
        if self._num_open < most:
            return False
        return sum(not work.answered for works in self._open.values() for work in works) >= most

    def release(self, session_id: str, epoch: int, learned: Prefix | None = None) -> None:
        """Cancels the session's requests, and lets the worker forget the session before the next
        step, after it has learned the tokens `learned`. Does nothing if a newer epoch of the
        session was seen."""
        if not self._filter.release(session_id, epoch):
            return
        for work in [*self._open.get(session_id, ())]:
            self._end(work, Refused(work.key, CANCELLED_CODE, "the session was released"))
        self.sessions.pop(session_id, None)
        self._post(Release(session_id, learned))

    def disconnect(self, sender: AnswerSender) -> None:
        """Calls `evict` for the sessions whose last item came over this closed connection."""
        self.evict([name for name, (last, _) in self.sessions.items() if last is sender])

    def evict(self, session_ids: Sequence[str]) -> None:
        """Frees the pages of these sessions before the next step."""
        for session_id in session_ids:
            self.sessions.pop(session_id, None)
        if session_ids:
            self._post(Eviction(session_ids))

    async def drain(self) -> None:
        """Returns when no item waits and no step runs, so that a stop loses no answer."""
        while self._compiling:
            await asyncio.wait(self._compiling)
        await self._idle.wait()

    async def close(self) -> None:
        """Drops waiting requests, and waits for the running step. If the engine is lost, does not
        wait, because the step may hang."""
        for task in self._compiling:
            task.cancel()
        if self._grammars is not None:
            self._grammars.close()
        self._closing = True
        self._driver.stop()
        if self._send is not None:
            await self._ended.wait()
        self._watch.end()
        for work in self._all_open():
            self._done(work)

    @property
    def _over(self) -> bool:
        return self._closing or self.lost is not None

    def _post(self, message: Message[Item]) -> None:
        """Sends a message to the loop of steps, which is started with the first message."""
        if self._over:
            return
        if self._send is None:
            self._send = self._begin()
        self._num_sent += 1
        self._idle.clear()
        self._watch.begin()
        self._send(message)

    def _hear(self, outcome: Outcome[Item]) -> None:
        """Sends the answers of a step."""
        if self.lost is not None:
            return
        try:
            self._note(outcome)
        except Exception as error:
            logger.exception("the loop of steps has failed")
            self._give_up(EngineLost(f"the loop of steps has failed: {error!r}"))

    def _note(self, outcome: Outcome[Item]) -> None:
        now = outcome.ended_at
        if outcome.expected is not None:
            self._watch.note(outcome.started_at, now, outcome.expected)
        if self._late is not None and outcome.started_at >= self._late_since:
            self._late = None
            self.health_changed.set()
        self._send_answers([*outcome.ended, *outcome.progress], now)
        if outcome.progress:
            works = [one.work for one in outcome.progress]
            self._load_since(outcome.started_at).stepped(works, outcome.started_at, now)
            if self._observer is not None:
                results = [one.result for one in outcome.progress]
                self._observer.stepped(works, results, outcome.started_at, now)
        if isinstance(outcome.failure, EngineLost):
            self._give_up(outcome.failure)
            return
        if outcome.failure is not None:
            self._crashes += 1
            self.health_changed.set()
            if self._observer is not None:
                self._observer.crashed()
        elif outcome.progress and self._crashes:
            self._crashes = 0
            self.health_changed.set()
        if outcome.is_starved:
            self._evict_silent(now)
        if outcome.is_idle and outcome.num_received == self._num_sent:
            self._watch.end()
            self._idle.set()

    def _send_answers(self, progress: Sequence[Progress[Item]], now: float) -> None:
        frames: dict[tuple[AnswerSender, float], list[RoundAnswer]] = {}
        for one in progress:
            work = one.work
            session_id, sender = work.session_id, work.sender
            if work not in self._open.get(session_id, ()):
                continue
            if one.answers and session_id in self.sessions:
                self.sessions[session_id] = (self.sessions[session_id][0], now)
            if one.then is not None:
                self._note_open(one.then)
            if one.unfinished is None:
                self._done(work)
            if one.answers:
                frames.setdefault((sender, one.held_s), []).extend(one.answers)
        for (sender, held_s), frame in frames.items():
            if held_s > 0:
                sender.hold(frame, held_s)
            else:
                sender.send(frame)

    def _evict_silent(self, now: float) -> None:
        """A session may be silent because its coordinator died, or because its release was lost."""
        since = now - limits.SILENT_SESSION_MS / 1e3
        silent = takewhile(lambda entry: entry[1][1] <= since, self.sessions.items())
        self.evict([name for name, _ in silent if name not in self._open])

    def _steps_ended(self, error: Exception | None) -> None:
        """Called when the loop of steps has ended, because it was stopped or has failed."""
        if isinstance(error, EngineLost):
            self._give_up(error)
        elif error is not None:
            logger.error("the loop of steps has failed", exc_info=error)
            self._give_up(EngineLost(f"the loop of steps has failed: {error!r}"))
        self._idle.set()
        self._ended.set()

    def _give_up(self, lost: EngineLost) -> None:
        logger.critical("no further step can run: %s", lost)
        self.lost = lost
        self.health_changed.set()
        for work in self._all_open():
            self._refuse(work, lost)
        self._driver.stop(at_once=True)
        self._idle.set()
        self._ended.set()

    def _on_late_step(self, seconds: float) -> None:
        """Refuses all open requests, so that their sessions move to other replicas. The step's
        answers are dropped."""
        self._late = Unavailable(f"a step has not ended in {seconds:.1f} s")
        self._late_since = self._driver.running_since or -math.inf
        logger.warning("no items are taken until the step ends: %s", self._late)
        self.health_changed.set()
        works = self._all_open()
        for work in works:
            self._refuse(work, self._late)
        for work in works:
            self.sessions.pop(work.session_id, None)
        self._post(Withdrawal([work.session_id for work in works]))

    def _on_hung_step(self, seconds: float) -> None:
        self._give_up(EngineLost(f"a step has not ended in {seconds:.1f} s"))

    def _all_open(self) -> list[StepRequest[Item]]:
        return [work for works in self._open.values() for work in works]

    def _refuse(self, work: StepRequest[Item], error: OutriderError) -> None:
        self._end(work, refusal(work.key, error))

    def _end(self, work: StepRequest[Item], answer: Refused) -> None:
        """Ends a request, which may not have been opened."""
        self._done(work)
        work.sender.send([answer])

    def _note_open(self, work: StepRequest[Item]) -> None:
        self._open.setdefault(work.session_id, {})[work] = None
        self._num_open += 1

    def _done(self, work: StepRequest[Item]) -> None:
        if work.timer is not None:
            work.timer.cancel()
        own = self._open.get(work.session_id, {})
        if work in own:
            self._num_open -= 1
            del own[work]
            if not own:
                del self._open[work.session_id]


def _now() -> float:
    return asyncio.get_running_loop().time()


class StepLoad:
    def __init__(self, max_batch: int, now: float) -> None:
        """At most `max_batch` items share a step. All times are on the event loop's clock."""
        self._max_batch = max_batch
        self._sums = DecayedSums(WINDOW_S, now)

    def stepped(self, works: Sequence[StepRequest[Item]], start: float, end: float) -> None:
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


class _Connection(AnswerSender, Generic[Item]):
    def __init__(
        self, service: SteppedService[Item], send: Callable[[Sequence[RoundAnswer]], None]
    ) -> None:
        super().__init__(send)
        self._service = service

    def receive(self, items: Sequence[Item]) -> None:
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
        kernels=info.kernels,
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
