"""Stamps around a coordinator's links and its store, and around a target's queue and steps.

Stamps are of the machine's monotonic clock, which all processes of one machine share, so that those
of two processes may be subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from outrider.errors import OutriderError
from outrider.messages import (
    DraftAnswer,
    DraftItem,
    ProposalReply,
    ReplicaDescription,
    ReplyKey,
    RoundItem,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.replica.scheduler import ThreadExecutor
from outrider.replica.service import SteppedService
from outrider.replica.step_request import AnswerSender
from outrider.sessions.store import (
    Append,
    Finish,
    SessionRecord,
    SessionStore,
)
from outrider.transport.codec import Answer, Codec, Item
from outrider.transport.link import Link, LinkBytes

now_ns: Final = time.monotonic_ns
T = TypeVar("T")
ClockedItem = TypeVar("ClockedItem", bound=RoundItem)
ClockedAnswer = TypeVar("ClockedAnswer")


@dataclass(frozen=True, slots=True)
class RoundStamps:
    """When a round's messages passed through the coordinator, ns; 0 = they did not."""

    num_draft_tokens: int = 0
    draft_sent: int = 0
    draft_heard: int = 0
    verify_sent: int = 0
    verdict_heard: int = 0
    commit_sent: int = 0
    committed: int = 0
    num_bytes: int = 0
    """Of the frames of both hops, both ways, as serialised."""


class RoundClock:
    """The stamps of all rounds."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, int], dict[str, int]] = {}
        """(session, round) -> the fields of its `RoundStamps`, as far as they are known."""
        self._undone: dict[str, list[int]] = {}
        """Rounds of each session whose commit has not been acknowledged."""

    @property
    def rounds(self) -> list[RoundStamps]:
        """All rounds so far, in the order of their drafts."""
        return [RoundStamps(**fields) for fields in self._rounds.values()]

    def take_spans(self) -> list[tuple[str, int, int]]:
        """Session, round and time from its draft's request to its commit, ns, of all rounds that
        are over; they are forgotten."""
        over = [key for key, fields in self._rounds.items() if "committed" in fields]
        found = [(key, self._rounds.pop(key)) for key in over]
        return [(*key, fields["committed"] - fields["draft_sent"]) for key, fields in found]

    def draft_sent(self, item: DraftItem) -> None:
        """A coordinator asks a draft: a round begins, unless it is for the prompt alone."""
        key = (item.head.session_id, item.head.round)
        if item.num_draft_tokens > 0 and key not in self._rounds:
            self._undone.setdefault(item.head.session_id, []).append(item.head.round)
            self._rounds[key] = {
                "num_draft_tokens": item.num_draft_tokens,
                "num_bytes": 0,
                "draft_sent": now_ns(),
            }

    def draft_heard(self, answer: DraftAnswer) -> None:
        """The draft's answer is decoded."""
        stamps = self._find(answer.key)
        if stamps is not None and isinstance(answer, ProposalReply):
            stamps["draft_heard"] = now_ns()

    def verify_sent(self, item: VerifyItem) -> None:
        """A coordinator asks a target."""
        stamps = self._find(item.head.key)
        if stamps is not None:
            stamps["verify_sent"] = now_ns()

    def verdict_heard(self, answer: VerifyAnswer) -> None:
        """The target's answer is decoded."""
        stamps = self._find(answer.key)
        if stamps is not None and isinstance(answer, VerdictReply):
            stamps["verdict_heard"] = now_ns()

    def count_bytes(self, session_id: str, round_index: int, num_bytes: int) -> None:
        """Adds a frame's bytes to a round."""
        stamps = self._rounds.get((session_id, round_index))
        if stamps is not None:
            stamps["num_bytes"] += num_bytes

    def _find(self, key: ReplyKey) -> dict[str, int] | None:
        return self._rounds.get((key.session_id, key.round))

    def commit_sent(self, appends: Sequence[Append]) -> list[tuple[str, int]]:
        """A coordinator calls the store; the rounds that this commits."""
        covered = []
        for append in appends:
            undone = self._undone.get(append.session_id, [])
            indices = [index for index in undone if index < append.counters.num_rounds]
            self._undone[append.session_id] = undone[len(indices) :]
            covered += [(append.session_id, index) for index in indices]
        self._stamp(covered, "commit_sent")
        return covered

    def committed(self, rounds: Sequence[tuple[str, int]]) -> None:
        """The store has acknowledged what `commit_sent` returned."""
        self._stamp(rounds, "committed")

    def _stamp(self, rounds: Sequence[tuple[str, int]], name: str) -> None:
        stamp = now_ns()
        for key in rounds:
            self._rounds[key][name] = stamp


class ClockedLink(Generic[Item, Answer]):
    """A link whose items are seen just before they are sent, and whose answers once decoded."""

    def __init__(
        self,
        link: Link[Item, Answer],
        on_send: Callable[[Item], None],
        on_heard: Callable[[Answer], None],
    ) -> None:
        self._link = link
        self._on_send = on_send
        self._on_heard = on_heard

    @property
    def num_bytes(self) -> LinkBytes:
        """See `Link.num_bytes`."""
        return self._link.num_bytes

    def listen(
        self, on_answer: Callable[[Answer], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """See `Link.listen`."""

        def heard(answer: Answer) -> None:
            self._on_heard(answer)
            on_answer(answer)

        self._link.listen(heard, on_lost)

    def send(self, item: Item) -> None:
        """See `Link.send`."""
        self._on_send(item)
        self._link.send(item)

    def release(self, session_id: str, epoch: int) -> None:
        """See `Link.release`."""
        self._link.release(session_id, epoch)

    async def describe(self, timeout_s: float) -> ReplicaDescription:
        """See `Link.describe`."""
        return await self._link.describe(timeout_s)

    async def close(self) -> None:
        """See `Link.close`."""
        await self._link.close()


def counted(codec: Codec[Item, Answer], clock: RoundClock) -> Codec[Item, Answer]:
    """The codec of a coordinator's link; the bytes of its frames count for their rounds. A frame
    of several items is none that is measured: one session runs at a time."""

    def request_frame(items: Sequence[Any]) -> Any:
        frame = codec.request_frame(items)
        head = items[0].head
        clock.count_bytes(head.session_id, head.round, frame.ByteSize())
        return frame

    def parse_reply(data: bytes) -> Any:
        frame = codec.parse_reply(data)
        first = frame.items[0]
        clock.count_bytes(first.session_id, first.round, len(data))
        return frame

    return replace(codec, request_frame=request_frame, parse_reply=parse_reply)


class ClockedStore:
    """A session store whose appends are stamped."""

    def __init__(self, store: SessionStore, clock: RoundClock) -> None:
        self._store = store
        self._clock = clock

    async def append(self, appends: Sequence[Append]) -> list[int | OutriderError]:
        """See `SessionStore.append`."""
        rounds = self._clock.commit_sent(appends)
        answers = await self._store.append(appends)
        self._clock.committed(rounds)
        return answers

    async def open(self, session: SessionRecord) -> None:
        """See `SessionStore.open`."""
        await self._store.open(session)

    async def hold_lease(self, owner: str) -> Sequence[str]:
        """See `SessionStore.hold_lease`."""
        return await self._store.hold_lease(owner)

    async def end_lease(self, owner: str) -> None:
        """See `SessionStore.end_lease`."""
        await self._store.end_lease(owner)

    async def release(self, session_id: str, epoch: int, owner: str) -> None:
        """See `SessionStore.release`."""
        await self._store.release(session_id, epoch, owner)

    async def take_over(
        self, seen: SessionRecord, owner: str, on_sent: Callable[[], None] = lambda: None
    ) -> SessionRecord:
        """See `SessionStore.take_over`."""
        return await self._store.take_over(seen, owner, on_sent)

    async def finish(self, finish: Finish) -> int:
        """See `SessionStore.finish`."""
        return await self._store.finish(finish)

    async def load(self, session_id: str) -> SessionRecord:
        """See `SessionStore.load`."""
        return await self._store.load(session_id)

    async def close(self) -> None:
        """See `SessionStore.close`."""
        await self._store.close()


def clock_queue(service: SteppedService[Any, Any]) -> dict[ReplyKey, int]:
    """When each item from now on stands in the service's queue, ns."""
    queued: dict[ReplyKey, int] = {}
    take = service.take

    def timed(item: Any, sender: AnswerSender[Any]) -> None:
        take(item, sender)
        queued[item.head.key] = now_ns()

    service.take = timed  # type: ignore[method-assign]
    return queued


class ClockedExecutor(ThreadExecutor):
    """A thread for steps that notes when the answers of each were there: on that thread, before
    the event loop knows of them."""

    def __init__(
        self,
        name: str,
        step_seconds: Callable[[], float],
        prepare: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(name, step_seconds, prepare)
        self.judged: dict[ReplyKey, int] = {}
        """Answer -> ns."""

    def _timed(self, step: Callable[[], T]) -> T:
        result = super()._timed(step)
        stamp = now_ns()
        if isinstance(result, list):
            self.judged.update((answer.key, stamp) for answer in result)
        return result
