"""Rounds: sessions on their way from station to station.

    target --verdict--> coordinator --half a link--> draft --half--> coordinator --> target

A message takes what its part of a round takes beside steps: `ServiceTimes.rest_s` behind a verdict,
the base of `ServiceTimes.wait` and the link around a proposal, half of them each way. What leaves
in one frame arrives together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from outrider.fleet_simulator.agenda import Agenda
from outrider.fleet_simulator.draws import Draws
from outrider.fleet_simulator.looking import LookingDraft
from outrider.fleet_simulator.places import Places, Side
from outrider.fleet_simulator.recording import Recording
from outrider.fleet_simulator.scenario import Scenario
from outrider.fleet_simulator.stations import (
    Coordinator,
    Draft,
    Session,
    Sessions,
    Station,
    Target,
    Wish,
)
from outrider.limits import SESSION_LEASE_MS
from outrider.registry.registry import LEASE_S, Role


class Rounds:
    """The stations of a fleet, and what sessions do between them."""

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        recording: Recording,
        draws: Draws,
        on_end: Callable[[Session], None],
    ) -> None:
        """`on_end` hears of each session that has all its tokens."""
        self._scenario = scenario
        self._drafting = scenario.drafting
        self._is_plain = scenario.drafting.is_plain
        self._looks_ahead = scenario.drafting.look_ahead > 0
        self._agenda = agenda
        self._recording = recording
        self._draws = draws
        self._on_end = on_end
        times = scenario.times
        turn_s = scenario.coordinator_s / (1 if self._is_plain else 2)
        lost = {loss.role for loss in scenario.losses}
        self._skips_turns = turn_s == 0 and "coordinator" not in lost
        rest_s = times.plain.base_s if self._is_plain else times.rest_s
        # What was measured as rest has a coordinator's turns in it.
        self._verdict_s = max(0.0, rest_s - scenario.coordinator_s)
        # No message leaves where a look-up proposes.
        link_s = scenario.round_trip_s * min(1.0, scenario.drafting.num_steps)
        self._half_s = max(0.0, times.wait.base_s + link_s) / 2
        fleet = scenario.fleet
        self.targets: Sequence[Station] = [
            Target(f"target-{n}", agenda, self._verified, self._stranded, scenario)
            for n in range(fleet.targets)
        ]
        self.drafts: Sequence[Station] = [
            self._draft(f"draft-{n}") for n in range(0 if self._is_plain else fleet.drafts)
        ]
        self.coordinators = [
            Coordinator(f"coordinator-{n}", agenda, self._turned, self._stranded, turn_s)
            for n in range(fleet.coordinators)
        ]
        seats: dict[Side, int] = {
            "target": scenario.target_seats,
            "draft": scenario.times.max_num_seqs,
        }
        self.places = Places(self.targets, self.drafts, self.coordinators, seats)
        self._homeless: dict[Role, Sessions] = {"target": [], "coordinator": []}
        """Sessions for which no replica of a role is there."""

    def _draft(self, name: str) -> Station:
        scenario, agenda = self._scenario, self._agenda
        if not self._looks_ahead:
            return Draft(name, agenda, self._proposed, self._stranded, scenario)
        return LookingDraft(name, agenda, self._proposed, self._stranded, scenario, self._half_s)

    def of(self, role: Role) -> Sequence[Station]:
        """The replicas of a role."""
        return {"target": self.targets, "draft": self.drafts}.get(role, self.coordinators)

    def begin(self, session: Session) -> None:
        """A session's first round, in which the draft reads its prompt while the target does, if
        that is to be read."""
        self.places.settle(session, "target")
        if not self._is_plain and self.places.settle(session, "draft") and session.target_missing:
            session.draft_missing = session.length
            session.reading = True
            self._send(session.draft, [session], self._half_s)
        self._to_targets([session], 0.0)

    def lose(self, role: Role, number: int) -> None:
        """The first replica of the role that is there goes: the loss of this number."""
        lost = next((one for one in self.of(role) if one.lost_at is None), None)
        if lost is not None:
            self.places.lose(lost.name)
            lost.lose(number)

    def restore(self, role: Role) -> None:
        """The first one that is away comes back."""
        found = next((one for one in self.of(role) if one.lost_at is not None), None)
        if found is None:
            return
        found.come_back()
        if role != "coordinator":
            self.places.take_in(role, found.name)
        homeless, self._homeless[role] = self._homeless.get(role, []), []
        self._move(found, homeless)

    def _verified(self, station: Station, batch: Sessions) -> None:
        """A step of a target is done."""
        now, recording = self._agenda.now, self._recording
        drawn = () if self._is_plain else self._draws.accepted(len(batch))
        total = 0
        going_on: Sessions = []
        for index, session in enumerate(batch):
            num = 1
            if session.proposed:
                num += drawn[index]
                session.proposed = False
            if num > session.left:
                num = session.left
            session.length += num
            session.left -= num
            total += num
            if session.last_at < 0:
                recording.first(session, now)
            elif session.since_loss is not None:
                recording.resumed(session, now)
            session.last_at = now
            if session.left > 0:
                session.has_verdict = not self._is_plain
                going_on.append(session)
            else:
                self._end(session)
        recording.count(now, total, len(batch))
        self._to_coordinators(going_on, self._verdict_s)

    def _end(self, session: Session) -> None:
        session.is_over = True
        if session.draft is not None:
            session.draft.forget(session)
        self.places.close(session)
        self._on_end(session)

    def _to_coordinators(self, batch: Sessions, delay_s: float) -> None:
        if self._skips_turns:
            self._forward(batch, delay_s)
            return
        for coordinator, sessions in _grouped(batch, lambda one: one.coordinator):
            self._send(coordinator, sessions, delay_s)

    def _turned(self, station: Station, batch: Sessions) -> None:
        """A coordinator has worked off what had come."""
        self._forward(batch, 0.0)

    def _forward(self, batch: Sessions, delay_s: float) -> None:
        asking = [session for session in batch if session.has_verdict]
        if not asking:
            self._to_targets(batch, delay_s)
            return
        if len(asking) < len(batch):
            ready = [session for session in batch if not session.has_verdict]
            self._to_targets(ready, delay_s)
        self._ask(asking, delay_s)

    def _ask(self, batch: Sessions, delay_s: float) -> None:
        """Verdicts are known: questions for proposals leave, but where one is there."""
        asked_at = self._agenda.now + delay_s
        asking: Sessions = []
        ready: Sessions = []
        for session in batch:
            session.asked_at = asked_at
            session.has_verdict = False
            if session.draft is None and not self._attach(session):
                ready.append(session)
                continue
            if self._looks_ahead:
                is_hit = self._draws.is_hit(self._drafting.hit_rate)
                session.wish = Wish.GO_ON if is_hit else Wish.PROPOSE
                if is_hit and session.ahead_at <= asked_at:
                    session.wish = Wish.LOOK_AHEAD
                    session.proposed = True
                    ready.append(session)
            asking.append(session)
        num_hits = sum([one.proposed for one in ready]) if ready else 0
        self._recording.asked(len(asking), num_hits)
        for draft, sessions in _grouped(asking, lambda one: one.draft):
            self._agenda.note(asked_at + self._half_s, self._asked, (draft, sessions))
        if ready:
            self._to_targets(ready, delay_s)

    def _attach(self, session: Session) -> bool:
        """To a draft that has read nothing of the session yet; False where there is none."""
        if not self.places.settle(session, "draft"):
            return False
        session.draft_missing = session.length
        session.reading = True
        session.is_parked = False
        self._send(session.draft, [session], self._half_s)
        return True

    def _asked(self, message: tuple[Station, Sessions]) -> None:
        """Questions arrive at a draft. What it reads for a session comes before its proposal."""
        draft, sessions = message
        if not draft.is_free:
            waiting = sum([one.wish is not Wish.LOOK_AHEAD for one in sessions])
            self._recording.queued(waiting)
        ready = sessions
        if draft.lost_at is None:
            ready = [session for session in sessions if not session.reading]
            if len(ready) < len(sessions):
                for session in sessions:
                    if session.reading:
                        session.is_parked = session.wish is not Wish.LOOK_AHEAD
        if ready:
            draft.take(ready)

    def _proposed(self, station: Station, batch: Sessions) -> None:
        """A step of a draft is done."""
        parked: Sessions = []
        done: Sessions = []
        for session in batch:
            if session.is_over:
                continue
            if session.reading:
                session.reading = False
                if session.is_parked:
                    session.is_parked = False
                    parked.append(session)
            else:
                session.proposed = True
                done.append(session)
        if parked:
            station.take(parked)
        if done:
            arrives_at = self._agenda.now + self._half_s
            self._recording.waited(sum([arrives_at - one.asked_at for one in done]))
            self._to_coordinators(done, self._half_s)

    def _to_targets(self, batch: Sessions, delay_s: float) -> None:
        for target, sessions in _grouped(batch, lambda one: one.target):
            self._send(target, sessions, delay_s)

    def _send(self, station: Station | None, sessions: Sessions, delay_s: float) -> None:
        if station is None:
            self._homeless["target"] += sessions
        elif delay_s == 0:
            station.take(sessions)
        else:
            self._agenda.note(self._agenda.now + delay_s, station.take, sessions)

    def _stranded(self, station: Station, sessions: Sessions) -> None:
        """What a replica that is gone had, or was sent. Nobody hears of it until its lease is
        over; but a draft is waited for no longer than for any answer."""
        if not sessions or station.lost_at is None:
            return
        for session in sessions:
            if not self._is_beside(session, station):
                session.since_loss = station.loss
        patience_s = LEASE_S
        if isinstance(station, Coordinator):
            patience_s = SESSION_LEASE_MS / 1e3
        elif isinstance(station, Draft):
            patience_s = self._scenario.draft_timeout_s
        at = max(self._agenda.now, station.lost_at + patience_s)
        self._agenda.note(at, lambda _: self._move(station, sessions), None)

    def _move(self, station: Station, sessions: Sessions) -> None:
        """Sessions go on elsewhere, with what they have committed."""
        for session in sessions:
            if session.is_over:
                continue
            if isinstance(station, Coordinator):
                self._resume(session)
            elif isinstance(station, Target):
                self.places.leave(session, "target")
                session.target_missing = session.length
                self.places.settle(session, "target")
                self._to_targets([session], 0.0)
            elif session.draft is station:  # Else it has gone on, told twice.
                self._go_on_without(session, station)

    def _is_beside(self, session: Session, station: Station) -> bool:
        """Whether a draft works for a session while nobody waits for that."""
        reads = session.reading and not session.is_parked
        return isinstance(station, Draft) and (reads or session.wish is Wish.LOOK_AHEAD)

    def _go_on_without(self, session: Session, draft: Station) -> None:
        """The draft is gone: whoever waits for it goes on, and asks another one next time."""
        is_awaited = not self._is_beside(session, draft)
        self.places.leave(session, "draft")
        session.reading = session.is_parked = False
        session.wish = Wish.PROPOSE
        if is_awaited:
            self._to_targets([session], 0.0)

    def _resume(self, session: Session) -> None:
        """At another coordinator, with the replicas that hold its tokens."""
        if self.places.resume(session):
            self._send(session.coordinator, [session], 0.0)
        else:
            self._homeless["coordinator"].append(session)


def _grouped(
    batch: Sessions, by: Callable[[Session], Station | None]
) -> Iterable[tuple[Station, Sessions]]:
    """Sessions by station, each group in their order."""
    if len(batch) == 1:
        return ((by(batch[0]), batch),)  # type: ignore[return-value]
    found: dict[Station | None, Sessions] = {}
    for session in batch:
        station = by(session)
        if station in found:
            found[station].append(session)
        else:
            found[station] = [session]
    return found.items()  # type: ignore[return-value]
