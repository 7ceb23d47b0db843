"""The replicas of one role that a coordinator knows, and each session's route to one of them.

    ReplicaConnection  one replica's link, and the routes of its sessions
    ReplicaPool        the replicas, which join, leave, go away and come back
    SessionContext     a session, and what its messages need besides
    SessionRoute       a session's replica and its answers; it moves to another replica if this one
                       is away or is to be left

A session that moves leaves its pages behind. Its new replica gets the committed tokens, and uses
the pages of them that it already has.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from coordinator.requests.validation import GenerationParameters
from outrider.errors import Incompatible, LinkLost, OutriderError, Unavailable, check
from outrider.limits import MAILBOX_REPLIES_MAX, PAGE_SIZE, RUN_AHEAD_ROUNDS_MAX
from outrider.messages import (
    ProposalReply,
    Refused,
    ReplicaDescription,
    Resync,
    RoundHead,
    VerdictReply,
)
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.telemetry.observer import SILENT, RequestObserver, Side
from outrider.transport.link import Link

_log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 10.0
"""Time for a new replica to describe itself."""
PROBE_TIMEOUT_S = 2.0
"""Time for a known replica to describe itself."""
PROBE_PERIOD_S = 0.1
"""Time between two probes of the replicas that are away."""

LOAD_SLACK = 0.25
"""A replica's sessions may exceed the mean by this share, or by rounding up. The share applies only
as far as the sessions fit a step."""
_KEY_PAGES = 2
"""Sessions with the same affinity have at least this many pages of their prompts in common."""

Item = TypeVar("Item")
Answer = TypeVar("Answer", bound=VerdictReply | ProposalReply | Resync | Refused)


class ReplicaConnection:
    """One replica's link, shared by all sessions that use it."""

    def __init__(
        self,
        pool: "ReplicaPool",
        link: Link,
        name: str,
        description: ReplicaDescription,
        trial_share: float,
    ) -> None:
        self._pool = pool
        self.link = link
        self.name = name
        """The replica's name in the session store."""
        self.description = description
        self.leaving = False
        """Whether its sessions are to move to other replicas."""
        self.trial_share = trial_share
        """Share of the new sessions that it gets while it is on trial; 0 = it is not on trial."""
        self.away = False
        """Whether it could not be reached, and has not described itself since."""
        self.routes: dict[str, SessionRoute[Any, Any]] = {}
        """Routes of its sessions, by session id."""
        link.listen(self._deliver, self.lose)

    @property
    def is_open(self) -> bool:
        return not (self.leaving or self.away)

    async def answers(self) -> bool:
        """Whether it describes itself within `PROBE_TIMEOUT_S`."""
        try:
            await self.link.describe(PROBE_TIMEOUT_S)
        except OutriderError:
            return False
        return True

    def miss(self) -> None:
        """Marks it as away: it cannot be reached, or cannot go on."""
        self.away = True
        self._pool.lost.set()

    def lose(self, error: Exception) -> None:
        """Call when its stream broke."""
        self.miss()
        for route in self.routes.values():
            route.lose(error)

    def _deliver(self, answer: Any) -> None:
        route = self.routes.get(answer.key.session_id)
        is_kept = route is not None and route.put(answer)
        # Proposals for outcomes that did not happen are not stale, nor are the empty ones that
        # answer prompts.
        if isinstance(answer, ProposalReply):
            is_kept |= not answer.proposal or bool(answer.assumed)
        self._pool.num_stale += not is_kept and isinstance(answer, ProposalReply | VerdictReply)


class ReplicaPool:
    """The replicas of one role. Their weights may differ, as during an upgrade: a session stays
    with the weights that it began with."""

    def __init__(self, role: Side, targets: "ReplicaPool | None" = None) -> None:
        """`targets` is for a pool of drafts, which must fit the first target."""
        self.role = role
        self.first: ReplicaDescription | None = None
        """Description of the first replica that ever joined: all others must fit it."""
        self._targets = targets
        self.replicas: dict[str, ReplicaConnection] = {}
        """The known replicas, by name, in the order in which they joined."""
        self._left = Counter[str]()
        """Bytes to and from replicas that were removed."""
        self.num_stale = 0
        """Proposals and verdicts that came after their round or session was over. May be read on
        any thread."""
        self.lost = asyncio.Event()
        """Set when a replica cannot be reached."""
        self._found = asyncio.Event()
        """Set, and then replaced, when a replica joins or is back."""

    @property
    def num_present(self) -> int:
        """Replicas that are neither away nor to be left."""
        return sum(replica.is_open for replica in self.replicas.values())

    @property
    def is_full(self) -> bool:
        """Whether all present replicas have as many sessions as fit a step."""
        return all(
            len(replica.routes) >= replica.description.max_num_seqs
            for replica in self.replicas.values()
            if replica.is_open
        )

    @property
    def num_bytes(self) -> Counter[str]:
        """See `Link.num_bytes`; of all replicas so far."""
        return sum((one.link.num_bytes for one in list(self.replicas.values())), self._left)

    def newest(self, weights: str = "") -> ReplicaDescription | None:
        """Description of the newest replica with these `weights` (`ReplicaDescription.weights`;
        empty = any), if there is one. Present replicas come first, then those that are not on
        trial."""
        replicas = [
            replica for replica in self.replicas.values()
            if weights in ("", replica.description.weights)
        ]  # fmt: skip
        found = [replica for replica in replicas if replica.is_open] or replicas
        found = [replica for replica in found if not replica.trial_share] or found
        return found[-1].description if found else None

    @property
    def on_trial(self) -> ReplicaConnection | None:
        """The newest present replica on trial, if there is one."""
        found = [one for one in self.replicas.values() if one.trial_share and one.is_open]
        return found[-1] if found else None

    @property
    def first_kept(self) -> ReplicaDescription | None:
        """Description of the oldest replica that is not on trial, if there is one."""
        found = (one.description for one in self.replicas.values() if not one.trial_share)
        return next(found, None)

    async def join(self, name: str, link: Link, trial_share: float = 0.0) -> None:
        """Adds a replica, whose link the pool then owns; `trial_share` puts it on trial. Raises
        `Unavailable` if it does not describe itself, and `Incompatible` if it does not fit."""
        check(name not in self.replicas, f"{name} has joined already")
        try:
            description = await link.describe(DESCRIBE_TIMEOUT_S)
            self._check(description)
        except BaseException:
            await link.close()
            raise
        self.admit(name, link, description, trial_share)

    async def join_all(self, links: Mapping[str, Link]) -> None:
        """Adds the replicas that answer and fit. Raises like `join` if the pool is empty then."""
        found = await asyncio.gather(
            *(self.join(name, link) for name, link in links.items()), return_exceptions=True
        )
        errors = {name: error for name, error in zip(links, found, strict=True) if error}
        for name, error in errors.items():
            _log.warning("the %s %s cannot join: %s", self.role, name, error)
        if errors and not self.replicas:
            raise next(iter(errors.values()))

    def admit(
        self, name: str, link: Link, description: ReplicaDescription, trial_share: float = 0.0
    ) -> None:
        """Adds a replica whose description is known to fit."""
        self.first = self.first or description
        self.replicas[name] = ReplicaConnection(self, link, name, description, trial_share)
        self._tell_found()

    def retire(self, name: str) -> None:
        """Marks a replica as leaving: it gets no more sessions, and its sessions move with their
        next round."""
        if name in self.replicas:
            self.replicas[name].leaving = True

    async def leave(self, name: str) -> None:
        """Removes a replica that is gone. Its sessions move."""
        replica = self.replicas.pop(name, None)
        if replica is not None:
            # Not in place: another thread may be reading it.
            self._left = self._left + replica.link.num_bytes
            replica.lose(LinkLost(f"the {self.role} {name} is gone"))
            await replica.link.close()

    def find(
        self,
        affinity: bytes,
        weights: str,
        without: Collection[ReplicaConnection] = (),
        preferred: str = "",
        numerics: str = "",
        session_id: str = "",
    ) -> ReplicaConnection | None:
        """The replica for a session, by `choose`: sessions of the same `affinity` share pages.

        - It has these `weights` (empty = any), is none of `without`, and `can_read` the session.
        - It is not away, unless all are away and `without` is empty.
        - `preferred` comes before all others.
        - One on trial takes its share of the sessions, chosen by id. It takes others only if there
          is no other replica.
        - Replicas with the same `numerics` come before others, whatever their load: they continue
          the session's text with exactly the same tokens.
        - A draft that is leaving gets no session, so that it ends soon: a look-up fills in."""
        fitting = [
            replica
            for replica in self.replicas.values()
            if replica not in without
            and weights in ("", replica.description.weights)
            and not (replica.leaving and self.role == "draft")
            and self.can_read(replica.description, session_id)
        ]
        found = [replica for replica in fitting if replica.is_open]
        if not found and not without:
            found = fitting
        if preferred in (one.name for one in found):
            return self.replicas[preferred]
        if numerics:
            found = [one for one in found if one.description.numerics == numerics] or found
        if any(one.trial_share for one in found):
            place = _place(session_id)
            found = (
                [one for one in found if place < one.trial_share]
                or [one for one in found if not one.trial_share]
                or found
            )
        seats = min((one.description.max_num_seqs for one in found), default=0)
        name = choose(affinity, {one.name: len(one.routes) for one in found}, seats)
        return None if name is None else self.replicas[name]

    def can_read(self, replica: ReplicaDescription, session_id: str) -> bool:
        """Whether a draft can read what the session's current target sends: it reads no hidden
        states, or those of this target's head."""
        is_free = self._targets is None or not replica.reads_features
        return is_free or self.features_shown(session_id) == replica.features

    def features_shown(self, session_id: str) -> str | None:
        """The head whose hidden states the session's current target sends; None without one."""
        targets = () if self._targets is None else self._targets.replicas.values()
        found = (one.description.features for one in targets if session_id in one.routes)
        return next(found, None)

    async def watch(self) -> None:
        """Probes replicas that are away, at once and then every `PROBE_PERIOD_S`, until it is
        cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self.lost.wait()
            await asyncio.sleep(due - loop.time())
            self.lost.clear()
            due = loop.time() + PROBE_PERIOD_S
            away = [replica for replica in self.replicas.values() if replica.away]
            await asyncio.gather(*(self._probe(replica) for replica in away))
            if any(replica.away for replica in away):
                self.lost.set()

    async def change(self, timeout_s: float) -> None:
        """Waits until a replica joins or is back, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._found.wait()

    async def wait_for_one(self, timeout_s: float) -> ReplicaDescription:
        """Description of the newest replica, once one is known. Raises `Unavailable` after
        `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.newest() is None:
                    await self._found.wait()
        found = self.newest()
        if found is None:
            raise Unavailable(f"no {self.role} is known")
        return found

    async def healthy(self) -> bool:
        """Whether any replica answers. Asks a present one first, then all others at once, so it
        takes at most twice `PROBE_TIMEOUT_S`."""
        replicas = sorted(self.replicas.values(), key=lambda replica: not replica.is_open)
        for some in (replicas[:1], replicas[1:]):
            if any(await asyncio.gather(*(replica.answers() for replica in some))):
                return True
        return False

    async def close(self) -> None:
        """Closes the links."""
        await asyncio.gather(*(replica.link.close() for replica in self.replicas.values()))

    def check_integrity(self, sessions: set[str], *, every: bool = True) -> None:
        """Raises `InvariantError` if another session has a route, or one of these has two, or, with
        `every`, none."""
        routed = [name for replica in self.replicas.values() for name in replica.routes]
        check(len(routed) == len(set(routed)), "a session with two routes")
        check(set(routed) <= sessions, "a route without a session")
        check(not every or set(routed) == sessions, "a session without a route")

    def _tell_found(self) -> None:
        self._found.set()
        self._found = asyncio.Event()

    async def _probe(self, replica: ReplicaConnection) -> None:
        """Marks a replica as back if it answers. After a restart its description may be another."""
        with suppress(OutriderError):
            description = await replica.link.describe(PROBE_TIMEOUT_S)
            self._check(description)
            _log.info("the %s %s is back", self.role, replica.name)
            replica.description, replica.away = description, False
            self._tell_found()

    def _check(self, found: ReplicaDescription) -> None:
        """Raises `Incompatible` for a target with other tokens than the first one, and for a draft
        that does not fit the targets, or that reads hidden states unlike the first one. Targets may
        differ in how they draft, as during an upgrade."""
        first, target = self.first, None if self._targets is None else self._targets.first
        own, other = found.tokenizer_fingerprint, target and target.tokenizer_fingerprint
        if self.role == "target":
            if first is not None and (found.vocab_size, own) != (
                first.vocab_size, first.tokenizer_fingerprint
            ):  # fmt: skip
                raise Incompatible(
                    f"the target {found.model!r} has another vocabulary or tokenizer than "
                    f"{first.model!r}"
                )
        elif target is not None and own and other and own != other:
            raise Incompatible(
                f"the draft {found.model!r} has another tokenizer ({own}) than the target "
                f"{target.model!r} ({other})"
            )
        elif target is not None and found.reads_features and not target.shows_features:
            raise Incompatible(
                f"the draft {found.model!r} reads hidden states that its target sends, which "
                f"{target.model!r} does not show"
            )
        elif first is not None and found.reads_features != first.reads_features:
            raise Incompatible(
                f"of the drafts {found.model!r} and {first.model!r} only one reads hidden states "
                "that its target sends; either all drafts or none must do so"
            )


# A session's first replica is chosen by rendezvous hashing (Thaler and Ravishankar 1998) of the
# start of its prompt. So sessions with the same start find the pages that others left, coordinators
# agree without communicating, and only its own sessions move when a replica comes or goes. A bound
# on loads (Mirrokni, Thorup and Zadimoghaddam 2018) sends sessions on if one replica would get too
# many. Each coordinator keeps the bound for its own sessions, so it holds for all sessions
# together.


def affinity(tenant: str, prompt_ids: Sequence[int]) -> bytes:
    """Key of sessions that may share pages: the same tenant, and the same first pages."""
    first = prompt_ids[: _KEY_PAGES * PAGE_SIZE]
    ids = b"".join(token_id.to_bytes(4, "little") for token_id in first)
    return blake2b(ids, key=blake2b(tenant.encode(), digest_size=16).digest()).digest()


def choose(key: bytes, loads: Mapping[str, int], seats: int) -> str | None:
    """The name that `key` prefers among those with room for one more session; None without names.
    `loads` has the number of sessions by name; `seats` sessions fit a step. Beyond `seats`, loads
    are kept equal, as sessions would wait longer where there are more."""
    if not loads:
        return None
    mean = (sum(loads.values()) + 1) / len(loads)
    slack = min(math.floor((1 + LOAD_SLACK) * mean), seats)
    bound = max(math.ceil(mean), slack)
    roomy = [name for name, load in loads.items() if load < bound]
    return max(roomy, key=lambda name: blake2b(name.encode(), key=key).digest())


def _place(session_id: str) -> float:
    """Hash of a session id in [0, 1), the same at every coordinator."""
    return int.from_bytes(blake2b(session_id.encode(), digest_size=4).digest()) / 2**32


@dataclass(frozen=True, eq=False)
class SessionContext:
    """A session, and what its messages need besides."""

    session: Session
    parameters: GenerationParameters
    deadline: float
    """A time of the event loop's clock."""
    observer: RequestObserver = SILENT

    @cached_property
    def hashes(self) -> tuple[int, bytes]:
        """Hashes of the sampling parameters and the constraint."""
        constraint = self.parameters.constraint
        digest = b"" if constraint is None else constraint.digest()
        return self.parameters.sampling.hash(), digest


class SessionRoute(Generic[Item, Answer]):
    """One session's replica, if there is one, and its answers. Drops stale and repeated answers:
    the first verdict or proposal of a round wins. A move sends no Release, as a replica refuses a
    released session, and this one may return."""

    def __init__(self, pool: ReplicaPool, context: SessionContext) -> None:
        """Begins with the replica that the session's record names, if it is present."""
        session = context.session
        is_target = pool.role == "target"
        held = session.target if is_target else session.draft
        self.context = context
        self.heard = True
        """Set to False by its user if the replica does not answer; any answer sets it to True
        again."""
        self.was_lost = False
        """Whether the stream broke between the last wait and the current round, so that all open
        requests must be sent again."""
        self.on_pushed: Callable[[ProposalReply], None] | None = None
        """Called with proposals that were drafted ahead; if None, they are dropped."""
        self._pool = pool
        self._affinity = affinity(
            session.record.tenant, session.tokens.ids[: session.prompt_length]
        )
        self._weights = context.parameters.weights if is_target else ""
        self._numerics = ""
        """Numerics of the replica that the session began with."""
        self._replica: ReplicaConnection | None = None
        self._left: dict[str, ReplicaConnection] = {}
        """Replicas that it has left, by name."""
        self._rejected: list[ReplicaConnection] = []
        """Replicas that the session does not return to."""
        self._num_moves = 0
        self._round = 0
        self._answers: dict[int, Answer] = {}
        self.awaited: int | None = None
        """An earlier round whose answer is kept for `take_awaited`."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._due = 0.0
        """When the current wait times out. One timer serves all waits: if it fires early, it is set
        again."""
        self._timer: asyncio.TimerHandle | None = None
        self._lost: Exception | None = None
        found = pool.find(
            self._affinity, self._weights, preferred=held.replica, session_id=session.session_id
        )
        self._enter(found)
        self.cached_length = held.cached_length if held.replica == self.replica else 0
        """Committed tokens that the replica holds, as far as known."""

    @property
    def replica(self) -> str:
        """The replica's name in the session store; empty without a replica."""
        return "" if self._replica is None else self._replica.name

    @property
    def on_trial(self) -> bool | None:
        """Whether the replica is on trial; None without a replica."""
        return None if self._replica is None else self._replica.trial_share > 0

    @property
    def drafts_itself(self) -> bool:
        """Whether the replica, or else the first of its role, drafts for itself."""
        found = self._pool.first if self._replica is None else self._replica.description
        return found is not None and found.drafts_itself

    @property
    def features_shown(self) -> str:
        """The head whose hidden states the session's target sends."""
        return self._pool.features_shown(self.context.session.session_id) or ""

    @property
    def features_read(self) -> str:
        """The head whose hidden states this replica, a draft, reads."""
        return "" if self._replica is None else self._replica.description.features

    @property
    def cache_state(self) -> CacheState:
        return CacheState(self.replica, self.cached_length)

    @property
    def is_left(self) -> bool:
        """Whether the session should move as soon as there is another replica."""
        return self._replica is None or not self._replica.is_open

    def begin(self, round_index: int) -> int:
        """Begins a round, or continues it on another replica; drops answers to earlier rounds.
        Returns the round's number in messages. After a move it is larger than that of any round
        asked for, or run ahead, before, so late answers are not taken for new ones if the session
        returns."""
        self._round = round_index + self._num_moves * (RUN_AHEAD_ROUNDS_MAX + 1)
        if self._answers:
            self._answers = {r: a for r, a in self._answers.items() if self._is_wanted(r)}
        self.was_lost, self._lost = self._lost is not None, None
        return self._round

    def head(self, number: int) -> RoundHead:
        """The head of a message for the round with this `number`, from `begin`."""
        context = self.context
        record, tokens = context.session.record, context.session.tokens
        base_length = min(self.cached_length, len(tokens) - 1)
        left_s = context.deadline - self._loop.time()
        sampling_hash, constraint_hash = context.hashes
        return RoundHead(
            session_id=record.session_id,
            tenant=record.tenant,
            epoch=record.epoch,
            round=number,
            base_length=base_length,
            prefix_digest=tokens.digest(base_length),
            append=tokens.since(base_length),
            prompt_length=record.prompt_length,
            rule=record.rule,
            seed=record.seed,
            sampling=context.parameters.sampling,
            sampling_hash=sampling_hash,
            deadline_ms=max(1, math.ceil(left_s * 1e3)),
            traceparent=context.observer.context(self._pool.role),
            constraint=context.parameters.constraint,
            constraint_hash=constraint_hash,
        )

    def send(self, item: Item) -> None:
        """See `Link.send`. Raises `LinkLost` also for a replica that was away and has not described
        itself since, as it may have other weights."""
        replica = self._replica
        if replica is None:
            raise LinkLost(f"no {self._pool.role} is known")
        if replica.away:
            raise LinkLost(f"the {self._pool.role} {replica.name} is away")
        if self._weights not in ("", replica.description.weights):
            raise LinkLost(f"the {self._pool.role} {replica.name} has other weights now")
        if not self._pool.can_read(replica.description, self.context.session.session_id):
            raise LinkLost(f"the draft {replica.name} is not for the head that the target has now")
        try:
            replica.link.send(item)
        except LinkLost:
            replica.miss()
            raise

    async def take(self, timeout_s: float) -> Answer:
        """Waits for the answer to the current round. Raises `LinkLost` if the stream breaks first,
        and `TimeoutError` after `timeout_s`. One waiter at a time."""
        check(self._waiter is None, "two waiters on one route")
        self._due = self._loop.time() + timeout_s
        while self._round not in self._answers:
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise LinkLost(str(lost))
            if self._loop.time() >= self._due:
                raise TimeoutError
            if self._timer is None or self._timer.when() > self._due:
                self._stop_timer()
                self._timer = self._loop.call_at(self._due, self._look_at_clock)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._answers.pop(self._round)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_clock(self) -> None:
        self._timer = None
        self._wake()

    def put(self, answer: Answer) -> bool:
        """Takes an answer to the current or a later round. Returns False if its round is over or
        its epoch is another."""
        key = answer.key
        if key.epoch != self.context.session.epoch:
            return False
        self.heard = True
        if isinstance(answer, ProposalReply) and answer.assumed:
            if self.on_pushed is not None:
                self.on_pushed(answer)
            return True
        if not self._is_wanted(key.round):
            return False
        known = self._answers.get(key.round)
        if known is None:
            if len(self._answers) >= MAILBOX_REPLIES_MAX:
                return False  # Safe: an answer that is needed is asked for again.
        elif isinstance(known, VerdictReply | ProposalReply):
            return False
        self._answers[key.round] = answer
        self._wake()
        return True

    def take_awaited(self) -> Answer | None:
        """Returns the `awaited` answer if it has come, and clears `awaited`."""
        number = self.awaited
        if number is None or number not in self._answers:
            return None
        self.awaited = None
        return self._answers.pop(number)

    def lose(self, error: Exception) -> None:
        """Notes that the stream to the replica broke."""
        self._lost, self.awaited = error, None
        self._wake()

    def resync(self, answer: Resync) -> None:
        """Notes that the replica lacks the prefix of a message: the next message starts from the
        tokens that the replica holds."""
        tokens = self.context.session.tokens
        known = tokens.holds(answer.cached_length, answer.prefix_digest)
        self.cached_length = answer.cached_length if known else 0
        self.context.observer.count("resyncs", self._pool.role)

    def give_up(self) -> None:
        """Notes that the replica cannot go on: it is away until it describes itself again."""
        if self._replica is not None:
            self._replica.miss()

    def reject(self) -> None:
        """Leaves the replica for good, as its answers are wrong."""
        if self._replica is not None:
            self._rejected.append(self._replica)
            self._leave()

    def move(self) -> bool:
        """Moves to another replica, with the same weights and not rejected. Returns whether there
        is one. If so, open requests stay unanswered, and the new replica is assumed to hold none of
        the session's tokens. A draft that is to be left is left even if there is no other."""
        before = self._replica
        without = self._rejected if before is None else [*self._rejected, before]
        session_id = self.context.session.session_id
        found = self._pool.find(
            self._affinity, self._weights, without, numerics=self._numerics, session_id=session_id
        )
        if found is None:
            if before is not None and before.leaving and self._pool.role == "draft":
                self._leave()
            return False
        _log.debug("session %s moves: %s, %s", session_id, self.replica, found.name)
        self._leave()
        self._num_moves += 1
        self._enter(found)
        self.cached_length = 0
        self.context.observer.count("session_moves", self._pool.role)
        return True

    def close(self) -> None:
        """Ends the session: releases it on all replicas that it was on."""
        session = self.context.session
        self._stop_timer()
        self._leave()
        for replica in self._left.values():
            replica.link.release(session.session_id, session.epoch)
        self._left = {}

    def _leave(self) -> None:
        if self._replica is not None:
            del self._replica.routes[self.context.session.session_id]
            self._left[self._replica.name] = self._replica
            self._replica = self.awaited = None

    def _enter(self, replica: ReplicaConnection | None) -> None:
        if replica is not None:
            session_id = self.context.session.session_id
            check(session_id not in replica.routes, f"session {session_id} has a route already")
            replica.routes[session_id] = self
            self._lost = None
            self._numerics = self._numerics or replica.description.numerics
            self._replica = replica

    def _is_wanted(self, number: int) -> bool:
        return number >= self._round or number == self.awaited

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
