"""The queue before a replica's steps: who is next, who came twice, who has waited too long."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

from outrider.errors import Overloaded, check
from outrider.messages import ReplyKey
from outrider.replica.step_request import Answer, Item, StepRequest, Unfinished

_by_place = attrgetter("place")


@dataclass(frozen=True, slots=True)
class Taken(Generic[Item, Answer]):
    """What has left the queue, each list in order of arrival."""

    batch: list[StepRequest[Item, Answer]] = field(default_factory=list)
    """For the next step."""
    unwanted: list[StepRequest[Item, Answer]] = field(default_factory=list)
    late: list[StepRequest[Item, Answer]] = field(default_factory=list)
    """Expired."""


class RequestQueue(Generic[Item, Answer]):
    """Work in order of arrival. It keeps its place when a step did not finish it."""

    def __init__(self, max_batch: int, queue_max: int) -> None:
        check(max_batch > 0 and queue_max > 0, "max_batch and queue_max must be positive")
        self._max_batch = max_batch
        self._queue_max = queue_max
        self._waiting: list[StepRequest[Item, Answer]] = []
        self._newest: dict[ReplyKey, StepRequest[Item, Answer]] = {}
        self._places = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def _num_waited_for(self) -> int:
        return sum(not work.answered for work in self._waiting)

    @property
    def rows(self) -> list[int]:
        """Of the work that waits, a session's first each."""
        first: dict[str, int] = {}
        for work in self._waiting:
            first.setdefault(work.item.head.session_id, work.item.num_rows)
        return list(first.values())

    @property
    def sessions(self) -> set[str]:
        """Of the work that waits."""
        return {work.item.head.session_id for work in self._waiting}

    def add(self, work: StepRequest[Item, Answer]) -> bool:
        """Queues work. The very item that already waits is not queued twice: it is answered to
        both (unless somebody is to be told when it is done), and this returns False. Raises
        `Overloaded` when full."""
        key = work.item.head.key
        waiting = self._newest.get(key)
        if waiting is not None and waiting.asks_like(work):
            waiting.outlets.extend(o for o in work.outlets if o not in waiting.outlets)
            waiting.expires_at = max(waiting.expires_at, work.expires_at)
            return False
        if len(self._waiting) >= self._queue_max and self._num_waited_for >= self._queue_max:
            raise Overloaded(f"{self._queue_max} items wait for a step of this replica", 100)
        work.place = next(self._places)
        self._waiting.append(work)
        self._newest[key] = work
        return True

    def take(self, now: float) -> Taken[Item, Answer]:
        """The oldest work of each session, without what was answered and has a newer one behind it:
        up to `max_batch` of what is new, as many again of what
        was begun, and of what found no pages before and may do so now. So neither long prompts nor
        work that waits for pages keep rounds out of a step's choice."""
        taken: Taken[Item, Answer] = Taken()
        newest = {work.item.head.session_id: work for work in self._waiting}
        room = dict.fromkeys((None, *Unfinished), self._max_batch)
        sessions: set[str] = set()
        left: list[StepRequest[Item, Answer]] = []
        for work in self._waiting:
            session_id = work.item.head.session_id
            if not work.wanted or (work.answered and newest[session_id] is not work):
                taken.unwanted.append(work)
            elif now >= work.expires_at:
                taken.late.append(work)
            elif session_id not in sessions and room[work.unfinished] > 0:
                sessions.add(session_id)
                room[work.unfinished] -= 1
                taken.batch.append(work)
            else:
                sessions.add(session_id)  # A session's work is done in its order.
                left.append(work)
                continue
            if self._newest.get(work.item.head.key) is work:
                del self._newest[work.item.head.key]
        self._waiting = left
        return taken

    def put_back(self, works: Sequence[StepRequest[Item, Answer]]) -> None:
        """Work of the last batch, in its order, back to its place."""
        self._waiting = list(heapq.merge(works, self._waiting, key=_by_place))
        for work in works:
            self._newest.setdefault(work.item.head.key, work)

    def of_session(self, session_id: str, epoch: int) -> list[StepRequest[Item, Answer]]:
        """What waits for the session's epochs up to `epoch`."""
        return [
            work
            for work in self._waiting
            if work.item.head.session_id == session_id and work.item.head.epoch <= epoch
        ]
