"""One simulation: requests come and go, replicas are lost, and figures are taken in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from outrider.fleet_simulator.agenda import Agenda
from outrider.fleet_simulator.draws import Draws
from outrider.fleet_simulator.figures import FleetFigures, RoleFigures
from outrider.fleet_simulator.recording import Recording
from outrider.fleet_simulator.rounds import Rounds
from outrider.fleet_simulator.scenario import Loss, Scenario
from outrider.fleet_simulator.stations import Session, Station


def simulate(scenario: Scenario) -> FleetFigures:
    """Runs a scenario to its end; the same one always comes to the same."""
    return _Run(scenario).figures()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A request to come."""

    rate: float | None = None
    """Of which it is one, requests a second; None = it follows one that ended."""
    is_read: bool = False
    """Whether its replicas hold its prompt."""


class _Run:
    """One simulation."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._agenda = Agenda()
        self._recording = Recording(scenario.warm_up_s, scenario.seconds)
        seeds = np.random.SeedSequence(scenario.seed).spawn(2)
        of_rounds, of_requests = (np.random.default_rng(seed) for seed in seeds)
        draws = Draws(of_rounds, scenario.drafting.survival)
        self._requests = Draws(of_requests, ())
        self._rounds = Rounds(scenario, self._agenda, self._recording, draws, self._ended)
        self._sessions: dict[Session, None] = {}
        """Those that run."""
        self._num_begun = 0
        self._session_s = 0.0
        """Sum of the times that sessions have run ..."""
        self._counted_at = 0.0
        """... up to then."""

    def figures(self) -> FleetFigures:
        """Runs to the end."""
        scenario, agenda, demand = self._scenario, self._agenda, self._scenario.demand
        if demand.sessions is not None:
            # The first ones come one by one, over half of the warm-up, with prompts that are read:
            # else a fleet would begin with the prompts of all at once.
            for index in range(demand.sessions):
                at = scenario.warm_up_s / 2 * index / demand.sessions
                agenda.note(at, self._arrive, _Arrival(is_read=True))
        elif demand.rate:
            agenda.note(self._requests.gap_s(demand.rate), self._arrive, _Arrival(demand.rate))
        for number, loss in enumerate(scenario.losses):
            agenda.note(scenario.warm_up_s + loss.at_s, self._lose, (number, loss))
            if loss.back_s < scenario.seconds:
                agenda.note(scenario.warm_up_s + loss.back_s, self._restore, loss)
        agenda.run(scenario.warm_up_s)
        for station in self._stations:
            station.clear_figures()
        self._count_running()
        self._session_s = 0.0
        self._recording.begin(self._sessions)
        agenda.run(scenario.warm_up_s + scenario.seconds)
        return self._figures()

    @property
    def _stations(self) -> Sequence[Station]:
        return [*self._rounds.targets, *self._rounds.drafts, *self._rounds.coordinators]

    def _arrive(self, arrival: _Arrival) -> None:
        """A request comes, and of a rate the next one is noted."""
        now, scenario, rate = self._agenda.now, self._scenario, arrival.rate
        if rate is not None:
            self._agenda.note(now + self._requests.gap_s(rate), self._arrive, arrival)
        number, self._num_begun = self._num_begun, self._num_begun + 1
        demand = scenario.demand
        key = blake2b(number.to_bytes(8, "little"), digest_size=16).digest()
        answer = self._requests.answer_tokens(demand.answer_tokens)
        session = Session(key, demand.prompt_tokens, answer, now)
        if not self._rounds.places.open(session, number, scenario.sessions_max):
            self._recording.refused()
            if rate is None:  # Who keeps sessions running asks again a second later.
                self._agenda.note(now + 1.0, self._arrive, arrival)
            return
        if arrival.is_read:
            session.target_missing = 0
        self._count_running()
        self._sessions[session] = None
        self._rounds.begin(session)

    def _ended(self, session: Session) -> None:
        self._count_running()
        self._recording.ended(session)
        del self._sessions[session]
        if self._scenario.demand.sessions is not None:
            self._agenda.note(self._agenda.now, self._arrive, _Arrival())

    def _lose(self, event: tuple[int, Loss]) -> None:
        number, loss = event
        self._rounds.lose(loss.role, number)

    def _restore(self, loss: Loss) -> None:
        self._rounds.restore(loss.role)

    def _count_running(self) -> None:
        now = self._agenda.now
        self._session_s += len(self._sessions) * (now - self._counted_at)
        self._counted_at = now

    def _figures(self) -> FleetFigures:
        recording, rounds, seconds = self._recording, self._rounds, self._scenario.seconds
        self._count_running()
        for session in self._sessions:
            recording.leave(session)
        coordinated = [{one.name: one.num_sessions} for one in rounds.coordinators]
        return FleetFigures(
            tokens_per_second=recording.num_tokens / seconds,
            rounds_per_second=recording.num_rounds / seconds,
            tokens_per_round=recording.num_tokens / max(1, recording.num_rounds),
            sessions=self._session_s / seconds,
            num_requests=recording.num_requests,
            num_refused=recording.num_refused,
            tpot_ms_p50=recording.pace_ms(0.5),
            tpot_ms_p99=recording.pace_ms(0.99),
            ttft_ms_p50=recording.first_ms(0.5),
            ttft_ms_p99=recording.first_ms(0.99),
            draft_ms=1e3 * recording.draft_s / max(1, recording.num_asked),
            draft_share=min(1.0, recording.draft_s / max(1e-9, self._session_s)),
            rounds_queued=recording.num_queued / max(1, recording.num_asked),
            hit_rate=recording.num_hits / max(1, recording.num_asked),
            targets=self._role(rounds.targets, rounds.places.loads("target")),
            drafts=self._role(rounds.drafts, rounds.places.loads("draft")),
            coordinators=self._role(rounds.coordinators, coordinated),
            tokens_by_second=tuple(recording.by_second),
            losses=tuple(
                recording.loss_figures(number, loss)
                for number, loss in enumerate(self._scenario.losses)
            ),
        )

    def _role(self, stations: Sequence[Station], loads: Sequence[Mapping[str, int]]) -> RoleFigures:
        for station in stations:
            station.settle_figures()
        here = [sum(load.get(one.name, 0) for load in loads) for one in stations]
        shares = [min(1.0, one.busy_s / self._scenario.seconds) for one in stations]
        steps = sum(one.num_steps for one in stations)
        return RoleFigures(
            replicas=len(stations),
            busy=sum(shares) / len(shares) if shares else 0.0,
            busiest=max(shares, default=0.0),
            sessions_per_step=sum(one.num_served for one in stations) / max(1, steps),
            sessions_least=min(here, default=0),
            sessions_most=max(here, default=0),
        )
