"""What waits for a replica's steps: items, who wants their answers, and who computes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from outrider.errors import DeadlineExceeded, OutriderError
from outrider.limits import ANSWERS_HELD_MS
from outrider.messages import Refused, ReplyKey, RoundHead

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from outrider.drafters.deadline import DraftDeadline
    from outrider.engine.interface import PageCounts

CANCELLED_CODE = 1
"""google.rpc.Code of work that nobody needs any more."""


class SteppedItem(Protocol):
    """What a stream brings: an item with a head, as a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def head(self) -> RoundHead:
        """Session, round, prefix."""
        ...

    @property
    def num_rows(self) -> int:
        """Tokens that it has for a step, if the replica holds the stated prefix; at least 1."""
        ...

    @property
    def gives_way(self) -> bool:
        """Whether it need not be finished before a newer item of its session is begun."""
        ...


Item = TypeVar("Item", bound=SteppedItem)
Item_contra = TypeVar("Item_contra", bound=SteppedItem, contravariant=True)
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class Unfinished(Enum):
    """Why an item of a step has no answer yet. It goes back to its place in the queue."""

    CONTINUES = "continues"
    """The step had no room for all of its tokens; the next one goes on."""
    WAITS = "waits"
    """Its sequence finds no pages until another one gives some back."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[Answer]):
    """Any number of answers to one item, none included."""

    answers: tuple[Answer | Refused, ...]
    more: bool
    """Whether the item stays in the queue for more of them ..."""
    waited_for: bool = False
    """... and whether somebody waits for these; else they are worth something until the session's
    next item comes."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a worker's steps have come to so far."""

    pages: PageCounts | None = None
    """How the engine's pages are used; None where there are none."""
    num_preemptions: int = 0
    """Sequences whose pages were taken for an older one."""
    num_prefill_chunks: int = 0
    """Parts of prefixes that were run on their own, because a step had no room for the whole."""
    num_starved: int = 0
    """Items that found no pages, once for each step in which they found none."""


class StepWorker(Protocol[Item_contra, Answer_co]):
    """Does the work of a step, on the executor's side."""

    @property
    def figures(self) -> StepFigures:
        """After the last step; may be read on any thread."""
        ...

    def step(
        self, items: Sequence[Item_contra]
    ) -> Sequence[Answer_co | Refused | Unfinished | Answers[Any]]:
        """One answer for each item, or several, in order; the items' sessions are distinct, and
        come in the order in which they arrived. What is wrong with one item is answered `Refused`
        for it and leaves the others unharmed. Not every item is `Unfinished.CONTINUES`. Raises
        `EngineLost` where no step can follow."""
        ...

    def park(self, session_ids: Sequence[str]) -> None:
        """Nobody waits for these sessions any more: their pages may be taken. What they hold is
        kept as long as it is not."""
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


class AnswerSender(Generic[Answer]):
    """Where the answers of one connection go."""

    def __init__(self, send: Callable[[Sequence[Answer]], None]) -> None:
        self._send: Callable[[Sequence[Any]], None] = send  # Every kind of answer may be a refusal.
        self._held: list[Any] = []
        self._timer: TimerHandle | None = None
        self.closed = False

    def send(self, answers: Sequence[Answer | Refused]) -> None:
        """Sends answers, behind those held of the same sessions, each once. Once the connection
        has been closed, sends nothing."""
        self._take_along(_sessions_of(answers), answers)

    def hold(self, answers: Sequence[Answer | Refused]) -> None:
        """Sends answers within `ANSWERS_HELD_MS`, in one message with those of other sessions that
        are held meanwhile."""
        self._held += answers
        if self._timer is None and self._held:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(ANSWERS_HELD_MS / 1e3, self._flush_all)

    def flush(self, session_id: str) -> None:
        """Sends the answers held of a session."""
        self._take_along({session_id}, ())

    def _flush_all(self) -> None:
        self._take_along(_sessions_of(self._held), ())

    def _take_along(self, session_ids: set[str], answers: Sequence[Any]) -> None:
        again = {id(answer) for answer in answers}
        leaving = [one for one in self._held if one.key.session_id in session_ids]
        self._held = [one for one in self._held if one.key.session_id not in session_ids]
        if not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        leaving = [*(one for one in leaving if id(one) not in again), *answers]
        if leaving and not self.closed:
            self._send(leaving)


def _sessions_of(answers: Sequence[Any]) -> set[str]:
    return {answer.key.session_id for answer in answers}


class StepRequest(Generic[Item, Answer]):
    """An item that waits for a step, and who wants its answer."""

    __slots__ = (
        "answered", "arrived_at", "cancelled", "deadline", "expires_at", "item", "may_wait",
        "on_done", "outlets", "place", "started_at", "timer", "unfinished",
    )  # fmt: skip

    def __init__(
        self, item: Item, outlets: list[AnswerSender[Answer]], arrived_at: float, expires_at: float
    ) -> None:
        self.item = item
        self.outlets = outlets
        self.arrived_at = arrived_at
        self.expires_at = expires_at
        """Loop time after which the answer is of no use; infinity = none."""
        self.on_done: (
            Callable[[StepRequest[Item, Answer], Answer | Refused | None], None] | None
        ) = None
        """Hears the answer after it was sent, or None where the work was dropped."""
        self.may_wait = False
        """Whether its answer may be held: see `AnswerSender.hold`."""
        self.cancelled = False
        self.place = 0
        """In the queue: what came earlier has a smaller one."""
        self.started_at: float | None = None
        """Loop time at which the first step began that did something for it."""
        self.unfinished: Unfinished | None = None
        """How its last step left it; None before the first one."""
        self.answered = False
        """Whether it stays for answers alone that nobody waits for."""
        self.deadline: DraftDeadline | None = None
        """Until when something has to be drawn for it; else those who wait are told so."""
        self.timer: TimerHandle | None = None
        """Of that."""

    @property
    def wanted(self) -> bool:
        """Whether anybody still listens."""
        return not self.cancelled and any(not outlet.closed for outlet in self.outlets)

    def asks_like(self, other: StepRequest[Item, Answer]) -> bool:
        """Whether both ask for the same thing, whatever time is left to either."""
        if self.on_done is not None or other.on_done is not None or self.cancelled or self.answered:
            return False
        first: Any = self.item
        again: Any = other.item
        head = replace(first.head, deadline_ms=again.head.deadline_ms)
        return bool(head == again.head and replace(first, head=head) == again)


class StepObserver(Protocol):
    """Hears what a replica does, on the loop's thread."""

    def watch(self, queued: Callable[[], int], figures: Callable[[], StepFigures]) -> None:
        """Names who knows, on any thread, how many items wait for a step, and what the steps have
        come to."""
        ...

    def stale(self) -> None:
        """An item came for a round that is over."""
        ...

    def crashed(self) -> None:
        """A step crashed."""
        ...

    def stepped(
        self,
        works: Sequence[StepRequest[Any, Any]],
        answers: Sequence[Any],
        start: float,
        end: float,
    ) -> None:
        """A step has run, from `start` to `end` (loop time); its answers are sent."""
        ...


def refusal(key: ReplyKey, error: OutriderError) -> Refused:
    """The answer that says `error`."""
    return Refused(key, error.grpc_code, error.message)


def undrawn(key: ReplyKey) -> Refused:
    """The answer to an item whose time is over before the first draw."""
    return refusal(key, DeadlineExceeded("its time ran out before a token was drawn"))


def expiry(head: RoundHead, now: float) -> float:
    """Loop time at which an item that arrives now expires."""
    return now + head.deadline_ms / 1000 if head.deadline_ms else float("inf")
