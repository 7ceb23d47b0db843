"""The step scheduler that draft and target share: one step at a time over everything that waits.

    event loop                                          executor (a thread, or inline)
    submit, release, take a batch, send answers         the worker's step, release, recover

A worker's state belongs to the executor's side and is touched nowhere else. While a step runs, what
arrives gathers for the next one, so batches grow with load and nobody waits for a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from outrider.engine.executor import StepExecutor
from outrider.errors import (
    DeadlineExceeded,
    OutriderError,
    Overloaded,
    Unavailable,
    check,
)
from outrider.limits import SEQUENCES_PER_REPLICA_MAX, STEP_CRASHES_UNHEALTHY
from outrider.messages import ProposalReply, Refused, ReplyKey, RoundHead, VerdictReply
from outrider.telemetry.logs import about

logger = logging.getLogger(__name__)

CANCELLED_CODE = 1
"""google.rpc.Code of work that nobody needs any more."""
_INTERNAL_CODE = 13


class SteppedItem(Protocol):
    """What a stream brings: an item with a head."""

    @property
    def head(self) -> RoundHead:
        """Session, round, prefix."""
        ...


Item = TypeVar("Item", bound=SteppedItem)
Item_contra = TypeVar("Item_contra", bound=SteppedItem, contravariant=True)
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class StepWorker(Protocol[Item_contra, Answer_co]):
    """Does the work of a step, on the executor's side."""

    def step(self, items: Sequence[Item_contra]) -> Sequence[Answer_co | Refused]:
        """One answer for each item, in order; the items' sessions are distinct. What is wrong with
        one item is answered `Refused` for it and leaves the others unharmed."""
        ...

    def release(self, session_id: str, epoch: int) -> None:
        """Forgets a session unless a newer epoch of it is known."""
        ...

    def recover(self, items: Sequence[Item_contra]) -> None:
        """After `step` raised: brings the items' sessions into a sane state by forgetting them."""
        ...

    def check_integrity(self) -> None:
        """For tests, while no step runs: raises `InvariantError` if tokens and slots disagree."""
        ...


class Outlet(Generic[Answer]):
    """Where the answers of one connection go."""

    def __init__(self, send: Callable[[Sequence[Answer]], None]) -> None:
        self._send: Callable[[Sequence[Any]], None] = send  # Every kind of answer may be a refusal.
        self.closed = False

    def send(self, answers: Sequence[Answer | Refused]) -> None:
        """Sends answers, unless the connection has been closed."""
        if answers and not self.closed:
            self._send(answers)


class Work(Generic[Item, Answer]):
    """An item that waits for a step, and who wants its answer."""

    __slots__ = ("arrived_at", "cancelled", "expires_at", "item", "on_done", "outlets")

    def __init__(
        self, item: Item, outlets: list[Outlet[Answer]], arrived_at: float, expires_at: float
    ) -> None:
        self.item = item
        self.outlets = outlets
        self.arrived_at = arrived_at
        self.expires_at = expires_at
        """Loop time after which the answer is of no use; infinity = none."""
        self.on_done: Callable[[Work[Item, Answer], Answer | Refused | None], None] | None = None
        """Hears the answer after it was sent, or None where the work was dropped."""
        self.cancelled = False

    @property
    def wanted(self) -> bool:
        """Whether anybody still listens."""
        return not self.cancelled and any(not outlet.closed for outlet in self.outlets)


class StepObserver(Protocol):
    """Hears what a replica does, on the loop's thread."""

    def watch_queue(self, queued: Callable[[], int]) -> None:
        """Names who knows, on any thread, how many items wait for a step."""
        ...

    def stale(self) -> None:
        """An item came for a round that is over."""
        ...

    def crashed(self) -> None:
        """A step crashed."""
        ...

    def stepped(
        self, works: Sequence[Work[Any, Any]], answers: Sequence[Any], start: float, end: float
    ) -> None:
        """A step has run, from `start` to `end` (loop time); its answers are sent."""
        ...


class StepScheduler(Generic[Item, Answer]):
    """Queues work, forms batches of distinct sessions in order of arrival, runs them, and sends
    each connection its answers of a step in one call. Starts with the first `submit`."""

    def __init__(
        self,
        executor: StepExecutor,
        worker: StepWorker[Item, Answer],
        *,
        max_batch: int,
        queue_max: int,
        observer: StepObserver | None = None,
    ) -> None:
        check(max_batch > 0 and queue_max > 0, "max_batch and queue_max must be positive")
        self._executor = executor
        self._worker = worker
        self._observer = observer
        if observer is not None:
            observer.watch_queue(lambda: self.queued)
        self._max_batch = max_batch
        self._queue_max = queue_max
        self._queue: deque[Work[Item, Answer]] = deque()
        self._newest: dict[ReplyKey, Work[Item, Answer]] = {}
        self._releases: dict[str, int] = {}
        """session -> the newest epoch of it that is to be forgotten before the next step."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._crashes = 0
        self._reported = True
        self._on_health: Callable[[bool], None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queued(self) -> int:
        """Items that wait for a step."""
        return len(self._queue)

    @property
    def healthy(self) -> bool:
        """False once `STEP_CRASHES_UNHEALTHY` steps in a row have crashed, or none can follow."""
        stopped = self._closing or (self._task is not None and self._task.done())
        return self._crashes < STEP_CRASHES_UNHEALTHY and not stopped

    def watch(self, on_health: Callable[[bool], None]) -> None:
        """Names who hears, on the loop's thread, whenever `healthy` changes."""
        self._on_health = on_health

    def submit(self, work: Work[Item, Answer]) -> None:
        """Queues work. The very item that already waits is not queued twice: it is answered to
        both (unless somebody is to be told when it is done). Raises `Overloaded` when the queue
        is full, `Unavailable` once closed."""
        if self._closing:
            raise Unavailable("this replica is stopping")
        key = work.item.head.key
        waiting = self._newest.get(key)
        if waiting is not None and _same(waiting, work):
            waiting.outlets.extend(work.outlets)
            return
        if len(self._queue) >= self._queue_max:
            raise Overloaded(f"{self._queue_max} items wait for a step of this replica", 100)
        self._queue.append(work)
        self._newest[key] = work
        self._start()

    def release(self, session_id: str, epoch: int) -> None:
        """Drops the session's queued work and forgets it before the next step. At most
        `SEQUENCES_PER_REPLICA_MAX` sessions wait to be forgotten; the oldest of more is left to be
        evicted."""
        if epoch <= self._releases.get(session_id, 0):
            return  # It was told before, and so were those who waited.
        for work in self._queue:
            if work.item.head.session_id == session_id and work.item.head.epoch <= epoch:
                work.cancelled = True
                over = Refused(work.item.head.key, CANCELLED_CODE, "the session was released")
                for outlet in work.outlets:
                    outlet.send([over])
        self._releases[session_id] = epoch
        if len(self._releases) > SEQUENCES_PER_REPLICA_MAX:
            del self._releases[next(iter(self._releases))]
        self._start()

    async def drain(self) -> None:
        """Returns when nothing waits and nothing runs."""
        await self._idle.wait()

    async def close(self) -> None:
        """Waits for the running step, drops what waits, and closes the executor."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._executor.close()

    def _start(self) -> None:
        self._idle.clear()
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="steps")
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        try:
            while not self._closing:
                await self._wake.wait()
                self._wake.clear()
                while not self._closing and (self._queue or self._releases):
                    await self._step(self._take())
                self._idle.set()
        finally:
            self._idle.set()

    def _take(self) -> list[Work[Item, Answer]]:
        """The next batch: the oldest work of each session, up to `max_batch`."""
        now = asyncio.get_running_loop().time()
        batch: list[Work[Item, Answer]] = []
        sessions: set[str] = set()
        left: deque[Work[Item, Answer]] = deque()
        while self._queue:
            work = self._queue.popleft()
            session_id = work.item.head.session_id
            if not work.wanted:
                self._forget(work)
                self._done(work, None)
            elif now >= work.expires_at:
                self._forget(work)
                late = DeadlineExceeded("the deadline passed before a step was free")
                self._refuse(work, refusal(work.item.head.key, late))
            elif len(batch) < self._max_batch and session_id not in sessions:
                self._forget(work)
                sessions.add(session_id)
                batch.append(work)
            else:
                left.append(work)
        self._queue = left
        return batch

    def _forget(self, work: Work[Item, Answer]) -> None:
        key = work.item.head.key
        if self._newest.get(key) is work:
            del self._newest[key]

    async def _step(self, batch: list[Work[Item, Answer]]) -> None:
        releases, self._releases = self._releases, {}
        if not batch and not releases:
            return
        loop = asyncio.get_running_loop()
        start = loop.time()
        items = [work.item for work in batch]
        try:
            answers = await self._executor.run(lambda: self._on_executor(releases, items))
        except Exception:
            self._crashes += 1
            sessions = [item.head.session_id for item in items]
            logger.exception(
                "a step of %d items crashed", len(batch), extra=about(session_ids=sessions)
            )
            if self._observer is not None:
                self._observer.crashed()
            self._report()
            for work in batch:
                message = "the step crashed; the replica's log has the traceback"
                self._refuse(work, Refused(work.item.head.key, _INTERNAL_CODE, message))
            return
        if batch:
            self._crashes = 0
            self._report()
        self._answer(batch, answers, start, loop.time())

    def _on_executor(
        self, releases: dict[str, int], items: list[Item]
    ) -> Sequence[Answer | Refused]:
        for session_id, epoch in releases.items():
            self._worker.release(session_id, epoch)
        if not items:
            return []
        try:
            answers = self._worker.step(items)
            check(len(answers) == len(items), f"{len(answers)} answers to {len(items)} items")
        except Exception:
            self._worker.recover(items)
            raise
        return answers

    def _answer(
        self,
        batch: list[Work[Item, Answer]],
        answers: Sequence[Answer | Refused],
        start: float,
        end: float,
    ) -> None:
        compute_ms = (end - start) * 1000
        by_outlet: dict[Outlet[Any], list[Any]] = {}
        stamped: list[Any] = []
        for work, answer in zip(batch, answers, strict=True):
            if isinstance(answer, VerdictReply | ProposalReply):
                queue_ms = max(0.0, start - work.arrived_at) * 1000
                timed = replace(answer, queue_ms=queue_ms, compute_ms=compute_ms)
                stamped.append(timed)
            else:
                stamped.append(answer)
            for outlet in work.outlets:
                by_outlet.setdefault(outlet, []).append(stamped[-1])
        for outlet, frame in by_outlet.items():
            outlet.send(frame)
        for work, answer in zip(batch, stamped, strict=True):
            self._done(work, answer)
        if self._observer is not None and batch:
            self._observer.stepped(batch, stamped, start, end)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the step scheduler has stopped", exc_info=task.exception())
        self._report()

    def _report(self) -> None:
        if self.healthy != self._reported:
            self._reported = self.healthy
            if self._on_health is not None:
                self._on_health(self._reported)

    def _refuse(self, work: Work[Item, Answer], answer: Refused) -> None:
        for outlet in work.outlets:
            outlet.send([answer])
        self._done(work, answer)

    def _done(self, work: Work[Item, Answer], answer: Answer | Refused | None) -> None:
        if work.on_done is not None:
            work.on_done(work, answer)


def _same(waiting: Work[Any, Any], work: Work[Any, Any]) -> bool:
    """Whether both ask for the same thing, whatever time is left to either."""
    if waiting.on_done is not None or work.on_done is not None or waiting.cancelled:
        return False
    first, again = waiting.item, work.item
    head = replace(first.head, deadline_ms=again.head.deadline_ms)
    return bool(head == again.head and replace(first, head=head) == again)


def refusal(key: ReplyKey, error: OutriderError) -> Refused:
    """The answer that says `error`."""
    return Refused(key, error.grpc_code, error.message)


def expiry(head: RoundHead, now: float) -> float:
    """Loop time at which an item that arrives now expires."""
    return now + head.deadline_ms / 1000 if head.deadline_ms else float("inf")
