"""The step scheduler that draft and target share: one step at a time over everything that waits.

    event loop                                          executor (a thread, or inline)
    submit, release, take a batch, send answers         the worker's step, release, recover

A worker's state belongs to the executor's side and is touched nowhere else. While a step runs, what
arrives is queued for the next one, so batches grow with load and no item waits for a timer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.decayed_average import DecayedSums
from outrider.errors import (
    DeadlineExceeded,
    EngineLost,
    OutriderError,
    Overloaded,
    Unavailable,
    check,
)
from outrider.limits import SEQUENCES_PER_REPLICA_MAX, STEP_CRASHES_UNHEALTHY, STEP_S_MAX
from outrider.messages import ProposalReply, Refused, VerdictReply
from outrider.registry.registry import NO_FIGURES, WINDOW_S, Figures
from outrider.replica.batching_delay import BatchingDelay
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

if TYPE_CHECKING:
    from outrider.telemetry.step_spans import ObservedSteps

logger = logging.getLogger(__name__)

STARVED_REST_S = 0.1
"""After a step in which nothing found pages, the next one follows when something has changed, but
no later than this: a deadline may have passed, or a session fallen silent."""


class StepScheduler:
    """Queues work, forms batches of distinct sessions in order of arrival, runs them, and sends
    each connection its answers of a step in one call. Starts with the first `submit`."""

    def __init__(
        self,
        executor: StepExecutor,
        worker: StepWorker,
        *,
        max_batch: int,
        note_seconds: Callable[[float], None] | None = None,
        batching_delay: BatchingDelay | None = None,
    ) -> None:
        """`note_seconds` gets, between steps, how long the last one took that ran items. With
        `batching_delay` a step may wait for sessions that will soon want it too."""
        self._executor = executor
        self._worker = worker
        self._observer: ObservedSteps | None = None
        self._note_seconds = note_seconds
        self._batching_delay = batching_delay
        self._queue = RequestQueue(max_batch)
        self._max_batch = max_batch
        self._load: StepLoad | None = None
        self._releases: dict[str, int] = {}
        """session -> the newest epoch of it that is to be forgotten before the next step."""
        self._parked: dict[str, None] = {}
        """Sessions without a waiting connection, for `StepWorker.park` before the next step."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.lost: EngineLost | None = None
        """Why no step can follow any more; None while one can."""
        self._crashes = 0
        self.health_changed = asyncio.Event()
        """Set where `healthy` or `lost` may have changed; cleared by its one reader."""
        self._num_starved = 0
        """As the worker's figures were behind the last step."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def healthy(self) -> bool:
        """False once `STEP_CRASHES_UNHEALTHY` steps in a row have crashed, or none can follow."""
        stopped = self._over or (self._task is not None and self._task.done())
        return self._crashes < STEP_CRASHES_UNHEALTHY and not stopped

    @property
    def figures(self) -> Figures:
        """Of the last `WINDOW_S`."""
        if self._load is None:
            return NO_FIGURES
        return self._load.figures(asyncio.get_running_loop().time(), self._worker.figures)

    def observe(self, observer: ObservedSteps) -> None:
        """Tells it what the steps do from now on."""
        self._observer = observer
        observer.watch(lambda: len(self._queue), lambda: self._worker.figures)

    def _starved(self, waiting: Collection[str]) -> None:
        """Items of a step found no pages: may `park` other sessions than those that are
        `waiting`."""

    def submit(self, work: StepRequest) -> None:
        """Queues work; see `RequestQueue.add`. Refuses it when the queue is full, once closed, and
        where no step can follow."""
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
        """Drops the session's queued work and forgets it before the next step. At most
        `SEQUENCES_PER_REPLICA_MAX` sessions wait to be forgotten; the oldest of more is left to be
        evicted."""
        if epoch <= self._releases.get(session_id, 0):
            return  # Nothing has come since the last one.
        for work in self._queue.of_session(session_id, epoch):
            self._cancel(work)
        self._releases[session_id] = epoch
        if self._batching_delay is not None:
            self._batching_delay.forget(session_id)
        if len(self._releases) > SEQUENCES_PER_REPLICA_MAX:
            del self._releases[next(iter(self._releases))]
        self._start()

    def park(self, session_ids: Sequence[str]) -> None:
        """No connection waits for these sessions any more: from the next step on their pages may be
        taken."""
        if session_ids:
            self._parked.update(dict.fromkeys(session_ids))
            self._start()

    async def drain(self) -> None:
        """Returns when nothing waits and nothing runs: before a stop that loses no answer."""
        await self._idle.wait()

    async def close(self) -> None:
        """Waits for the running step, unless it may hang, drops what waits, and closes the
        executor."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
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
                        # The answers leave before the next step claims the interpreter.
                        await asyncio.sleep(0)
                    else:
                        await self._rest()
                self._idle.set()
        finally:
            self._idle.set()

    async def _gather(self, batching_delay: BatchingDelay) -> None:
        """Until the next step should begin."""
        until = batching_delay.hold(asyncio.get_running_loop().time(), self._queue.rows)
        try:
            async with asyncio.timeout_at(until):
                while batching_delay.awaited and not self._over:
                    await self._wake.wait()
                    self._wake.clear()
        except TimeoutError:
            return

    async def _rest(self) -> None:
        """Until something has changed for those that wait for pages."""
        try:
            async with asyncio.timeout(STARVED_REST_S):
                await self._wake.wait()
        except TimeoutError:
            return
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
        """Runs a step; False if it came to nothing for want of pages."""
        releases, self._releases = self._releases, {}
        parked, self._parked = list(self._parked), {}
        if not batch and not releases and not parked:
            return True
        loop = asyncio.get_running_loop()
        start = loop.time()
        items = [work.item for work in batch]
        try:
            answers = await self._run_on_executor(releases, parked, items)
        except EngineLost as lost:
            self._give_up(lost, batch)
            return True
        except Exception:
            sessions = [item.head.session_id for item in items]
            logger.exception(
                "a step of %d items crashed", len(batch), extra=about(session_ids=sessions)
            )
            self._crashed(batch)
            return True
        end = loop.time()
        if batch:
            if self._crashes:
                self._crashes = 0
                self.health_changed.set()
            if self._note_seconds is not None:
                self._note_seconds(end - start)
        self._answer(batch, answers, start, end)
        self._put_back([work for work in batch if work.unfinished is not None])
        num_starved, self._num_starved = self._num_starved, self._worker.figures.num_starved
        if self._num_starved > num_starved:
            self._starved(self._queue.sessions)
        return not batch or any(answer is not Unfinished.WAITS for answer in answers)

    def _give_up(self, lost: EngineLost, batch: Sequence[StepRequest]) -> None:
        """Refuses the batch, and all that waits."""
        logger.critical("no step can follow: %s", lost)
        self.lost = lost
        self.health_changed.set()
        waiting = list(batch)
        while waiting:
            for work in waiting:
                self._refuse(work, lost)
            waiting = self._take()

    def _crashed(self, batch: Sequence[StepRequest]) -> None:
        self._crashes += 1
        if self._observer is not None:
            self._observer.crashed()
        self.health_changed.set()
        for work in batch:
            self._refuse(
                work, OutriderError("the step crashed; the replica's log has the traceback")
            )

    async def _run_on_executor(
        self, releases: dict[str, int], parked: list[str], items: list[Any]
    ) -> Sequence[Any]:
        """Raises what the step does, and `EngineLost` for one that hangs."""
        try:
            async with asyncio.timeout(STEP_S_MAX) as limit:
                return await self._executor.run(lambda: self._on_executor(releases, parked, items))
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLost(f"a step has not ended in {STEP_S_MAX} s") from None

    def _on_executor(
        self, releases: dict[str, int], parked: list[str], items: list[Any]
    ) -> Sequence[Any]:
        for session_id in releases:
            self._worker.release(session_id)
        if parked:
            self._worker.park(parked)
        if not items:
            return []
        try:
            answers = self._worker.step(items)
            has_news = self._queue or self._releases or self._parked
            if not has_news and all(map(_is_ahead, answers)):
                # To hand a step over takes as long as a good part of a quick pass. More than two
                # would keep waiting who comes in an engine that states its time afterwards.
                answers = self._worker.step(items)
            check(len(answers) == len(items), f"{len(answers)} answers to {len(items)} items")
        except Exception:
            self._worker.recover(items)
            raise
        return answers

    def _answer(
        self,
        batch: list[StepRequest],
        answers: Sequence[Any],
        start: float,
        end: float,
    ) -> None:
        frames: dict[tuple[AnswerSender, bool], list[Any]] = {}
        stamped: list[Any] = []
        num_sharing = sum(answer is not Unfinished.WAITS for answer in answers)
        for work, answer in zip(batch, answers, strict=True):
            _note_state(work, answer)
            if work.started_at is None and answer is not Unfinished.WAITS:
                work.started_at = start
            parts: tuple[Any, ...] = ()
            if isinstance(answer, Answers):
                parts = answer.answers
            elif not isinstance(answer, Unfinished):
                parts = (answer,)
            timed = [_timed(part, work, end, num_sharing) for part in parts]
            stamped.append(timed[-1] if timed else Unfinished.CONTINUES)
            for sender in work.senders:
                frames.setdefault((sender, work.may_wait), []).extend(timed)
        for (sender, may_wait), frame in frames.items():
            (sender.hold if may_wait else sender.send)(frame)
        for work, answer in zip(batch, stamped, strict=True):
            if work.unfinished is None:
                self._done(work, None if answer is Unfinished.CONTINUES else answer)
        if not batch:
            return
        if self._load is None:
            self._load = StepLoad(self._max_batch, start)
        self._load.stepped(batch, start, end)
        if self._batching_delay is not None:
            rows = sum(work.item.num_rows for work in batch)
            self._batching_delay.took(end - start, rows, len(batch))
            for work, answer in zip(batch, stamped, strict=True):
                if work.unfinished is None and isinstance(answer, VerdictReply | ProposalReply):
                    self._batching_delay.answered(work.session_id, work.item.num_rows, end)
        if self._observer is not None:
            self._observer.stepped(batch, stamped, start, end)

    def _put_back(self, works: Sequence[StepRequest]) -> None:
        """Work that is not done, unless its session was released meanwhile."""
        for work in works:
            if work.item.head.epoch <= self._releases.get(work.session_id, 0):
                self._cancel(work)
        self._queue.put_back(works)

    def _tell_undrawn(self, work: StepRequest) -> None:
        """The time of work is over. If nothing was drawn for it, those who wait are told so, and no
        draw follows; the prefix is still run, and an empty proposal then says so."""
        if work.cancelled or work.deadline is None or not work.deadline.close_undrawn():
            return
        work.answered = True
        work.tell(undrawn(work.key))

    def _cancel(self, work: StepRequest) -> None:
        work.cancelled = True
        work.tell(Refused(work.key, CANCELLED_CODE, "the session was released"))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the step scheduler has stopped", exc_info=task.exception())
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


def _is_ahead(answer: Any) -> bool:
    """Whether an item goes on, and nobody waits for what it has come to."""
    calm = isinstance(answer, Answers) and not answer.answers and not answer.waited_for
    return calm and answer.more


def _note_state(work: StepRequest, answer: Any) -> None:
    if isinstance(answer, Answers):
        work.unfinished = Unfinished.CONTINUES if answer.more else None
        work.answered = not answer.waited_for
    else:
        work.unfinished = answer if isinstance(answer, Unfinished) else None
        work.answered = work.answered or work.item.gives_way


def _timed(answer: Any, work: StepRequest, end: float, num_sharing: int) -> Any:
    """A verdict or proposal with its times: until the first step that did something for it, and
    from then; so many shared the last of its steps."""
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
    """Hears of every step of a replica."""

    def __init__(self, max_batch: int, now: float) -> None:
        """`max_batch` items share a step at most; `now` and later times are the loop's."""
        self._max_batch = max_batch
        self._sums = DecayedSums(WINDOW_S, now)

    def stepped(self, works: Sequence[StepRequest], start: float, end: float) -> None:
        began = [work.started_at - work.arrived_at for work in works if work.started_at == start]
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


T = TypeVar("T")


class ThreadExecutor:
    """One thread. A step lasts at least as long as `step_seconds` says afterwards."""

    def __init__(self, name: str, step_seconds: Callable[[], float]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._step_seconds = step_seconds

    def call(self, task: Callable[[], T]) -> T:
        """Runs `task` on the thread and waits for it: for what comes before all steps."""
        return self._pool.submit(task).result()

    async def run(self, step: Callable[[], T]) -> T:
        """Runs `step` to its end on the thread, even if the caller is cancelled meanwhile; raises
        its errors."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._timed, step)

    def _timed(self, step: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = step()
        missing = self._step_seconds() - (time.perf_counter() - start)
        if missing > 0:
            time.sleep(missing)
        return result

    def close(self, *, wait: bool = True) -> None:
        """Takes no more, and waits for the running step, or leaves it to the process's end."""
        self._pool.shutdown(wait=wait)


class InlineExecutor:
    """On the event loop itself, whose clock then passes by what the engine states: for
    simulation, where that clock is virtual."""

    def __init__(self, step_seconds: Callable[[], float]) -> None:
        self._step_seconds = step_seconds

    async def run(self, step: Callable[[], T]) -> T:
        """Runs `step` at once, then waits its stated time."""
        result = step()
        await asyncio.sleep(self._step_seconds())
        return result

    def close(self, *, wait: bool = True) -> None:
        """Nothing runs."""


StepExecutor = ThreadExecutor | InlineExecutor
"""Runs steps one after another, away from the event loop."""
