"""The target as a `ReplicaService`: takes items from streams, answers verdicts, runs ahead."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from outrider.engine.executor import StepExecutor
from outrider.engine.interface import Engine
from outrider.errors import OutriderError
from outrider.limits import SEQUENCES_PER_REPLICA_MAX, STREAM_QUEUE_ITEMS_MAX
from outrider.messages import ReplicaDescription, VerdictReply, VerifyAnswer, VerifyItem
from outrider.stepping import (
    Outlet,
    RoundFence,
    StepObserver,
    StepScheduler,
    Work,
    expiry,
    refusal,
)
from target_service.run_ahead import RunAhead
from target_service.scoring import Scorer

TargetWork = Work[VerifyItem, VerifyAnswer]


class TargetService:
    """Serves any number of streams with one engine. Every method is for the event loop's thread;
    the engine is touched on the executor alone."""

    def __init__(
        self,
        engine: Engine,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        queue_max: int = STREAM_QUEUE_ITEMS_MAX,
        observer: StepObserver | None = None,
    ) -> None:
        """`max_num_seqs` sessions share a step at most; the engine must hold that many."""
        self._info = engine.info
        self._max_num_seqs = max_num_seqs
        self._scorer = Scorer(engine)
        self._scheduler: StepScheduler[VerifyItem, VerifyAnswer] = StepScheduler(
            executor,
            self._scorer,
            max_batch=max_num_seqs,
            queue_max=queue_max,
            observer=observer,
        )
        self._observer = observer
        self._fence = RoundFence()
        self._ahead: OrderedDict[str, RunAhead] = OrderedDict()

    @property
    def healthy(self) -> bool:
        """False once steps only crash, or no more follow."""
        return self._scheduler.healthy

    def watch(self, on_health: Callable[[bool], None]) -> None:
        """Names who hears, on the loop's thread, whenever `healthy` changes."""
        self._scheduler.watch(on_health)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return self._scheduler.idle

    def connect(self, send: Callable[[Sequence[VerifyAnswer]], None]) -> TargetConnection:
        """See `ReplicaService.connect`."""
        return TargetConnection(self, Outlet(send))

    def describe(self) -> ReplicaDescription:
        """See `ReplicaService.describe`."""
        info = self._info
        return ReplicaDescription(
            model=info.name,
            weights_fingerprint=info.weights_fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            max_num_seqs=self._max_num_seqs,
        )

    def release(self, session_id: str, epoch: int) -> None:
        """See `ReplicaService.release`."""
        if self._fence.release(session_id, epoch):
            self._stop_running_ahead(session_id)
            self._scheduler.release(session_id, epoch)

    async def drain(self) -> None:
        """Returns when nothing waits and nothing runs: before a stop that loses nobody's answer."""
        await self._scheduler.drain()

    async def close(self) -> None:
        """Waits for the running step; whatever waits is dropped. The executor is closed."""
        await self._scheduler.close()

    def check_integrity(self) -> None:
        """For tests, while no step runs: raises `InvariantError` if tokens and slots disagree."""
        self._scorer.check_integrity()

    def take(self, item: VerifyItem, outlet: Outlet[VerifyAnswer]) -> None:
        """Queues an item of a stream; never waits."""
        stale = self._fence.admit(item.head)
        if stale is not None:
            if self._observer is not None:
                self._observer.stale()
            outlet.send([stale])
            return
        session_id = item.head.session_id
        ahead = self._ahead.get(session_id)
        if ahead is not None and ahead.continues(item):
            outlet.send(ahead.extend(item, outlet))
            if ahead.running is None:
                self._run_next(session_id, ahead)
            return
        self._stop_running_ahead(session_id)
        if item.run_ahead > 0 and not item.proposal:
            ahead = self._ahead[session_id] = RunAhead(item, outlet)
            if len(self._ahead) > SEQUENCES_PER_REPLICA_MAX:
                self._stop_running_ahead(next(iter(self._ahead)))
            self._run_next(session_id, ahead)
        else:
            self._submit(TargetWork(item, [outlet], *_times(item)))

    def _run_next(self, session_id: str, ahead: RunAhead) -> None:
        """Queues the next round of a session that runs ahead, if it may have one. It joins the
        queue at its end like any other work."""
        item = ahead.next_item(self._info.max_model_len)
        if item is None:
            return
        work = TargetWork(item, [ahead.outlet], *_times(item))
        work.on_done = lambda work, answer: self._on_round_done(session_id, ahead, work, answer)
        ahead.running = work
        if not self._submit(work):
            self._forget(session_id, ahead)

    def _on_round_done(
        self, session_id: str, ahead: RunAhead, work: TargetWork, answer: VerifyAnswer | None
    ) -> None:
        if self._ahead.get(session_id) is not ahead or ahead.running is not work:
            return
        ahead.running = None
        if isinstance(answer, VerdictReply):
            ahead.add(answer)
            self._run_next(session_id, ahead)
        else:
            self._forget(session_id, ahead)

    def _submit(self, work: TargetWork) -> bool:
        """Queues work, or refuses it to those who wait for it."""
        try:
            self._scheduler.submit(work)
        except OutriderError as error:
            for outlet in work.outlets:
                outlet.send([refusal(work.item.head.key, error)])
            return False
        return True

    def _stop_running_ahead(self, session_id: str) -> None:
        ahead = self._ahead.pop(session_id, None)
        if ahead is not None and ahead.running is not None:
            ahead.running.cancelled = True

    def _forget(self, session_id: str, ahead: RunAhead) -> None:
        if self._ahead.get(session_id) is ahead:
            del self._ahead[session_id]


class TargetConnection:
    """The replica's end of one stream."""

    def __init__(self, service: TargetService, outlet: Outlet[VerifyAnswer]) -> None:
        self._service = service
        self._outlet = outlet

    def receive(self, items: Sequence[VerifyItem]) -> None:
        """See `Connection.receive`."""
        for item in items:
            self._service.take(item, self._outlet)

    def close(self) -> None:
        """See `Connection.close`: what waits for this stream alone is dropped before its step."""
        self._outlet.closed = True


def _times(item: VerifyItem) -> tuple[float, float]:
    """When an item that comes now arrived, and when it expires."""
    now = asyncio.get_running_loop().time()
    return now, expiry(item.head, now)
