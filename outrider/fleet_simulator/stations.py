"""Replicas as stations: what waits gathers while a step runs, and shares the next one.

| station | a step | who shares it |
| --- | --- | --- |
| coordinator | a turn of its one thread | all that waits, and it leaves together |
| target | one pass over proposals, and parts of prefixes that it lacks | as below |
| draft | all passes of proposals, and parts of prefixes beside the first | as below |
| draft that looks ahead (`looking.py`) | one pass | as many branches as sessions |

A step of an engine has `max_num_seqs` sessions and `max_num_batched_tokens` tokens, first come,
first served; what it reads of prefixes is up to `TokenBudget`, as in the services.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from outrider.engine.step_costs import StepCosts
from outrider.fleet_simulator.agenda import Agenda
from outrider.replica.token_budget import TokenBudget
from outrider.replica.token_budget import Wish as Prefix

if TYPE_CHECKING:
    from outrider.fleet_simulator.scenario import Scenario


class Wish(Enum):
    """What a draft that looks ahead is to do for a session."""

    PROPOSE = 0
    """What came out was not worked out, or not known to be."""
    GO_ON = 1
    """What came out is being worked out."""
    LOOK_AHEAD = 2
    """Its proposal is at the target already."""


class Session:
    """One request on its way."""

    __slots__ = (
        "ahead_at", "asked_at", "began_at", "coordinator", "draft", "draft_missing", "has_verdict",
        "is_over", "is_parked", "key", "last_at", "left", "length", "marked_at", "marked_length",
        "passes_left", "proposed", "reading", "since_loss", "target", "target_missing", "wish",
    )  # fmt: skip

    def __init__(self, key: bytes, prompt_tokens: int, answer_tokens: int, now: float) -> None:
        self.key = key
        """What places prefer it by: `rendezvous.affinity`."""
        self.coordinator: Coordinator | None = None
        self.target: Station | None = None
        self.draft: Station | None = None
        self.length = prompt_tokens
        """Committed tokens."""
        self.left = answer_tokens
        """Tokens to come."""
        self.target_missing = prompt_tokens
        """Committed tokens that its target must read before it can verify; 0 in a round, for which
        a row more than it proposes is run ..."""
        self.draft_missing = 0
        """... and its draft before it can propose."""
        self.reading = False
        """Whether the draft reads for it though nobody waits for a proposal."""
        self.is_parked = False
        """Whether a proposal is waited for, behind that."""
        self.proposed = False
        """Whether its round has a proposal."""
        self.has_verdict = False
        """Whether its coordinator takes a verdict to its draft next, and no proposal on."""
        self.is_over = False
        self.wish = Wish.PROPOSE
        self.passes_left = 0.0
        """Of the draft, until it has done that."""
        self.ahead_at = math.inf
        """When the coordinator has the proposals for likely outcomes."""
        self.began_at = now
        self.asked_at = now
        """When it asked for a proposal."""
        self.last_at = -1.0
        """When it had its newest tokens; negative before the first ..."""
        self.marked_at = -1.0
        """... when measuring it began ..."""
        self.marked_length = 0
        """... and what it had then."""
        self.since_loss: int | None = None
        """Number of the loss that it has had no token since."""


Sessions = list[Session]


class Station:
    """One replica, and what waits for it."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        finish: Callable[[Station, Sessions], None],
        strand: Callable[[Station, Sessions], None],
    ) -> None:
        """`finish` hears of the sessions that a step is done for, and `strand` of those that were
        here when the replica went, or came later."""
        self.name = name
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_served = 0
        self.lost_at: float | None = None
        """When the replica went; None while it is there ..."""
        self.loss: int | None = None
        """... and the number of its newest loss."""
        self._agenda = agenda
        self._finish = finish
        self._strand = strand
        self._waiting: Sessions = []
        self._running: Sessions | None = None
        self._began_at = 0.0
        self._is_waking = False
        self._life = 0

    @property
    def is_free(self) -> bool:
        """Whether whoever comes now shares the next step, which begins at once."""
        return self._running is None and not self._waiting

    def take(self, sessions: Sessions) -> None:
        """They arrive."""
        if self.lost_at is not None:
            self._strand(self, sessions)
            return
        self._waiting += sessions
        self._wake()

    def lose(self, number: int) -> None:
        """The replica is gone, with all that it held: the loss of this number."""
        self._count_running()
        self.loss = number
        self.lost_at = self._agenda.now
        self._life += 1
        stranded = self._awaited()
        self._running, self._waiting = None, []
        self._forget()
        self._strand(self, stranded)

    def forget(self, session: Session) -> None:
        """The session has no more rounds here."""

    def come_back(self) -> None:
        """It is there again, and holds nothing."""
        self.lost_at = None

    def settle_figures(self) -> None:
        """Counts the running step up to now."""
        self._count_running()

    def clear_figures(self) -> None:
        """Counts from now on."""
        self._count_running()
        self.busy_s, self.num_steps, self.num_served = 0.0, 0, 0

    def _count_running(self) -> None:
        if self._running is not None:
            self.busy_s += self._agenda.now - self._began_at
            self._began_at = self._agenda.now

    def _awaited(self) -> Sessions:
        """Sessions for which an answer is waited for."""
        return [*(self._running or ()), *self._waiting]

    def _forget(self) -> None:
        """What a replica keeps beside its queue is gone."""

    def _has_work(self) -> bool:
        return bool(self._waiting)

    def _wake(self) -> None:
        if self._running is None and not self._is_waking and self._has_work():
            self._is_waking = True
            self._agenda.note_step(self._begin)

    def _begin(self, _: None) -> None:
        self._is_waking = False
        if self._running is not None or not self._has_work():
            return
        batch, seconds = self._next_step()
        self._running = batch
        self._began_at = self._agenda.now
        self._agenda.note(self._agenda.now + seconds, self._end, self._life)

    def _end(self, life: int) -> None:
        if life != self._life or self._running is None:
            return
        self._count_running()
        batch, self._running = self._running, None
        self.num_steps += 1
        self.num_served += len(batch)
        self._finish(self, self._done(batch))
        self._wake()

    def _next_step(self) -> tuple[Sessions, float]:
        """Takes a step's sessions from those that wait: at least one; and its time, s."""
        raise NotImplementedError

    def _done(self, batch: Sessions) -> Sessions:
        """Those of a step's sessions that it has finished; the others wait again."""
        return batch


class Coordinator(Station):
    """One thread, and where its sessions are."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        finish: Callable[[Station, Sessions], None],
        strand: Callable[[Station, Sessions], None],
        turn_s: float,
    ) -> None:
        """`turn_s` is what it takes for a session between two messages."""
        super().__init__(name, agenda, finish, strand)
        self._turn_s = turn_s
        self.num_sessions = 0
        self.loads: dict[str, dict[str, int]] = {}
        """Its sessions at each replica that is there, by role."""

    def _wake(self) -> None:
        """A turn begins with whatever has come; nobody gains by waiting for more."""
        if self._running is None and self._waiting:
            self._begin(None)

    def _next_step(self) -> tuple[Sessions, float]:
        batch, self._waiting = self._waiting, []
        return batch, self._turn_s * len(batch)


class Engine(Station):
    """A replica with a model: who shares a step, and what of their prefixes is read in it."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        finish: Callable[[Station, Sessions], None],
        strand: Callable[[Station, Sessions], None],
        scenario: Scenario,
        costs: StepCosts,
        seats: int,
    ) -> None:
        """`seats` sessions share a step."""
        super().__init__(name, agenda, finish, strand)
        self._costs = costs
        self._seats = seats
        self._tokens_max = scenario.max_num_batched_tokens
        self._budget = TokenBudget(self._tokens_max, self._seats, costs)
        self._grants: list[int] = []
        """Tokens of prefixes that the running step reads, for each of its sessions; empty where
        it reads none."""
        self._has_prefixes = False
        """Whether anybody who waits may miss some."""

    def take(self, sessions: Sessions) -> None:
        """See `Station.take`."""
        if not self._has_prefixes and any(map(self._missing, sessions)):
            self._has_prefixes = True
        super().take(sessions)

    def _forget(self) -> None:
        self._has_prefixes = False

    _missing: Callable[[Session], int]
    """Tokens that are to be read for a session before it can be served."""

    def _has_read(self, session: Session, num_tokens: int) -> None:
        raise NotImplementedError

    def _rows(self, session: Session) -> int:
        """Tokens that are run for a session beside what it misses."""
        raise NotImplementedError

    def _share(self) -> tuple[Sessions, int, float]:
        """Takes the sessions of a step; rows of their prefixes, and what these add to it for their
        contexts, s."""
        self._grants = []
        waiting, seats = self._waiting, self._seats
        if not self._has_prefixes:
            most = max(1, min(seats, self._tokens_max // max(1, self._rows(waiting[0]))))
            self._waiting = waiting[most:]
            return waiting[:most], 0, 0.0
        looked_at = self._looked_at()
        wishes = [self._wish(session) for session in looked_at]
        grants = self._budget.share(wishes)
        batch = [one for one, grant in zip(looked_at, grants, strict=True) if grant]
        taken = set(map(id, batch))
        self._waiting = [session for session in waiting if id(session) not in taken]
        self._has_prefixes = any(map(self._missing, self._waiting))
        rows, attention_s = 0, 0.0
        for wish, grant, session in zip(wishes, grants, looked_at, strict=True):
            missing = self._missing(session) if grant else 0
            if grant:
                self._grants.append(min(grant, missing))
            if missing:
                rows += min(grant, missing)
                attention_s += self._costs.attention_seconds(grant, wish.context)
        return batch, rows, attention_s

    def _looked_at(self) -> Sessions:
        """As `RequestQueue.take`: in order of arrival as many rounds as have a seat, and as many
        prefixes."""
        room = [self._seats, self._seats]
        found = []
        for session in self._waiting:
            kind = self._missing(session) > 0
            if room[kind] > 0:
                room[kind] -= 1
                found.append(session)
            elif not any(room):
                break
        return found

    def _wish(self, session: Session) -> Prefix:
        missing, rows = self._missing(session), max(1, self._rows(session))
        return Prefix(missing or rows, 1, session.length - missing)

    def _done(self, batch: Sessions) -> Sessions:
        if not self._grants:
            return batch
        done: Sessions = []
        begun: Sessions = []
        for session, grant in zip(batch, self._grants, strict=True):
            if grant:
                self._has_read(session, grant)
            (begun if self._missing(session) else done).append(session)
        self._waiting[:0] = begun
        self._has_prefixes = self._has_prefixes or bool(begun)
        return done


class Target(Engine):
    """Verifies what is proposed."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        finish: Callable[[Station, Sessions], None],
        strand: Callable[[Station, Sessions], None],
        scenario: Scenario,
    ) -> None:
        times, drafting = scenario.times, scenario.drafting
        costs = times.target if drafting.is_plain else times.verify
        super().__init__(name, agenda, finish, strand, scenario, costs, scenario.target_seats)
        self._factor = times.plain.factor if drafting.is_plain else 1.0
        self._round_rows = 1.0 + drafting.num_proposed
        self._rows_of_round = round(self._round_rows)
        self._reads_contexts = costs.slot_s > 0 or costs.row_slot_s > 0

    _missing = staticmethod(attrgetter("target_missing"))

    def _has_read(self, session: Session, num_tokens: int) -> None:
        session.target_missing -= num_tokens

    def _rows(self, session: Session) -> int:
        return self._rows_of_round

    def _next_step(self) -> tuple[Sessions, float]:
        batch, prefix_rows, attention_s = self._share()
        rounds = [one for one in batch if not one.target_missing] if prefix_rows else batch
        bare = sum([not one.proposed for one in rounds])
        rows = prefix_rows + bare + round((len(rounds) - bare) * self._round_rows)
        if self._reads_contexts:
            context = sum(one.length for one in rounds)
            attention_s += self._costs.attention_seconds(self._round_rows, context)
        seconds = self._costs.mixed_seconds(max(1, rows), len(batch), attention_s)
        return batch, self._factor * seconds


class Draft(Engine):
    """Proposes, to so many sessions at a time: each step is all their passes."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        finish: Callable[[Station, Sessions], None],
        strand: Callable[[Station, Sessions], None],
        scenario: Scenario,
    ) -> None:
        times = scenario.times
        costs, seats = times.draft or NO_MODEL, times.max_num_seqs
        super().__init__(name, agenda, finish, strand, scenario, costs, seats)
        self._factor = times.wait.factor
        self._num_passes = scenario.drafting.num_steps
        self._reads_contexts = self._costs.slot_s > 0

    _missing = staticmethod(attrgetter("draft_missing"))

    def _has_read(self, session: Session, num_tokens: int) -> None:
        session.draft_missing -= num_tokens

    def _rows(self, session: Session) -> int:
        return 1

    def _next_step(self) -> tuple[Sessions, float]:
        batch, prefix_rows, attention_s = self._share()
        asking = sum(not one.reading for one in batch) if prefix_rows else len(batch)
        seconds = 0.0
        if asking:
            context = sum(one.length for one in batch) if self._reads_contexts else 0
            seconds = self._num_passes * self._costs.step_seconds(asking, asking, context)
        if prefix_rows:
            alone = self._costs.mixed_seconds(asking, asking, 0.0) if asking else 0.0
            rows, num = asking + prefix_rows, len(batch)
            seconds += self._costs.mixed_seconds(rows, num, attention_s) - alone
        return batch, self._factor * max(0.0, seconds)


NO_MODEL: Final = StepCosts((1, 2), (0.0, 0.0))
"""A look-up's steps take no time; its messages do."""
