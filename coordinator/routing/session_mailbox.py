"""Sorts the answers of one replica's stream by session and round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from outrider.errors import LinkLost, check
from outrider.limits import MAILBOX_REPLIES_MAX
from outrider.messages import (
    ProposalReply,
    Refused,
    ReplicaDescription,
    ReplyKey,
    Resync,
    VerdictReply,
)
from outrider.transport.link import Link

REPEATS_MAX: Final = 4_096
"""Answers of one replica that are known to come a second time."""

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

    def put(self, answer: Answer) -> bool:
        """Keeps an answer to the current or a later round. Returns False for one that comes when
        its round is over, or is another's."""
        key = answer.key
        if key.epoch != self._epoch:
            return False
        self.heard = True
        if isinstance(answer, ProposalReply) and answer.assumed:
            if self.on_pushed is not None:
                self.on_pushed(answer)
            return True
        if key.round < self._round:
            return False
        known = self._answers.get(key.round)
        if isinstance(known, VerdictReply | ProposalReply):
            return False
        if known is None and len(self._answers) >= MAILBOX_REPLIES_MAX:
            return False  # A replica that answers what nobody asked; what is needed is asked again.
        self._answers[key.round] = answer
        self._wake()
        return True

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

    def forget_loss(self) -> None:
        """Whatever broke is not what is waited for from now on."""
        self._lost = None

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


class ReplicaConnection(Generic[Item, Answer]):
    """One replica's link, shared by all sessions that use it."""

    def __init__(
        self,
        link: Link[Item, Answer],
        replica: str,
        description: ReplicaDescription,
        on_away: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_away` hears when the replica cannot be reached."""
        self.link: Link[Item, Answer] = link
        self.replica = replica
        """The replica's name in the session store."""
        self.description = description
        self.leaving = False
        """Whether its sessions are to go elsewhere."""
        self.away = False
        """Whether it could not be reached when it was last tried, and has not said since what it
        runs."""
        self.num_stale = 0
        """Proposals and verdicts that came when their round or session was over."""
        self._on_away = on_away
        self._boxes: dict[str, Mailbox[Answer]] = {}
        self._repeats: dict[ReplyKey, None] = {}
        """Questions that are answered already, the oldest first: see `expect_repeat`."""
        link.listen(self._deliver, self.lose)

    @property
    def is_open(self) -> bool:
        """Whether sessions may come here."""
        return not (self.leaving or self.away)

    @property
    def sessions(self) -> list[str]:
        """Those that have a mailbox here."""
        return list(self._boxes)

    @property
    def num_boxes(self) -> int:
        """How many these are."""
        return len(self._boxes)

    def open(self, session_id: str, box: Mailbox[Answer]) -> None:
        """Answers to a session go to its mailbox from now on."""
        check(session_id not in self._boxes, f"session {session_id} has a mailbox already")
        self._boxes[session_id] = box

    def send(self, item: Item) -> None:
        """See `Link.send`."""
        try:
            self.link.send(item)
        except LinkLost:
            self.miss()
            raise

    def miss(self) -> None:
        """The replica cannot be reached, or cannot go on."""
        self.away = True
        self._on_away()

    def leave(self, session_id: str) -> None:
        """Answers to a session go nowhere until it comes back, if ever."""
        self._boxes.pop(session_id, None)

    def close(self, session_id: str, epoch: int) -> None:
        """The session ends here: the replica may forget it, and hears no more of this epoch."""
        self.leave(session_id)
        self.link.release(session_id, epoch)

    def expect_repeat(self, key: ReplyKey) -> None:
        """A proposal that was pushed has met the question for it on the way. The replica answers
        the question with the same proposal, which is not stale when it comes."""
        self._repeats[key] = None
        if len(self._repeats) > REPEATS_MAX:
            del self._repeats[next(iter(self._repeats))]

    def lose(self, error: Exception) -> None:
        """The replica cannot be reached: whoever waits is told."""
        self.miss()
        self._repeats.clear()
        for box in self._boxes.values():
            box.lose(error)

    def _deliver(self, answer: Answer) -> None:
        box = self._boxes.get(answer.key.session_id)
        is_kept = box is not None and box.put(answer)
        if _brings(answer) and not self._is_repeat(answer.key) and not is_kept:
            self.num_stale += 1

    def _is_repeat(self, key: ReplyKey) -> bool:
        """Whether this answer was expected as a repeat; it comes once."""
        is_expected = key in self._repeats
        self._repeats.pop(key, None)
        return is_expected


def _brings(answer: VerdictReply | ProposalReply | Resync | Refused) -> bool:
    """Whether it has what a round would have used: not where nothing was asked for, and not where
    it was pushed for an outcome, of which most do not come true."""
    if isinstance(answer, ProposalReply):
        return bool(answer.proposal) and not answer.assumed
    return isinstance(answer, VerdictReply)
