"""The draft as a `ReplicaService`: takes items from streams, answers proposals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from draft_service.model_drafter import ModelDrafter
from draft_service.proposing import Proposer
from outrider.drafting.drafter import Drafter
from outrider.engine.executor import StepExecutor
from outrider.engine.interface import Engine
from outrider.errors import OutriderError
from outrider.limits import DRAFT_SUPPORT_ENTRIES, STREAM_QUEUE_ITEMS_MAX
from outrider.messages import DraftAnswer, DraftItem, ReplicaDescription
from outrider.stepping import (
    Outlet,
    RoundFence,
    StepObserver,
    StepScheduler,
    Work,
    expiry,
    refusal,
)


class DraftService:
    """Serves any number of streams with one drafter. Every method is for the event loop's thread;
    the drafter is touched on the executor alone."""

    def __init__(
        self,
        proposer: Proposer,
        executor: StepExecutor,
        description: ReplicaDescription,
        *,
        queue_max: int = STREAM_QUEUE_ITEMS_MAX,
        observer: StepObserver | None = None,
    ) -> None:
        """`description.max_num_seqs` sessions share a step at most."""
        self._description = description
        self._proposer = proposer
        self._scheduler: StepScheduler[DraftItem, DraftAnswer] = StepScheduler(
            executor,
            proposer,
            max_batch=description.max_num_seqs,
            queue_max=queue_max,
            observer=observer,
        )
        self._observer = observer
        self._fence = RoundFence()

    @classmethod
    def with_model(
        cls,
        engine: Engine,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        entries_max: int = DRAFT_SUPPORT_ENTRIES,
        observer: StepObserver | None = None,
    ) -> DraftService:
        """Drafts with a model; the engine must hold `max_num_seqs` sequences. A distribution
        keeps `entries_max` tokens at most."""
        info = engine.info
        description = ReplicaDescription(
            model=info.name,
            weights_fingerprint=info.weights_fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            max_num_seqs=max_num_seqs,
        )
        proposer = Proposer(ModelDrafter(engine, entries_max), engine)
        return cls(proposer, executor, description, observer=observer)

    @classmethod
    def without_model(
        cls,
        name: str,
        drafter: Drafter,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        observer: StepObserver | None = None,
    ) -> DraftService:
        """Drafts with something that needs no model, such as prompt lookup (`ngram`). It fits any
        tokenizer, and proposes nothing that was not in the session."""
        description = ReplicaDescription(
            model=name,
            weights_fingerprint="",
            tokenizer_fingerprint="",
            vocab_size=0,
            dtype="",
            max_model_len=0,
            eos_token_ids=(),
            max_num_seqs=max_num_seqs,
        )
        return cls(Proposer(drafter, None), executor, description, observer=observer)

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

    def connect(self, send: Callable[[Sequence[DraftAnswer]], None]) -> DraftConnection:
        """See `ReplicaService.connect`."""
        return DraftConnection(self, Outlet(send))

    def describe(self) -> ReplicaDescription:
        """See `ReplicaService.describe`."""
        return self._description

    def release(self, session_id: str, epoch: int) -> None:
        """See `ReplicaService.release`."""
        if self._fence.release(session_id, epoch):
            self._scheduler.release(session_id, epoch)

    async def drain(self) -> None:
        """Returns when nothing waits and nothing runs: before a stop that loses nobody's answer."""
        await self._scheduler.drain()

    async def close(self) -> None:
        """Waits for the running step; whatever waits is dropped. The executor is closed."""
        await self._scheduler.close()

    def check_integrity(self) -> None:
        """For tests, while no step runs: raises `InvariantError` if tokens and slots disagree."""
        self._proposer.check_integrity()

    def take(self, item: DraftItem, outlet: Outlet[DraftAnswer]) -> None:
        """Queues an item of a stream; never waits."""
        stale = self._fence.admit(item.head)
        if stale is not None:
            if self._observer is not None:
                self._observer.stale()
            outlet.send([stale])
            return
        now = asyncio.get_running_loop().time()
        try:
            self._scheduler.submit(Work(item, [outlet], now, expiry(item.head, now)))
        except OutriderError as error:
            outlet.send([refusal(item.head.key, error)])


class DraftConnection:
    """The replica's end of one stream."""

    def __init__(self, service: DraftService, outlet: Outlet[DraftAnswer]) -> None:
        self._service = service
        self._outlet = outlet

    def receive(self, items: Sequence[DraftItem]) -> None:
        """See `Connection.receive`."""
        for item in items:
            self._service.take(item, self._outlet)

    def close(self) -> None:
        """See `Connection.close`: what waits for this stream alone is dropped before its step."""
        self._outlet.closed = True
