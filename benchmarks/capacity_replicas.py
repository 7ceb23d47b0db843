"""Replicas that work in steps of a stated time and take no computing for it: what many sessions
get from engines that are as quick as stated, whatever the machine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.messages import ReplicaDescription, ReplyKey, RoundItem

from .overhead_canned import CannedReplica

Item = TypeVar("Item", bound=RoundItem)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of an emulated engine."""

    step_s: float
    """What a step takes, however many sessions share it."""
    sessions_max: int
    """That share one; the others wait, first come, first served."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a replica had an item."""

    key: ReplyKey
    seconds: float


class StepReplica(Generic[Item, Answer]):
    """A `ReplicaService` that answers as another does, but at the ends of steps."""

    def __init__(self, canned: CannedReplica[Item, Answer], time: StepTime) -> None:
        self._canned = canned
        self.time = time
        self._waiting: deque[tuple[float, Item, Callable[[Sequence[Answer]], None]]] = deque()
        self._stepping: asyncio.Task[None] | None = None
        self.holds: list[Hold] = []
        """Of all items that were answered."""

    def connect(self, send: Callable[[Sequence[Answer]], None]) -> _StepConnection[Item, Answer]:
        """See `ReplicaService.connect`."""
        return _StepConnection(self, send)

    def describe(self) -> ReplicaDescription:
        """See `ReplicaService.describe`."""
        return self._canned.describe()

    def release(self, session_id: str, epoch: int) -> None:
        """See `ReplicaService.release`: nothing is kept."""

    def receive(self, items: Iterable[Item], send: Callable[[Sequence[Answer]], None]) -> None:
        """Queues items; their answers go to `send`."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._waiting.extend((now, item, send) for item in items)
        if self._stepping is None:
            self._stepping = loop.create_task(self._step(loop))

    async def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Steps until nobody waits. A step is of those who wait when it begins, and begins when the
        one before was due to end: what the event loop is late does not add up."""
        due = loop.time()
        while self._waiting:
            number = min(len(self._waiting), self.time.sessions_max)
            taken = [self._waiting.popleft() for _ in range(number)]
            due += self.time.step_s
            await asyncio.sleep(due - loop.time())
            self._answer(taken, loop.time())
        self._stepping = None

    def _answer(
        self, taken: Sequence[tuple[float, Item, Callable[[Sequence[Answer]], None]]], now: float
    ) -> None:
        by_receiver: dict[Callable[[Sequence[Answer]], None], list[Answer]] = {}
        for _, item, send in taken:
            by_receiver.setdefault(send, []).append(self._canned.answer(item))
        for send, answers in by_receiver.items():
            send(answers)
        self.holds += [Hold(item.head.key, now - received) for received, item, _ in taken]


@dataclass(frozen=True, slots=True)
class _StepConnection(Generic[Item, Answer]):
    replica: StepReplica[Item, Answer]
    send: Callable[[Sequence[Answer]], None]

    def receive(self, items: Sequence[Item]) -> None:
        self.replica.receive(items, self.send)

    def close(self) -> None:
        """What waits is answered to nobody."""
