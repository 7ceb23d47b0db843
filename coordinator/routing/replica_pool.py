"""Pools of target and draft replicas. A *route* connects a session with a replica of a pool.

If a session moves to another replica, the session's KV pages stay at the old replica. The new
replica gets the committed tokens, and computes the pages that it lacks.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Generic

from coordinator.requests.validation import GenerationParameters
from coordinator.routing.absence import Absence
from outrider.config.deployment import CoordinatorConfig
from outrider.errors import Incompatible, LinkLost, OutriderError, check
from outrider.interfaces.messages import (
    Answer,
    DraftAnswer,
    DraftItem,
    Item,
    Prefix,
    ProposalReply,
    ReplicaDescription,
    Resync,
    RoundHead,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.limits import MAILBOX_REPLIES_MAX, PAGE_SIZE, RUN_AHEAD_ROUNDS_MAX
from outrider.registry.registry import Starts
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.telemetry.observer import SILENT, RequestObserver, Side
from outrider.transport.link import Link

_log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S, PROBE_TIMEOUT_S, ALIVE_TIMEOUT_S = 10.0, 2.0, 1.0
"""Time limits for a replica to describe itself: a new one, one that was away, and one of which it
is asked whether it still lives. If a replica hangs, its sessions wait until the last limit ends."""
PROBE_PERIOD_S = 0.1
"""Pause between two probes of replicas that could not be reached."""
ABSENCE_CHECK_S = 1.0
"""Pause between two looks whether a request still waits for a first replica."""

LOAD_SLACK = 0.25
"""Share by which a replica's number of sessions may exceed the mean (see `choose`)."""
_KEY_PAGES = 2
"""`affinity` hashes this many pages at the start of a prompt."""


class ReplicaConnection(Generic[Item, Answer]):
    """The link to one replica, shared by all sessions that use the replica."""

    def __init__(
        self,
        pool: "ReplicaPool[Item, Answer]",
        link: Link[Item, Answer],
        name: str,
        description: ReplicaDescription,
        trial_share: float,
    ) -> None:
        self._pool = pool
        self.link = link
        self.name = name
        self.description = description
        self.leaving = False
        """Whether the replica ends soon, so that its sessions must move."""
        self.trial_share = trial_share
        """Share of the new sessions that go to this replica during its trial; 0 = no trial."""
        self.away = False
        """Whether the replica could not be reached, and has not described itself since."""
        self.routes: dict[str, SessionRoute[Item, Answer]] = {}
        link.listen(self._deliver, self.lose)

    @property
    def is_open(self) -> bool:
        return not (self.leaving or self.away)

    async def answers(self) -> bool:
        """Whether the replica describes itself within `ALIVE_TIMEOUT_S`."""
        try:
            await self.link.describe(ALIVE_TIMEOUT_S)
        except OutriderError:
            return False
        return True

    def miss(self) -> None:
        self.away = True
        self._pool.lost.set()

    def lose(self, error: Exception) -> None:
        """Marks the replica as away, and tells its sessions that the gRPC stream broke."""
        self.miss()
        for route in self.routes.values():
            route.lose(error)

    def _deliver(self, answer: Answer) -> None:
        route = self.routes.get(answer.key.session_id)
        is_kept = route is not None and route.put(answer)
        # Proposals drafted ahead, and a draft's answers to prefills, do not count as stale.
        if isinstance(answer, ProposalReply):
            is_kept |= not answer.proposal or bool(answer.assumed)
        self._pool.num_stale += not is_kept and isinstance(answer, ProposalReply | VerdictReply)


class ReplicaPool(Generic[Item, Answer]):
    """The replicas of one role. During an upgrade, their weights may differ. A session runs only on
    targets with the weights that it began with."""

    def __init__(self, role: Side, targets: "TargetPool | None" = None) -> None:
        """A pool of drafts needs the pool of `targets`. Drafts must fit the first target."""
        self.role = role
        self.first: ReplicaDescription | None = None
        """Description of the first replica that ever joined. Later replicas must fit the first."""
        self._targets = targets
        self.replicas: dict[str, ReplicaConnection[Item, Answer]] = {}
        """Name -> replica, in the order in which the replicas joined."""
        self._left = Counter[str]()
        """Sum of `Link.num_bytes` over removed replicas."""
        self.starts = Starts(role)
        """What the registry says about replicas that are being started."""
        self.num_stale = 0
        """Number of proposals and verdicts that arrived after their round or session had ended."""
        self.lost = asyncio.Event()
        self._arrival = asyncio.Event()

    @property
    def present(self) -> list[ReplicaConnection[Item, Answer]]:
        """The replicas that are neither away nor leaving."""
        return [replica for replica in self.replicas.values() if replica.is_open]

    @property
    def is_full(self) -> bool:
        """Whether every present replica has as many sessions as fit in one step."""
        return all(
            len(replica.routes) >= replica.description.max_num_seqs for replica in self.present
        )

    @property
    def num_bytes(self) -> Counter[str]:
        """Sum of `Link.num_bytes` over all replicas that ever joined. May be read on any thread."""
        return sum((replica.link.num_bytes for replica in list(self.replicas.values())), self._left)

    def newest(self, weights: str = "") -> ReplicaDescription | None:
        """Returns the description of the newest replica with these `weights` (empty = any). Prefers
        present replicas, then replicas that are not on trial."""
        candidates = [
            replica
            for replica in self.replicas.values()
            if weights in ("", replica.description.weights)
        ]
        if not candidates:
            return None
        return max(
            reversed(candidates), key=lambda replica: (replica.is_open, not replica.trial_share)
        ).description

    @property
    def on_trial(self) -> ReplicaConnection[Item, Answer] | None:
        """The newest present replica on trial."""
        return next((replica for replica in reversed(self.present) if replica.trial_share), None)

    @property
    def first_kept(self) -> ReplicaDescription | None:
        """Description of the oldest replica that is not on trial."""
        descriptions = (
            replica.description for replica in self.replicas.values() if not replica.trial_share
        )
        return next(descriptions, None)

    async def join(self, name: str, link: Link[Item, Answer], trial_share: float = 0.0) -> None:
        """Asks a replica for its description, and adds the replica. The pool, not the caller, will
        close the `link`. Raises `Unavailable` if the replica does not answer, and `Incompatible` if
        it does not fit the pool."""
        check(name not in self.replicas, f"{name} has joined already")
        try:
            description = await link.describe(DESCRIBE_TIMEOUT_S)
            self._check(description)
        except BaseException:
            await link.close()
            raise
        self.admit(name, link, description, trial_share)

    def admit(
        self,
        name: str,
        link: Link[Item, Answer],
        description: ReplicaDescription,
        trial_share: float = 0.0,
    ) -> None:
        """Adds a replica whose description is known to fit."""
        self.first = self.first or description
        self.replicas[name] = ReplicaConnection(self, link, name, description, trial_share)
        self._notify()

    def retire(self, name: str) -> None:
        """Marks a replica as leaving. Its sessions move when their next rounds begin."""
        if name in self.replicas:
            self.replicas[name].leaving = True

    async def leave(self, name: str) -> None:
        """Removes a replica that has ended. Its sessions move to other replicas."""
        replica = self.replicas.pop(name, None)
        if replica is not None:
            # Replaces the counter instead of changing it, because another thread may be reading it.
            self._left = self._left + replica.link.num_bytes
            replica.lose(LinkLost(f"the {self.role} {name} is gone"))
            await replica.link.close()

    def can_read(self, replica: ReplicaDescription, session_id: str) -> bool:
        """Whether the session's target sends the features that the draft `replica` reads."""
        if self._targets is None or not replica.reads_features:
            return True
        targets = self._targets.replicas.values()
        available = (
            target.description.features for target in targets if session_id in target.routes
        )
        return next(available, None) == replica.features

    async def watch(self) -> None:
        """Probes a replica immediately when it is lost, and then periodically until it is back."""
        while True:
            await self.lost.wait()
            self.lost.clear()
            away = [replica for replica in self.replicas.values() if replica.away]
            await asyncio.gather(*(self._probe(replica) for replica in away))
            if any(replica.away for replica in away):
                self.lost.set()
            await asyncio.sleep(PROBE_PERIOD_S)

    async def change(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` until a replica joins or is back."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrival.wait()

    async def wait_for_one(self, config: CoordinatorConfig) -> ReplicaDescription:
        """Waits for a replica as `Absence` says. Returns the description of the newest one. Raises
        `Unavailable`."""
        absence = Absence(self, config)
        while (description := self.newest()) is None:
            absence.check(f"no {self.role} is known")
            await self.change(ABSENCE_CHECK_S)
        return description

    async def healthy(self) -> bool:
        """Whether any replica answers. Asks one replica, if possible a present one. If this
        replica does not answer, asks all others at once."""
        replicas = sorted(self.replicas.values(), key=lambda replica: not replica.is_open)
        for some in (replicas[:1], replicas[1:]):
            if any(await asyncio.gather(*(replica.answers() for replica in some))):
                return True
        return False

    async def close(self) -> None:
        """Closes the links to all replicas."""
        await asyncio.gather(*(replica.link.close() for replica in self.replicas.values()))

    def check_integrity(self, sessions: set[str], *, every: bool = True) -> None:
        """Raises `InvariantError` if a session has two routes, if a session outside `sessions` has
        a route, or (with `every`) if a session in `sessions` has no route."""
        routed = [name for replica in self.replicas.values() for name in replica.routes]
        check(len(routed) == len(set(routed)), "a session has two routes")
        check(set(routed) <= sessions, "a route has no session")
        check(not every or set(routed) == sessions, "a session has no route")

    def _notify(self) -> None:
        self._arrival.set()
        self._arrival.clear()

    async def _probe(self, replica: ReplicaConnection[Item, Answer]) -> None:
        """Marks a replica as back if it answers. After a restart, its description may differ."""
        with suppress(OutriderError):
            description = await replica.link.describe(PROBE_TIMEOUT_S)
            self._check(description)
            _log.info("the %s %s is back", self.role, replica.name)
            replica.description, replica.away = description, False
            self._notify()

    def _check(self, description: ReplicaDescription) -> None:
        first, target = self.first, None if self._targets is None else self._targets.first
        own, other = description.tokenizer_fingerprint, target and target.tokenizer_fingerprint
        reason = ""
        if self.role == "target":
            if first is not None and (description.vocab_size, own) != (
                first.vocab_size,
                first.tokenizer_fingerprint,
            ):
                reason = f"has another vocabulary or tokenizer than {first.model!r}"
        elif target is not None and own and other and own != other:
            reason = f"has another tokenizer ({own}) than the target {target.model!r} ({other})"
        elif target is not None and description.reads_features and not target.shows_features:
            reason = f"reads hidden states of its target, which {target.model!r} does not send"
        elif first is not None and description.reads_features != first.reads_features:
            reason = f"and {first.model!r} differ: only one reads hidden states of its target"
        if reason:
            raise Incompatible(f"the {self.role} {description.model!r} {reason}")


TargetPool = ReplicaPool[VerifyItem, VerifyAnswer]
DraftPool = ReplicaPool[DraftItem, DraftAnswer]


# Rendezvous hashing (Thaler and Ravishankar 1998) of the start of a session's prompt chooses the
# session's first replica. So sessions with the same start find each other's pages, and all
# coordinators choose the same replica. If a replica joins or leaves, the choice changes only for
# prompts that this replica gains or loses. A bound on loads (Mirrokni, Thorup and Zadimoghaddam
# 2018) excludes replicas that have too many sessions. Each coordinator bounds its own sessions on a
# replica, relative to their mean over the replicas. So the replica's total load is bounded, too.


def affinity(tenant: str, prompt_ids: Sequence[int]) -> bytes:
    """Hashes the tenant and the first pages of a prompt."""
    first = prompt_ids[: _KEY_PAGES * PAGE_SIZE]
    ids = b"".join(token_id.to_bytes(4, "little") for token_id in first)
    return blake2b(ids, key=blake2b(tenant.encode(), digest_size=16).digest()).digest()


def choose(key: bytes, loads: Mapping[str, int], seats: int) -> str | None:
    """Among the replicas with room for one more session, returns the name with the largest hash
    under `key`. `loads` maps each replica's name to its number of sessions.

    A replica runs up to `seats` sessions in one step. Up to this number, its load may exceed the
    mean by the share `LOAD_SLACK`. Above this number, all replicas get equal loads, because the
    sessions of a fuller replica would wait longer."""
    if not loads:
        return None
    mean = (sum(loads.values()) + 1) / len(loads)
    slack = min(math.floor((1 + LOAD_SLACK) * mean), seats)
    bound = max(math.ceil(mean), slack)
    roomy = [name for name, load in loads.items() if load < bound]
    return max(roomy, key=lambda name: blake2b(name.encode(), key=key).digest())


@dataclass(frozen=True, eq=False)
class SessionContext:
    """A session, with its parameters, deadline and observer."""

    session: Session
    parameters: GenerationParameters
    deadline: float
    """Time on the event loop's clock."""
    observer: RequestObserver = SILENT

    @cached_property
    def sampling_hash(self) -> int:
        return self.parameters.sampling.hash()

    @cached_property
    def constraint_hash(self) -> bytes:
        constraint = self.parameters.constraint
        return b"" if constraint is None else constraint.digest()


class SessionRoute(Generic[Item, Answer]):
    """Sends one session's messages to a replica, keeps the answers, and moves the session to other
    replicas. A replica refuses a session after the session's Release message. A session may return
    to a replica that it has left, so its replicas get this message only when the session ends."""

    def __init__(self, pool: ReplicaPool[Item, Answer], context: SessionContext) -> None:
        """The session begins at the replica that its record names. If the record names no replica,
        or the named replica is not present, `_find` chooses a replica."""
        session = context.session
        is_target = pool.role == "target"
        held = session.target if is_target else session.draft
        self.context = context
        self.is_responsive = True
        """Whether the replica answers. `DraftClient` sets this to False after a message without an
        answer. The next answer sets it to True."""
        self.was_lost = False
        """Whether the stream broke after the last `take` and before the last `begin`. If so, all
        requests without an answer must be sent again."""
        self.on_pushed: Callable[[ProposalReply], None] | None = None
        """Gets each proposal that was drafted ahead."""
        self._pool = pool
        self._affinity = affinity(
            session.record.tenant, session.tokens.ids[: session.prompt_length]
        )
        self._weights = context.parameters.weights if is_target else ""
        self._numerics = ""
        self._replica: ReplicaConnection[Item, Answer] | None = None
        self._left: dict[str, ReplicaConnection[Item, Answer]] = {}
        self._rejected: list[ReplicaConnection[Item, Answer]] = []
        """Replicas that gave wrong answers."""
        self._num_renumberings = 0
        self._round = 0
        self._answers: dict[int, Answer] = {}
        self.awaited: int | None = None
        """Number of an earlier round whose answer `put` keeps for `take_awaited`, or None."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._due = 0.0
        """Time at which the current wait times out, on the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """Wakes `take`, perhaps before `_due`. `take` then sets another timer."""
        self._lost: Exception | None = None
        """Error with which the stream broke, until `take` has raised it or a round begins."""
        self._enter(self._find(held.replica))
        self.cached_length = held.cached_length if held.replica == self.replica else 0
        """Number of committed tokens that the replica holds, as far as known."""

    @property
    def replica(self) -> str:
        """The replica's name; empty without a replica."""
        return "" if self._replica is None else self._replica.name

    @property
    def on_trial(self) -> bool | None:
        return None if self._replica is None else self._replica.trial_share > 0

    @property
    def drafts_itself(self) -> bool:
        """Whether the session's target has a head. Without a target, `pool.first` decides."""
        description = self._description
        return description is not None and description.drafts_itself

    @property
    def looks_up(self) -> bool:
        """Whether the session's target has a look-up. Without a target, `pool.first` decides."""
        description = self._description
        return description is not None and description.looks_up

    @property
    def _description(self) -> ReplicaDescription | None:
        return self._pool.first if self._replica is None else self._replica.description

    @property
    def cache_state(self) -> CacheState:
        return CacheState(self.replica, self.cached_length)

    @property
    def is_left(self) -> bool:
        """Whether the session should move, because its replica is missing, away or leaving."""
        return self._replica is None or not self._replica.is_open

    def begin(self, round_index: int) -> int:
        """Begins or repeats a round, and drops answers to earlier rounds. Returns the round's
        number in messages. Each move and each `renumber` adds `RUN_AHEAD_ROUNDS_MAX` + 1 to this
        number. So answers to earlier messages match no later round."""
        self._round = round_index + self._num_renumberings * (RUN_AHEAD_ROUNDS_MAX + 1)
        if self._answers and min(self._answers) < self._round:
            self._answers = {r: a for r, a in self._answers.items() if self._is_wanted(r)}
        self.was_lost, self._lost = self._lost is not None, None
        return self._round

    def head(self, number: int) -> RoundHead:
        """Returns the head of a message for the round `number`, with the committed tokens that the
        replica lacks, as far as known. `append` has at least the last committed token, because the
        replica must run this token again, even if it holds it, to get the logits after it."""
        context = self.context
        record, tokens = context.session.record, context.session.tokens
        base_length = min(self.cached_length, len(tokens) - 1)
        left_s = context.deadline - self._loop.time()
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
            sampling_hash=context.sampling_hash,
            deadline_ms=max(1, math.ceil(left_s * 1e3)),
            traceparent=context.observer.context(self._pool.role),
            constraint=context.parameters.constraint,
            constraint_hash=context.constraint_hash,
        )

    def send(self, item: Item) -> None:
        """Sends a message. Raises the errors of `Link.send`. Also raises `LinkLost` without a
        replica, and if the replica is away or no longer fits the session."""
        replica = self._replica
        if replica is None:
            raise LinkLost(f"no {self._pool.role} is known")
        if replica.away:
            raise LinkLost(f"the {self._pool.role} {replica.name} is away")
        if self._weights not in ("", replica.description.weights):
            raise LinkLost(f"the {self._pool.role} {replica.name} has other weights now")
        if not self._pool.can_read(replica.description, self.context.session.session_id):
            raise LinkLost(f"the target sends no hidden states for the draft {replica.name}")
        try:
            replica.link.send(item)
        except LinkLost:
            replica.miss()
            raise

    async def take(self, timeout_s: float) -> Answer:
        """Waits for the answer to the current round. Raises `LinkLost` if the stream breaks, and
        `TimeoutError` after `timeout_s`."""
        if self._round not in self._answers:
            await self._arrived(timeout_s)
        return self._answers.pop(self._round)

    async def _arrived(self, timeout_s: float) -> None:
        check(self._waiter is None, "a route has two waiters")
        self._due = self._loop.time() + timeout_s
        while self._round not in self._answers:
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise LinkLost(str(lost))
            if self._loop.time() >= self._due:
                raise TimeoutError
            if self._timer is None or self._timer.when() > self._due:
                self._stop_timer()
                self._timer = self._loop.call_at(self._due, self._on_timer)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def put(self, answer: Answer) -> bool:
        """Keeps an answer to the current round, a later round or the round `awaited`, and returns
        True. Returns False if the answer has another epoch, its round has ended, its round already
        has a verdict or proposal, or `MAILBOX_REPLIES_MAX` answers are kept already."""
        key = answer.key
        if key.epoch != self.context.session.epoch:
            return False
        self.is_responsive = True
        if isinstance(answer, ProposalReply) and answer.assumed:
            if self.on_pushed is not None:
                self.on_pushed(answer)
            return True
        if not self._is_wanted(key.round):
            return False
        known = self._answers.get(key.round)
        if known is None:
            if len(self._answers) >= MAILBOX_REPLIES_MAX:
                return False  # If the session needs this answer, the session will ask again.
        elif isinstance(known, VerdictReply | ProposalReply):
            return False
        self._answers[key.round] = answer
        self._wake()
        return True

    def take_awaited(self) -> Answer | None:
        """Returns the answer to the round `awaited` if it has arrived, and clears `awaited`."""
        number = self.awaited
        if number is None or number not in self._answers:
            return None
        self.awaited = None
        return self._answers.pop(number)

    def lose(self, error: Exception) -> None:
        """Must be called when the stream to the replica breaks."""
        self._lost, self.awaited = error, None
        self._wake()

    def resync(self, answer: Resync) -> None:
        """Handles the answer of a replica that lacks part of the prefix."""
        tokens = self.context.session.tokens
        known = tokens.holds(answer.cached_length, answer.prefix_digest)
        self.cached_length = answer.cached_length if known else 0
        self.context.observer.count("resyncs", self._pool.role)

    def mark_away(self) -> None:
        """Marks the replica as away, until it describes itself again."""
        if self._replica is not None:
            self._replica.miss()

    def reject(self) -> None:
        """Leaves the replica for good, because its answers are wrong."""
        if self._replica is not None:
            self._rejected.append(self._replica)
            self._leave()

    def renumber(self) -> None:
        """Makes answers to all messages so far match no later round."""
        self._num_renumberings += 1

    def move(self, *, for_good: bool = False) -> bool:
        """Moves to another replica that fits, drops requests without an answer, and returns True.
        If none fits, returns False, and keeps the current replica unless it is a leaving draft.
        `for_good` means that the session never returns to the current replica."""
        before, replica = self._replica, self._find()
        if replica is None:
            if before is not None and before.leaving and self._pool.role == "draft":
                self._leave()
            return False
        if for_good and before is not None:
            self._rejected.append(before)
        session_id = self.context.session.session_id
        _log.debug("session %s moves from %r to %r", session_id, self.replica, replica.name)
        self._leave()
        self._num_renumberings += 1
        self._enter(replica)
        self.cached_length = 0
        self.context.observer.count("session_moves", self._pool.role)
        return True

    def close(self, learned: Prefix | None = None) -> None:
        """Ends the session on all replicas that it has used. The look-up of the last one may learn
        the tokens `learned`."""
        session, last = self.context.session, self.replica
        self.on_pushed = None  # It refers to this route, which would be garbage until a collection.
        self._stop_timer()
        self._leave()
        for replica in self._left.values():
            prefix = learned if replica.name == last else None
            replica.link.release(session.session_id, session.epoch, prefix)
        self._left = {}

    def _find(self, preferred: str = "") -> ReplicaConnection[Item, Answer] | None:
        """Chooses another replica for the session; None if no replica fits. A leaving draft does
        not fit, because a look-up can replace it. If no fitting replica is present, a session
        without a replica gets a fitting replica that is away or leaving.

        - The replica named `preferred` ranks first.
        - Replicas with the `numerics` of the route's first replica rank next, whatever their load.
          They compute the same logits, so the session's text continues with the same tokens.
        - A replica on trial gets its share of the sessions, chosen by a hash of the session's id.
          Other sessions get such a replica only if all fitting replicas are on trial.
        - Among replicas of equal rank, `choose` decides by `affinity`."""
        session_id, pool = self.context.session.session_id, self._pool
        without = [*self._rejected, self._replica]
        fitting = [
            replica
            for replica in pool.replicas.values()
            if replica not in without
            and self._weights in ("", replica.description.weights)
            and not (replica.leaving and pool.role == "draft")
            and pool.can_read(replica.description, session_id)
        ]
        candidates = [replica for replica in fitting if replica.is_open]
        if not candidates and without == [None]:
            candidates = fitting
        # A hash of the session's id in [0, 1), the same at every coordinator.
        place = int.from_bytes(blake2b(session_id.encode(), digest_size=4).digest()) / 2**32

        def rank(replica: ReplicaConnection[Item, Answer]) -> tuple[bool, ...]:
            is_alike = self._numerics in ("", replica.description.numerics)
            return (
                replica.name == preferred,
                is_alike,
                place < replica.trial_share,
                not replica.trial_share,
            )

        best = max(map(rank, candidates), default=())
        candidates = [replica for replica in candidates if rank(replica) == best]
        seats = min((replica.description.max_num_seqs for replica in candidates), default=0)
        name = choose(
            self._affinity, {replica.name: len(replica.routes) for replica in candidates}, seats
        )
        return None if name is None else pool.replicas[name]

    def _leave(self) -> None:
        if self._replica is not None:
            del self._replica.routes[self.context.session.session_id]
            self._left[self._replica.name] = self._replica
            self._replica = self.awaited = None

    def _enter(self, replica: ReplicaConnection[Item, Answer] | None) -> None:
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
