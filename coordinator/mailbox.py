"""Sorts the answers of one replica's stream by session and round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.errors import LinkLost, check
from outrider.limits import MAILBOX_REPLIES_MAX
from outrider.messages import ProposalReply, Refused, Resync, VerdictReply
from outrider.wire.link import Link

Item = TypeVar("Item")
Answer = TypeVar("Answer", bound=VerdictReply | ProposalReply | Resync | Refused)


class Mailbox(Generic[Answer]):
    """Answers to one session from one side. Stale and repeated ones are dropped here: the first
    verdict or proposal of a round wins."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._round = 0
        self._answers: dict[int, Answer] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self.heard = False
        """Whether anything came since this was last set to False."""
        self.on_pushed: Callable[[ProposalReply], None] | None = None
        """Hears of proposals that assume something; without it they are dropped."""

    def put(self, answer: Answer) -> None:
        """Keeps an answer to the current or a later round."""
        key = answer.key
        if key.epoch != self._epoch:
            return
        self.heard = True
        if isinstance(answer, ProposalReply) and answer.assumed:
            if self.on_pushed is not None:
                self.on_pushed(answer)
            return
        if key.round < self._round:
            return
        known = self._answers.get(key.round)
        if isinstance(known, VerdictReply | ProposalReply):
            return
        if known is None and len(self._answers) >= MAILBOX_REPLIES_MAX:
            return  # A replica that answers what nobody asked; what is needed is asked again.
        self._answers[key.round] = answer
        self._wake()

    def lose(self, error: Exception) -> None:
        """The stream broke: whoever waits is told."""
        self._lost = error
        self._wake()

    def begin(self, round_index: int) -> bool:
        """Forgets answers to earlier rounds. Returns whether the stream has broken since somebody
        waited here last: whatever was asked for must then be asked for again."""
        self._round = round_index
        self._answers = {r: a for r, a in self._answers.items() if r >= round_index}
        lost, self._lost = self._lost is not None, None
        return lost

    async def take(self, round_index: int) -> Answer:
        """Waits for the answer to a round. Raises `LinkLost` when the stream breaks meanwhile.
        One waiter at a time."""
        check(self._waiter is None, "two waiters on one mailbox")
        while (answer := self._answers.pop(round_index, None)) is None:
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise LinkLost(str(lost))
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return answer

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PostOffice(Generic[Item, Answer]):
    """One replica's link, shared by all sessions that use it."""

    def __init__(self, link: Link[Item, Answer], replica: str) -> None:
        self.link: Link[Item, Answer] = link
        self.replica = replica
        """The replica's name in the session store."""
        self._boxes: dict[str, Mailbox[Answer]] = {}
        link.listen(self._deliver, self._lose)

    def open(self, session_id: str, epoch: int) -> Mailbox[Answer]:
        """A mailbox for a session."""
        check(session_id not in self._boxes, f"session {session_id} has a mailbox already")
        box: Mailbox[Answer] = Mailbox(epoch)
        self._boxes[session_id] = box
        return box

    def close(self, session_id: str, epoch: int) -> None:
        """Closes the mailbox and lets the replica forget the session."""
        if self._boxes.pop(session_id, None) is not None:
            self.link.release(session_id, epoch)

    def check_integrity(self, sessions: set[str], *, every: bool = True) -> None:
        """Raises `InvariantError` unless these sessions, `every` one or some, and no others have
        a mailbox."""
        check(self._boxes.keys() <= sessions, "a mailbox without a session")
        check(not every or self._boxes.keys() == sessions, "a session without a mailbox")

    def _deliver(self, answer: Answer) -> None:
        box = self._boxes.get(answer.key.session_id)
        if box is not None:
            box.put(answer)

    def _lose(self, error: Exception) -> None:
        for box in self._boxes.values():
            box.lose(error)
