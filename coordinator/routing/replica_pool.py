"""The replicas of one role that a coordinator knows, and each session's place among them.

    Mailbox            the answers to one session from one side
    ReplicaConnection  one replica's link, and the mailboxes of its sessions
    ReplicaPool        the replicas: they join, leave, are away and are back
    SessionRoute       the replica of a session; it changes when that is away or is to be left

A session that moves takes nothing along: its new replica is sent the committed tokens, and begins
with the pages that it has of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from coordinator.routing.affinity import choose
from outrider.errors import Incompatible, LinkLost, OutriderError, Unavailable, check
from outrider.limits import MAILBOX_REPLIES_MAX, RUN_AHEAD_ROUNDS_MAX
from outrider.messages import (
    ProposalReply,
    Refused,
    ReplicaDescription,
    ReplyKey,
    Resync,
    VerdictReply,
)
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.telemetry.observer import Side
from outrider.transport.link import Link, LinkBytes

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
        name: str,
        description: ReplicaDescription,
        on_away: Callable[[], None] = lambda: None,
    ) -> None:
        self.link: Link[Item, Answer] = link
        self.name = name
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
        return not (self.leaving or self.away)

    @property
    def sessions(self) -> list[str]:
        return list(self._boxes)

    @property
    def num_boxes(self) -> int:
        return len(self._boxes)

    def open(self, session_id: str, box: Mailbox[Answer]) -> None:
        check(session_id not in self._boxes, f"session {session_id} has a mailbox already")
        self._boxes[session_id] = box

    def send(self, item: Item) -> None:
        try:
            self.link.send(item)
        except LinkLost:
            self.miss()
            raise

    def miss(self) -> None:
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
        is_expected = key in self._repeats
        self._repeats.pop(key, None)
        return is_expected


def _brings(answer: VerdictReply | ProposalReply | Resync | Refused) -> bool:
    """Whether it has what a round would have used: not where nothing was asked for, and not where
    it was pushed for an outcome, of which most do not come true."""
    if isinstance(answer, ProposalReply):
        return bool(answer.proposal) and not answer.assumed
    return isinstance(answer, VerdictReply)


_log = logging.getLogger(__name__)


DESCRIBE_TIMEOUT_S: Final = 10.0
"""How long a replica that is new may take to say what it runs ..."""
PROBE_TIMEOUT_S: Final = 2.0
"""... and one that was away, to be there again."""
PROBE_PERIOD_S: Final = 0.1
"""Between two looks at the replicas that are away."""


class ReplicaPool(Generic[Item, Answer]):
    """The replicas of one role. Those of other weights may be among them, as while new ones come
    in: a session may have to stay with the weights that it began with."""

    def __init__(
        self, role: Side, fits: Callable[[ReplicaDescription], None] = lambda description: None
    ) -> None:
        """`fits` raises an `OutriderError` for a replica that cannot be used here."""
        self.role = role
        self._fits = fits
        self._replicas: dict[str, ReplicaConnection[Item, Answer]] = {}
        self._left = LinkBytes()
        """Of replicas that are known no more ..."""
        self._num_stale_left = 0
        """... and their answers that came too late."""
        self._lost = asyncio.Event()
        """Set when a replica cannot be reached."""
        self._found = asyncio.Event()
        """Set, and made anew, when one is there that was not."""

    @property
    def names(self) -> list[str]:
        """Of the replicas that are known, in the order in which they joined."""
        return list(self._replicas)

    @property
    def replicas(self) -> Mapping[str, ReplicaConnection[Item, Answer]]:
        """The replicas that are known, by name, as they are now; to be looked at."""
        return dict(self._replicas)

    @property
    def num_present(self) -> int:
        """Replicas that can be reached, as far as is known, and are not to be left."""
        return sum(replica.is_open for replica in self._replicas.values())

    @property
    def is_full(self) -> bool:
        """Whether all that are present have as many sessions as share a step of theirs."""
        return all(
            replica.num_boxes >= replica.description.max_num_seqs
            for replica in self._replicas.values()
            if replica.is_open
        )

    @property
    def num_bytes(self) -> LinkBytes:
        """To and from all replicas so far; may be read on any thread."""
        found = [replica.link.num_bytes for replica in list(self._replicas.values())] + [self._left]
        return LinkBytes(sum(one.sent for one in found), sum(one.received for one in found))

    @property
    def num_stale(self) -> int:
        """Their answers that came too late; may be read on any thread."""
        return self._num_stale_left + sum(one.num_stale for one in list(self._replicas.values()))

    @property
    def description(self) -> ReplicaDescription:
        """What the replica runs that joined first of those that are known. Raises `Unavailable`
        where there is none."""
        for replica in self._replicas.values():
            return replica.description
        raise Unavailable(f"no {self.role} is known")

    def newest(self, weights: str = "") -> ReplicaDescription | None:
        """What the replica runs that joined last of those that are present, or else of all; None
        where none is known. Only of those with these `weights` (`ReplicaDescription.weights`);
        empty = any."""
        replicas = [
            replica for replica in self._replicas.values()
            if weights in ("", replica.description.weights)
        ]  # fmt: skip
        found = [replica for replica in replicas if replica.is_open] or replicas
        return found[-1].description if found else None

    async def join(self, name: str, link: Link[Item, Answer]) -> None:
        """Takes a replica in, whose link is the pool's from now on. Raises `Unavailable` where it
        does not say what it runs, and what `fits` raises; then it is not taken in."""
        check(name not in self._replicas, f"{name} has joined already")
        try:
            description = await link.describe(DESCRIBE_TIMEOUT_S)
            self._fits(description)
        except BaseException:
            await link.close()
            raise
        self.admit(name, link, description)

    async def join_all(self, links: Mapping[str, Link[Item, Answer]]) -> None:
        """Takes replicas in, of which some may be gone or not fit. Raises what `join` raises where
        none of them can be taken in."""
        found = await asyncio.gather(
            *(self.join(name, link) for name, link in links.items()), return_exceptions=True
        )
        errors = [error for error in found if error is not None]
        for name, error in zip(links, found, strict=True):
            if error is not None:
                _log.warning("the %s %s cannot join: %s", self.role, name, error)
        if errors and not self._replicas:
            raise errors[0]

    async def answers(self, name: str) -> bool:
        replica = self._replicas.get(name)
        if replica is None or replica.away:
            return False
        try:
            await replica.link.describe(PROBE_TIMEOUT_S)
        except OutriderError:
            return False
        return True

    def admit(self, name: str, link: Link[Item, Answer], description: ReplicaDescription) -> None:
        """As `join`, for a replica of which it is known what it runs, and that it fits."""
        self._replicas[name] = ReplicaConnection(link, name, description, self._lost.set)
        self._tell_found()

    def retire(self, name: str) -> None:
        """A replica is to be left: it gets no more sessions, and those that it has move at the
        beginning of their next round, where there is another."""
        replica = self._replicas.get(name)
        if replica is not None:
            replica.leaving = True

    async def leave(self, name: str) -> None:
        """A replica is gone: its sessions hear that it is lost, and move."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._left = LinkBytes(
                self._left.sent + replica.link.num_bytes.sent,
                self._left.received + replica.link.num_bytes.received,
            )
            self._num_stale_left += replica.num_stale
            replica.lose(LinkLost(f"the {self.role} {name} is gone"))
            await replica.link.close()

    def find(
        self,
        affinity: bytes,
        weights: str,
        without: Collection[ReplicaConnection[Item, Answer]] = (),
        preferred: str = "",
        numerics: str = "",
    ) -> ReplicaConnection[Item, Answer] | None:
        """Where a session may go that shares pages with those of the same `affinity`, by
        `rendezvous.choose`; to `preferred` before all others, and to none of `without`. One that is
        away only where none is left behind for it. `weights` are those that it needs; empty =
        any. Replicas with these `numerics` come before others, whatever their load: there its
        text goes on as it would have, to the last token."""
        fitting = {
            name: replica
            for name, replica in self._replicas.items()
            if replica not in without and weights in ("", replica.description.weights)
        }
        present = {name: replica for name, replica in fitting.items() if replica.is_open}
        if not present and not without:
            present = fitting
        if preferred in present:
            return present[preferred]
        if numerics:
            alike = {
                name: replica
                for name, replica in present.items()
                if replica.description.numerics == numerics
            }
            present = alike or present
        loads = {name: replica.num_boxes for name, replica in present.items()}
        seats = min((one.description.max_num_seqs for one in present.values()), default=0)
        name = choose(affinity, loads, seats)
        return None if name is None else present[name]

    async def watch(self) -> None:
        """Looks for replicas that are away, at once and then now and then, until it is cancelled;
        one that comes and goes is looked for no more often."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._lost.wait()
            await asyncio.sleep(due - loop.time())
            self._lost.clear()
            due = loop.time() + PROBE_PERIOD_S
            away = [replica for replica in self._replicas.values() if replica.away]
            await asyncio.gather(*(self._probe(replica) for replica in away))
            if any(replica.away for replica in away):
                self._lost.set()

    async def change(self, timeout_s: float) -> None:
        """Waits until there is a replica that was not, but no longer than that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._found.wait()

    async def wait_for_one(self, timeout_s: float) -> ReplicaDescription:
        """What the newest replica runs, once one is known. Raises `Unavailable` where none is by
        then."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while (found := self.newest()) is None:
            left_s = until - loop.time()
            if left_s <= 0:
                raise Unavailable(f"no {self.role} is known")
            await self.change(left_s)
        return found

    def _tell_found(self) -> None:
        self._found.set()
        self._found = asyncio.Event()

    async def _probe(self, replica: ReplicaConnection[Item, Answer]) -> None:
        """One that answers is there again, perhaps as another: it was started anew."""
        try:
            description = await replica.link.describe(PROBE_TIMEOUT_S)
            self._fits(description)
        except OutriderError as error:
            _log.debug("the %s %s is still away: %s", self.role, replica.name, error)
        else:
            _log.info("the %s %s is there again", self.role, replica.name)
            replica.description, replica.away = description, False
            self._tell_found()

    async def healthy(self, timeout_s: float) -> bool:
        """Whether a replica answers, after no more than twice `timeout_s`: one that should is asked
        first, and where it does not all others at once."""
        replicas = sorted(self._replicas.values(), key=lambda replica: not replica.is_open)
        for some in (replicas[:1], replicas[1:]):
            if any(await asyncio.gather(*(_answers(replica, timeout_s) for replica in some))):
                return True
        return False

    async def close(self) -> None:
        await asyncio.gather(*(replica.link.close() for replica in self._replicas.values()))

    def check_integrity(self, sessions: set[str], *, every: bool = True) -> None:
        """Raises `InvariantError` unless these sessions, `every` one or some, and no others have a
        mailbox, and in one replica."""
        boxes = [name for replica in self._replicas.values() for name in replica.sessions]
        check(len(boxes) == len(set(boxes)), "a session with two mailboxes")
        check(set(boxes) <= sessions, "a mailbox without a session")
        check(not every or set(boxes) == sessions, "a session without a mailbox")


async def _answers(replica: ReplicaConnection[Any, Any], timeout_s: float) -> bool:
    try:
        await replica.link.describe(timeout_s)
    except Unavailable:
        return False
    return True


def route_of(
    pool: ReplicaPool[Item, Answer],
    session: Session,
    affinity: bytes,
    held: CacheState,
    weights: str = "",
) -> SessionRoute[Item, Answer]:
    """A place for a session, with the replica that holds the most of it where that is there."""
    return SessionRoute(pool, session.session_id, session.epoch, affinity, held.replica, weights)


class SessionRoute(Generic[Item, Answer]):
    """One session's place: with a replica, or, while none is known, with nobody. Its mailbox goes
    along when it moves. It may come back to where it was, so no replica is told that it has left:
    what a release has ended does not begin again. Of what it keeps there others may take the pages,
    as of any session that says nothing."""

    def __init__(
        self,
        pool: ReplicaPool[Item, Answer],
        session_id: str,
        epoch: int,
        affinity: bytes,
        preferred: str = "",
        weights: str = "",
    ) -> None:
        """`affinity` is `rendezvous.affinity`; `preferred` the replica that may have the session's
        tokens, if there is one. Only replicas with these `weights` will do; empty = any."""
        self.mailbox: Mailbox[Answer] = Mailbox(epoch)
        self._pool = pool
        self._session_id = session_id
        self._epoch = epoch
        self._affinity = affinity
        self._weights = weights
        self._numerics = ""
        """Those of the replica that it began with."""
        self._replica: ReplicaConnection[Item, Answer] | None = None
        self._left: list[ReplicaConnection[Item, Answer]] = []
        """Where it was before."""
        self._rejected: list[ReplicaConnection[Item, Answer]] = []
        """Where it does not go again."""
        self._num_moves = 0
        self._enter(pool.find(affinity, weights, preferred=preferred))

    @property
    def replica(self) -> str:
        """The replica's name in the session store; empty where there is none."""
        return "" if self._replica is None else self._replica.name

    @property
    def is_left(self) -> bool:
        """Whether it should move as soon as there is somewhere to go."""
        return self._replica is None or not self._replica.is_open

    def number(self, round_index: int) -> int:
        """What a round is called where it is now: a greater number than any that was asked for, or
        run ahead of, where it was before. So what is late from there answers nothing when it comes
        back."""
        return round_index + self._num_moves * (RUN_AHEAD_ROUNDS_MAX + 1)

    def send(self, item: Item) -> None:
        """See `Link.send`. One that was away is sent nothing before it has said what it runs: it
        may have been started anew, as another."""
        replica = self._replica
        if replica is None:
            raise LinkLost(f"no {self._pool.role} is known")
        if replica.away:
            raise LinkLost(f"the {self._pool.role} {replica.name} is away")
        if self._weights not in ("", replica.description.weights):
            raise LinkLost(f"the {self._pool.role} {replica.name} has other weights now")
        replica.send(item)

    def expect_repeat(self, key: ReplyKey) -> None:
        if self._replica is not None:
            self._replica.expect_repeat(key)

    async def change(self, timeout_s: float) -> None:
        await self._pool.change(timeout_s)

    def give_up(self) -> None:
        """The replica says that it cannot go on: it counts as away until it says what it runs."""
        if self._replica is not None:
            self._replica.miss()

    def reject(self) -> None:
        """What the replica answers is wrong: a session that leaves it does not come back."""
        if self._replica is not None and self._replica not in self._rejected:
            self._rejected.append(self._replica)

    def move(self) -> bool:
        """Goes to another replica with the same weights that can be reached, and that was not
        rejected. Returns whether there
        is one. Nothing that was asked for is answered then, and what the new one holds is not
        known."""
        without = [*self._rejected] if self._replica is None else [*self._rejected, self._replica]
        found = self._pool.find(self._affinity, self._weights, without, numerics=self._numerics)
        if found is None:
            return False
        _log.debug("session %s moves: %s, %s", self._session_id, self.replica, found.name)
        if self._replica is not None:
            self._replica.leave(self._session_id)
            self._left = [one for one in self._left if one is not self._replica] + [self._replica]
        self._num_moves += 1
        self._enter(found)
        return True

    def close(self) -> None:
        """The session ends: all replicas that it has been with may forget it."""
        for replica in (self._replica, *self._left):
            if replica is not None:
                replica.close(self._session_id, self._epoch)
        self._replica, self._left, self._rejected = None, [], []

    def _enter(self, replica: ReplicaConnection[Item, Answer] | None) -> None:
        if replica is not None:
            replica.open(self._session_id, self.mailbox)
            self.mailbox.forget_loss()
            self._numerics = self._numerics or replica.description.numerics
            self._replica = replica


class Compatibility:
    """What the replicas of a coordinator have in common: with the first of each role."""

    def __init__(self) -> None:
        self.target: ReplicaDescription | None = None
        self.draft: ReplicaDescription | None = None

    def check_target(self, target: ReplicaDescription) -> None:
        """Raises `Incompatible` for a target whose tokens mean something else than the first one's,
        or that drafts in another way."""
        if self.target is None:
            self.target = target
        elif _kind(target) != _kind(self.target):
            raise Incompatible(
                f"the target {target.model!r} has another vocabulary, tokenizer or way of "
                f"drafting than {self.target.model!r}"
            )

    def check_draft(self, draft: ReplicaDescription) -> None:
        """Raises `Incompatible` for a draft that does not go with the targets, or goes on from
        something else than the first one."""
        if self.target is not None:
            check_compatible(self.target, draft)
        if self.draft is None:
            self.draft = draft
        elif draft.reads_features != self.draft.reads_features:
            raise Incompatible(
                f"of the drafts {draft.model!r} and {self.draft.model!r} only one goes on from "
                "what its target's head reads"
            )


def _kind(target: ReplicaDescription) -> tuple[int, str, bool, bool]:
    return (
        target.vocab_size,
        target.tokenizer_fingerprint,
        target.drafts_itself,
        target.shows_features,
    )


def check_compatible(target: ReplicaDescription, draft: ReplicaDescription) -> None:
    """Raises `Incompatible` unless the draft's tokens mean what the target's mean, and it is shown
    what it reads."""
    known = draft.tokenizer_fingerprint and target.tokenizer_fingerprint
    if known and draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise Incompatible(
            f"the draft {draft.model!r} has another tokenizer ({draft.tokenizer_fingerprint}) than "
            f"the target {target.model!r} ({target.tokenizer_fingerprint})"
        )
    if draft.reads_features and not target.shows_features:
        raise Incompatible(
            f"the draft {draft.model!r} goes on from what its target's head reads, which "
            f"{target.model!r} does not show"
        )
