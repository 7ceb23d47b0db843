"""The replicas of one role that a coordinator knows, and each session's place among them.

    office     one replica's link and the mailboxes of its sessions            session_mailbox.py
    pool       the offices: replicas join, leave, are away and are back
    berth      where a session is now; it moves when its replica goes away or is to be left

A session that moves takes nothing along: its new replica is sent the committed tokens, and begins
with the pages that it has of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from outrider.errors import LinkLost, OutriderError, Unavailable, check
from outrider.limits import RUN_AHEAD_ROUNDS_MAX
from outrider.messages import (
    ProposalReply,
    Refused,
    ReplicaDescription,
    ReplyKey,
    Resync,
    VerdictReply,
)
from outrider.registry.affinity import choose
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.telemetry.observer import Side
from outrider.transport.link import Link, LinkBytes

from .session_mailbox import Mailbox, ReplicaConnection

_log = logging.getLogger(__name__)

Item = TypeVar("Item")
Answer = TypeVar("Answer", bound=VerdictReply | ProposalReply | Resync | Refused)

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
        self._offices: dict[str, ReplicaConnection[Item, Answer]] = {}
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
        return list(self._offices)

    @property
    def offices(self) -> Mapping[str, ReplicaConnection[Item, Answer]]:
        """The replicas that are known, by name, as they are now; to be looked at."""
        return dict(self._offices)

    @property
    def num_present(self) -> int:
        """Replicas that can be reached, as far as is known, and are not to be left."""
        return sum(office.is_open for office in self._offices.values())

    @property
    def is_full(self) -> bool:
        """Whether all that are present have as many sessions as share a step of theirs."""
        return all(
            office.num_boxes >= office.description.max_num_seqs
            for office in self._offices.values()
            if office.is_open
        )

    @property
    def num_bytes(self) -> LinkBytes:
        """To and from all replicas so far; may be read on any thread."""
        found = [office.link.num_bytes for office in list(self._offices.values())] + [self._left]
        return LinkBytes(sum(one.sent for one in found), sum(one.received for one in found))

    @property
    def num_stale(self) -> int:
        """Their answers that came too late; may be read on any thread."""
        return self._num_stale_left + sum(one.num_stale for one in list(self._offices.values()))

    @property
    def description(self) -> ReplicaDescription:
        """What the replica runs that joined first of those that are known. Raises `Unavailable`
        where there is none."""
        for office in self._offices.values():
            return office.description
        raise Unavailable(f"no {self.role} is known")

    def newest(self, weights: str = "") -> ReplicaDescription | None:
        """What the replica runs that joined last of those that are present, or else of all; None
        where none is known. Only of those with these `weights` (`ReplicaDescription.weights`);
        empty = any."""
        offices = [
            office for office in self._offices.values()
            if weights in ("", office.description.weights)
        ]  # fmt: skip
        found = [office for office in offices if office.is_open] or offices
        return found[-1].description if found else None

    async def join(self, name: str, link: Link[Item, Answer]) -> None:
        """Takes a replica in, whose link is the pool's from now on. Raises `Unavailable` where it
        does not say what it runs, and what `fits` raises; then it is not taken in."""
        check(name not in self._offices, f"{name} has joined already")
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
        if errors and not self._offices:
            raise errors[0]

    async def answers(self, name: str) -> bool:
        """Whether a replica says what it runs."""
        office = self._offices.get(name)
        if office is None or office.away:
            return False
        try:
            await office.link.describe(PROBE_TIMEOUT_S)
        except OutriderError:
            return False
        return True

    def admit(self, name: str, link: Link[Item, Answer], description: ReplicaDescription) -> None:
        """As `join`, for a replica of which it is known what it runs, and that it fits."""
        self._offices[name] = ReplicaConnection(link, name, description, self._lost.set)
        self._tell_found()

    def retire(self, name: str) -> None:
        """A replica is to be left: it gets no more sessions, and those that it has move at the
        beginning of their next round, where there is another."""
        office = self._offices.get(name)
        if office is not None:
            office.leaving = True

    async def leave(self, name: str) -> None:
        """A replica is gone: its sessions hear that it is lost, and move."""
        office = self._offices.pop(name, None)
        if office is not None:
            self._left = LinkBytes(
                self._left.sent + office.link.num_bytes.sent,
                self._left.received + office.link.num_bytes.received,
            )
            self._num_stale_left += office.num_stale
            office.lose(LinkLost(f"the {self.role} {name} is gone"))
            await office.link.close()

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
            name: office
            for name, office in self._offices.items()
            if office not in without and weights in ("", office.description.weights)
        }
        present = {name: office for name, office in fitting.items() if office.is_open}
        if not present and not without:
            present = fitting
        if preferred in present:
            return present[preferred]
        if numerics:
            alike = {
                name: office
                for name, office in present.items()
                if office.description.numerics == numerics
            }
            present = alike or present
        loads = {name: office.num_boxes for name, office in present.items()}
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
            away = [office for office in self._offices.values() if office.away]
            await asyncio.gather(*(self._probe(office) for office in away))
            if any(office.away for office in away):
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

    async def _probe(self, office: ReplicaConnection[Item, Answer]) -> None:
        """One that answers is there again, perhaps as another: it was started anew."""
        try:
            description = await office.link.describe(PROBE_TIMEOUT_S)
            self._fits(description)
        except OutriderError as error:
            _log.debug("the %s %s is still away: %s", self.role, office.replica, error)
        else:
            _log.info("the %s %s is there again", self.role, office.replica)
            office.description, office.away = description, False
            self._tell_found()

    async def healthy(self, timeout_s: float) -> bool:
        """Whether a replica answers, after no more than twice `timeout_s`: one that should is asked
        first, and where it does not all others at once."""
        offices = sorted(self._offices.values(), key=lambda office: not office.is_open)
        for some in (offices[:1], offices[1:]):
            if any(await asyncio.gather(*(_answers(office, timeout_s) for office in some))):
                return True
        return False

    async def close(self) -> None:
        """Closes all links."""
        await asyncio.gather(*(office.link.close() for office in self._offices.values()))

    def check_integrity(self, sessions: set[str], *, every: bool = True) -> None:
        """Raises `InvariantError` unless these sessions, `every` one or some, and no others have a
        mailbox, and in one office."""
        boxes = [name for office in self._offices.values() for name in office.sessions]
        check(len(boxes) == len(set(boxes)), "a session with two mailboxes")
        check(set(boxes) <= sessions, "a mailbox without a session")
        check(not every or set(boxes) == sessions, "a session without a mailbox")


async def _answers(office: ReplicaConnection[Any, Any], timeout_s: float) -> bool:
    try:
        await office.link.describe(timeout_s)
    except Unavailable:
        return False
    return True


def berth_of(
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
        self._office: ReplicaConnection[Item, Answer] | None = None
        self._left: list[ReplicaConnection[Item, Answer]] = []
        """Where it was before."""
        self._rejected: list[ReplicaConnection[Item, Answer]] = []
        """Where it does not go again."""
        self._num_moves = 0
        self._enter(pool.find(affinity, weights, preferred=preferred))

    @property
    def replica(self) -> str:
        """The replica's name in the session store; empty where there is none."""
        return "" if self._office is None else self._office.replica

    @property
    def is_left(self) -> bool:
        """Whether it should move as soon as there is somewhere to go."""
        return self._office is None or not self._office.is_open

    def number(self, round_index: int) -> int:
        """What a round is called where it is now: a greater number than any that was asked for, or
        run ahead of, where it was before. So what is late from there answers nothing when it comes
        back."""
        return round_index + self._num_moves * (RUN_AHEAD_ROUNDS_MAX + 1)

    def send(self, item: Item) -> None:
        """See `Link.send`. One that was away is sent nothing before it has said what it runs: it
        may have been started anew, as another."""
        office = self._office
        if office is None:
            raise LinkLost(f"no {self._pool.role} is known")
        if office.away:
            raise LinkLost(f"the {self._pool.role} {office.replica} is away")
        if self._weights not in ("", office.description.weights):
            raise LinkLost(f"the {self._pool.role} {office.replica} has other weights now")
        office.send(item)

    def expect_repeat(self, key: ReplyKey) -> None:
        """See `ReplicaConnection.expect_repeat`."""
        if self._office is not None:
            self._office.expect_repeat(key)

    async def change(self, timeout_s: float) -> None:
        """See `ReplicaPool.change`."""
        await self._pool.change(timeout_s)

    def give_up(self) -> None:
        """The replica says that it cannot go on: it counts as away until it says what it runs."""
        if self._office is not None:
            self._office.miss()

    def reject(self) -> None:
        """What the replica answers is wrong: a session that leaves it does not come back."""
        if self._office is not None and self._office not in self._rejected:
            self._rejected.append(self._office)

    def move(self) -> bool:
        """Goes to another replica with the same weights that can be reached, and that was not
        rejected. Returns whether there
        is one. Nothing that was asked for is answered then, and what the new one holds is not
        known."""
        without = [*self._rejected] if self._office is None else [*self._rejected, self._office]
        found = self._pool.find(self._affinity, self._weights, without, numerics=self._numerics)
        if found is None:
            return False
        _log.debug("session %s moves: %s, %s", self._session_id, self.replica, found.replica)
        if self._office is not None:
            self._office.leave(self._session_id)
            self._left = [one for one in self._left if one is not self._office] + [self._office]
        self._num_moves += 1
        self._enter(found)
        return True

    def close(self) -> None:
        """The session ends: all replicas that it has been with may forget it."""
        for office in (self._office, *self._left):
            if office is not None:
                office.close(self._session_id, self._epoch)
        self._office, self._left, self._rejected = None, [], []

    def _enter(self, office: ReplicaConnection[Item, Answer] | None) -> None:
        if office is not None:
            office.open(self._session_id, self.mailbox)
            self.mailbox.forget_loss()
            self._numerics = self._numerics or office.description.numerics
            self._office = office
