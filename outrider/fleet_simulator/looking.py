"""A draft that works likely outcomes out while the target verifies."""

from __future__ import annotations

import math
from collections.abc import Callable

from outrider.fleet_simulator.agenda import Agenda
from outrider.fleet_simulator.scenario import Scenario
from outrider.fleet_simulator.stations import Draft, Session, Sessions, Station, Wish


class LookingDraft(Draft):
    """Everything advances a pass at a time: what is waited for first, then outcomes of as many
    sessions as there is room for, in order of arrival. All outcomes of a session take a pass more
    than a proposal: the first one reads what the bonus goes on from."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        finish: Callable[[Station, Sessions], None],
        strand: Callable[[Station, Sessions], None],
        scenario: Scenario,
        push_s: float,
    ) -> None:
        """`push_s` is what a proposal takes to the coordinator."""
        super().__init__(name, agenda, finish, strand, scenario)
        self._num_outcomes = scenario.drafting.look_ahead
        self._push_s = push_s
        self._wanted: Sessions = []
        self._ahead: dict[Session, None] = {}
        """Whose outcomes are worked out, in order of arrival."""
        self._progress: dict[Session, float] = {}
        """Passes that the running step brings each session's outcomes forward."""
        self._reads = False

    @property
    def is_free(self) -> bool:
        """See `Station.is_free`: outcomes keep nobody waiting for more than a pass."""
        return not self._wanted and not self._waiting

    def take(self, sessions: Sessions) -> None:
        """See `Station.take`."""
        if self.lost_at is not None:
            super().take(sessions)
            return
        there: Sessions = []
        for session in sessions:
            if session.reading:
                self._waiting.append(session)
            elif session.wish is Wish.LOOK_AHEAD:
                self._look_ahead(session)
            elif session.wish is Wish.GO_ON and session.ahead_at < math.inf:
                there.append(session)
            elif session.wish is Wish.GO_ON and session in self._ahead:
                del self._ahead[session]
                self._wanted.append(session)
            else:
                self.forget(session)
                session.passes_left = self._num_passes
                self._wanted.append(session)
        if there:
            self._finish(self, there)
            for session in there:
                self._look_ahead(session)
        self._wake()

    def forget(self, session: Session) -> None:
        """See `Station.forget`."""
        self._ahead.pop(session, None)
        self._progress.pop(session, None)

    def _look_ahead(self, session: Session) -> None:
        self.forget(session)
        session.passes_left = self._num_passes + 1
        session.ahead_at = math.inf
        self._ahead[session] = None

    def _has_work(self) -> bool:
        return bool(self._wanted or self._ahead or self._waiting)

    def _awaited(self) -> Sessions:
        return [*self._wanted, *self._waiting, *((self._running or ()) if self._reads else ())]

    def _forget(self) -> None:
        self._wanted = []
        self._ahead.clear()
        self._progress.clear()

    def _next_step(self) -> tuple[Sessions, float]:
        """Prefixes have steps of their own, by turns with passes."""
        self._progress.clear()
        self._reads = bool(self._waiting) and not (self._reads and self._has_branches())
        if self._reads:
            self._has_prefixes = True
            return super()._next_step()
        wanted = self._wanted[: self._seats]
        room = self._seats - len(wanted)
        num = room // self._num_outcomes or min(1, room)
        share = min(1.0, room / self._num_outcomes)
        for session in self._ahead:
            if len(self._progress) == num:
                break
            self._progress[session] = share
        rows = len(wanted) + min(room, len(self._progress) * self._num_outcomes)
        self._grants = []
        batch = [*wanted, *self._progress]
        context = 0
        if self._reads_contexts:
            context = round(rows * sum(one.length for one in batch) / len(batch))
        return batch, self._factor * self._costs.step_seconds(rows, rows, context)

    def _has_branches(self) -> bool:
        return bool(self._wanted or self._ahead)

    def _done(self, batch: Sessions) -> Sessions:
        if self._reads:
            return super()._done(batch)
        for session, share in self._progress.items():
            session.passes_left -= share
            if session.passes_left <= 0 and session in self._ahead:
                del self._ahead[session]
                session.ahead_at = self._agenda.now + self._push_s
        proposing = len(batch) if not self._progress else self._num_proposing(batch)
        for session in batch[:proposing]:
            session.passes_left -= 1
        done = [session for session in self._wanted if session.passes_left <= 0]
        if done:
            self._wanted = [session for session in self._wanted if session.passes_left > 0]
            for session in done:
                self._look_ahead(session)
        return done

    def _num_proposing(self, batch: Sessions) -> int:
        """How many at the beginning of a step's sessions were waited for when it began."""
        return next((i for i, one in enumerate(batch) if one in self._progress), len(batch))
