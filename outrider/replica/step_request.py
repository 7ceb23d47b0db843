"""Items that wait for a replica's steps, the senders of their answers, and the queue."""

from __future__ import annotations

import asyncio
from bisect import insort_left, insort_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, NamedTuple

from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.errors import DeadlineExceeded, OutriderError
from outrider.foundation.fair_turns import round_robin
from outrider.interfaces.messages import Item, Refused, ReplyKey, RoundAnswer

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from outrider.grammar.compiler import Grammar
    from outrider.interfaces.engine import PageCounts


CANCELLED_CODE = 1  # google.rpc.Code for work that is no longer needed


class Unfinished(Enum):
    """Why an item has no answer after a step. The item keeps its place in the queue."""

    CONTINUES = "continues"  # the step had no room for all tokens of the item
    WAITS = "waits"  # no pages are free for the item


class Answers(NamedTuple):
    """No answer, one answer or several answers to an item."""

    answers: tuple[RoundAnswer, ...]
    more: bool  # whether more answers follow; the item then stays in the queue
    waited_for: bool = False
    """Whether the caller waits for more answers. If not, the session's next item ends this item."""


StepAnswer = RoundAnswer | Answers | Unfinished
"""What a step says of one of its items."""


class StepFigures:
    """Counters over all steps of a worker, and its pages after the last step. Any thread may read
    them."""

    num_preemptions: int = 0  # number of sequences that lost their pages to an older sequence
    num_prefill_chunks: int = 0  # number of times that only a part of a prefix had room in a step
    num_starved: int = 0  # number of items that found no pages, counted in each step

    def __init__(self, pages: PageCounts) -> None:
        self.pages = pages


class AnswerSender:
    """Sends the answers of one connection. Must be used on the event loop's thread."""

    def __init__(self, send: Callable[[Sequence[RoundAnswer]], None]) -> None:
        """`send` is the parameter of `ReplicaService.connect`. With gRPC, it is `_Stream.answer`
        (`outrider/transport/stream_server.py`)."""
        self._send = send
        self._held: list[RoundAnswer] = []
        self._held_at = 0.0  # when answers were held last
        self._timer: TimerHandle | None = None
        self.closed = False
        """Any thread may read this."""

    def send(self, answers: Sequence[RoundAnswer]) -> None:
        """Sends the held answers of the same sessions, and then these answers. If an answer is held
        and is also among `answers`, it is sent once. Sends nothing on a closed connection."""
        session_ids = {answer.key.session_id for answer in answers}
        again = {id(answer) for answer in answers}
        leaving = [answer for answer in self._held if answer.key.session_id in session_ids]
        self._held = [answer for answer in self._held if answer.key.session_id not in session_ids]
        if not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        leaving = [*(answer for answer in leaving if id(answer) not in again), *answers]
        if leaving and not self.closed:
            self._send(leaving)

    def hold(self, answers: Sequence[RoundAnswer], seconds: float) -> None:
        """Holds the answers of a step. After at most `seconds`, sends all held answers in one
        message. If the next step will probably end later, sends the message now: the processes that
        it wakes would use the cores in the middle of that step."""
        loop = asyncio.get_running_loop()
        now, self._held = loop.time(), [*self._held, *answers]
        step_s, self._held_at = now - self._held_at, now
        if self._timer is None and self._held:
            self._timer = loop.call_later(seconds, self._flush)
        elif self._timer is not None and self._timer.when() < now + step_s:
            self._flush()

    def _flush(self) -> None:
        self.send([*self._held])


class StepRequest(Generic[Item]):
    """An item that waits for a step, and the connection that wants its answer."""

    started_at: float | None = None  # when the first step that worked on the item began
    unfinished: Unfinished | None = None  # why the last step left the item unfinished
    runs_alone: bool = False  # whether an earlier step with this item crashed
    answered: bool = False  # whether no caller waits for the item's later answers
    timer: TimerHandle | None = None  # cancelled when the request ends
    draft_deadline: DraftDeadline = NO_DEADLINE  # the end of `DraftItem.budget_us` on our clock

    def __init__(
        self,
        item: Item,
        sender: AnswerSender,
        arrived_at: float,
        expires_at: float,
        grammar: Grammar | OutriderError | None = None,
    ) -> None:
        """Times are on the event loop's clock. No caller needs the answer after `expires_at`.
        `grammar` is the item's compiled constraint, or the error of its compilation."""
        self.item, self.sender, self.grammar = item, sender, grammar
        self.session_id = item.head.session_id
        self.arrived_at, self.expires_at = arrived_at, expires_at

    @property
    def key(self) -> ReplyKey:
        return self.item.head.key

    def progress(self, answer: StepAnswer) -> tuple[RoundAnswer, ...]:
        """Notes what a step's answer means for this request. Returns the answers to send."""
        if isinstance(answer, Answers):
            self.answered = not answer.waited_for
            self.unfinished = Unfinished.CONTINUES if answer.more else None
            return answer.answers
        self.answered = self.answered or self.item.gives_way
        self.unfinished = answer if isinstance(answer, Unfinished) else None
        return () if isinstance(answer, Unfinished) else (answer,)


def refusal(key: ReplyKey, error: OutriderError) -> Refused:
    """Returns the answer that refuses an item."""
    return Refused(key, error.grpc_code, error.message)


def undrawn(key: ReplyKey) -> Refused:
    """Returns the answer to an item whose time ran out before the first draw."""
    return refusal(key, DeadlineExceeded("the time limit ended before a token was drawn"))


_ARRIVED_AT = attrgetter("arrived_at")
_KINDS: tuple[Unfinished | None, ...] = (None, *Unfinished)


class RequestQueue(Generic[Item]):
    """Requests in order of arrival. Requests that a step did not finish keep their place."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self.waiting: list[StepRequest[Item]] = []
        self._by_session: defaultdict[str, list[StepRequest[Item]]] = defaultdict(list)
        """The same requests. If many sessions end at once, each finds its own without a search."""

    @property
    def rows(self) -> list[int]:
        """Number of tokens (rows) of each session's first request."""
        return [works[0].item.num_rows for works in self._by_session.values()]

    def add(self, work: StepRequest[Item]) -> None:
        """Queues a request behind all that did not arrive later."""
        for works in (self.waiting, self._by_session[work.session_id]):
            if works and works[-1].arrived_at > work.arrived_at:
                insort_right(works, work, key=_ARRIVED_AT)
            else:
                works.append(work)

    def requeue(self, works: Sequence[StepRequest[Item]]) -> None:
        """Returns requests that a step did not finish to their places."""
        for work in reversed(works):
            for others in (self.waiting, self._by_session[work.session_id]):
                insort_left(others, work, key=_ARRIVED_AT)

    def has(self, work: StepRequest[Item]) -> bool:
        """Whether a request of the same session waits."""
        return work.session_id in self._by_session

    def take(
        self, now: float
    ) -> tuple[list[StepRequest[Item]], list[StepRequest[Item]], list[StepRequest[Item]]]:
        """Takes three lists of requests out of the queue. Tenants take turns, each with its oldest
        request:

        1. For a step: the oldest request of each session. `max_batch` limits each of three kinds
           separately: new requests, requests that an earlier step began, and requests that found no
           pages. So neither long prompts nor requests without pages keep rounds out of a step. If
           the oldest of these requests `runs_alone`, the step has only this request.
        2. Unwanted: the connection is closed, or the request was answered and its session has a
           newer request.
        3. Expired."""
        batch: list[StepRequest[Item]] = []
        unwanted: list[StepRequest[Item]] = []
        late: list[StepRequest[Item]] = []
        room = dict.fromkeys(_KINDS, self._max_batch)
        sessions: set[str] = set()
        for work in round_robin(self.waiting, lambda request: request.item.head.tenant):
            session_id = work.session_id
            is_newest = self._by_session[session_id][-1] is work
            if work.sender.closed or (work.answered and not is_newest):
                unwanted.append(work)
            elif now >= work.expires_at:
                late.append(work)
            elif (
                session_id not in sessions
                and room[work.unfinished] > 0
                and not (batch and (work.runs_alone or batch[0].runs_alone))
            ):
                sessions.add(session_id)
                room[work.unfinished] -= 1
                batch.append(work)
            else:
                sessions.add(session_id)  # Later requests of the session wait for this request.
        self.remove([*batch, *unwanted, *late])
        return batch, unwanted, late

    def remove(self, works: Sequence[StepRequest[Item]]) -> None:
        """Takes these requests out of the queue."""
        taken = set(works)
        self.waiting = [work for work in self.waiting if work not in taken]
        for work in works:
            own = self._by_session[work.session_id]
            own.remove(work)
            if not own:
                del self._by_session[work.session_id]

    def drop(self, session_id: str) -> None:
        """Takes a session's requests out of the queue."""
        for work in self._by_session.pop(session_id, []):
            self.waiting.remove(work)

    def clear(self) -> None:
        self.waiting = []
        self._by_session.clear()
