"""Recorded rounds played again, under any choice of lengths: a coordinator's sessions, one draft
and one target on a made-up clock.

A session's rounds were recorded with the longest proposals. Where a replayed round begins, the next
recorded one says what is proposed and how likely that is to be accepted, cut to the K that was
chosen.

`recorded_rounds.json` has, by rule, sessions of the demo pair (`hybrid:suffix,demo-drafter`, K = 8)
with the odd prompts of Spec-Bench's first three in each category: category, tokens of the prompt,
tokens committed, and rounds. Each of these has the number of steps that the draft's model took and,
in hundredths, the chance that as many tokens and more are accepted.
"""

from __future__ import annotations

import heapq
import json
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path

from coordinator.draft_length.controller import LengthControls
from coordinator.draft_length.policy import FixedLength, LengthPolicy, PlayedRound
from outrider.engine.step_costs import StepCosts
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling_params import Rule


@dataclass(frozen=True)
class Proposed:
    """A recorded round."""

    survival: tuple[float, ...]
    """Of its proposal, as `outrider.speculation.accept_reject.survival` tells it."""
    num_drawn: int
    """Of the proposed tokens those that took the draft's model a step each."""


@dataclass(frozen=True)
class Recording:
    """A session."""

    category: str
    prompt_length: int
    num_tokens: int
    rounds: tuple[Proposed, ...]
    """For about as many tokens; where they end, they begin again."""


@dataclass(frozen=True)
class Machine:
    """What things take, s."""

    target: StepCosts
    draft: StepCosts
    wire_s: float
    """A message to a side and its answer, with all that the coordinator does about it."""
    noise: float = 0.05
    """Standard deviation of a step, as a share of it."""


@dataclass
class _Session:
    recording: Recording
    policy: LengthPolicy
    began_at: float
    unread: int
    """Committed tokens that the draft has not read."""
    starts: list[int]
    """Where each recorded round begins, and where the last one ends."""
    index: int = 0
    position: int = 0
    """Tokens committed."""
    num_draft_tokens: int = 0
    num_drawn: int = 0
    """Steps of the draft's model for this round's proposal."""
    survival: tuple[float, ...] = ()
    """Of what was proposed for this round."""
    asked_draft_at: float = 0.0
    draft_s: float = 0.0
    asked_until: int = -1
    """The last round that the target was asked for ..."""
    sure_until: int = -1
    """... and that it knows of."""
    run_until: int = -1
    """The last round that the target was busy with."""
    at_target: bool = False
    num_plain: int = 0


@dataclass(frozen=True)
class _Step:
    """A session's part in a step of the target."""

    session: _Session
    index: int
    num_rows: int
    asked_at: float


@dataclass(frozen=True)
class Played:
    """What became of a session."""

    category: str
    num_tokens: int
    seconds: float
    num_rounds: int
    num_plain: int


class Replay:
    """Plays sessions, so many at a time."""

    def __init__(
        self, machine: Machine, open_policy: Callable[[Recording], LengthPolicy], seed: int
    ) -> None:
        self._machine = machine
        self._open = open_policy
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.now = 0.0
        self._at_target: deque[_Step] = deque()
        self._at_draft: deque[_Session] = deque()
        self._target_runs = self._draft_runs = False
        self._waiting: Iterator[Recording] = iter(())
        self.played: list[Played] = []

    def run(self, recordings: Sequence[Recording], concurrency: int) -> list[Played]:
        """Plays all of them."""
        self._waiting = iter(recordings)
        for _ in range(concurrency):
            self._next_session()
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.played

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _next_session(self) -> None:
        recording = next(self._waiting, None)
        if recording is None:
            return
        policy = self._open(recording)
        sizes = (1 + round(sum(one.survival)) for one in recording.rounds)
        self._begin(
            _Session(
                recording,
                policy,
                self.now,
                recording.prompt_length if policy.begins_plain else 0,
                [0, *accumulate(sizes)],
            )
        )

    def _begin(self, session: _Session) -> None:
        """A round begins in the coordinator."""
        left = session.recording.num_tokens - session.position
        length = session.policy.choose(session.index, left)
        session.num_draft_tokens = length.num_draft_tokens
        session.survival, session.draft_s = (), 0.0
        if length.num_draft_tokens > 0:
            session.asked_draft_at = self.now
            self._after(self._machine.wire_s / 2, partial(self._ask_draft, session))
            return
        session.num_plain += 1
        sure = session.asked_until - session.index
        if sure < 0 or sure < length.run_ahead // 2:
            self._ask_target(session, length.run_ahead)

    def _ask_target(self, session: _Session, run_ahead: int) -> None:
        session.asked_until = session.index + run_ahead
        arrives = partial(self._asked, session, session.asked_until)
        self._after(self._machine.wire_s / 2, arrives)

    def _ask_draft(self, session: _Session) -> None:
        self._at_draft.append(session)
        if not self._draft_runs:
            self._step_draft()

    def _step_draft(self) -> None:
        self._draft_runs = bool(self._at_draft)
        if not self._draft_runs:
            return
        batch = [self._at_draft.popleft() for _ in range(len(self._at_draft))]
        for session in batch:
            found = self._next_recorded(session)
            session.survival = found.survival[: session.num_draft_tokens]
            session.num_drawn = min(found.num_drawn, session.num_draft_tokens)
        steps = [session.num_drawn for session in batch]
        seconds = 0.0
        for step in range(max(steps)):
            rows = sum(num > step for num in steps)
            if step == 0:
                rows += sum(one.unread for one, num in zip(batch, steps, strict=True) if num)
            seconds += self._noisy(self._machine.draft.step_seconds(rows))
        for session, num in zip(batch, steps, strict=True):
            session.unread = 0 if num > 0 else session.unread
            self._after(seconds + self._machine.wire_s / 2, partial(self._drafted, session))
        self._after(seconds, self._step_draft)

    def _next_recorded(self, session: _Session) -> Proposed:
        rounds, starts = session.recording.rounds, session.starts
        return rounds[bisect_left(starts, session.position % starts[-1]) % len(rounds)]

    def _drafted(self, session: _Session) -> None:
        session.draft_s = self.now - session.asked_draft_at
        self._ask_target(session, 0)

    def _asked(self, session: _Session, until: int) -> None:
        """The target hears of a round, and that those behind it have no proposal."""
        session.sure_until = until
        if not session.at_target:
            self._verify(session, len(session.survival))

    def _verify(self, session: _Session, num_proposed: int) -> None:
        session.run_until += 1
        session.at_target = True
        self._at_target.append(_Step(session, session.run_until, 1 + num_proposed, self.now))
        if not self._target_runs:
            self._step_target()

    def _step_target(self) -> None:
        self._target_runs = bool(self._at_target)
        if not self._target_runs:
            return
        batch = [self._at_target.popleft() for _ in range(len(self._at_target))]
        rows = sum(step.num_rows for step in batch)
        held = sum(one.session.recording.prompt_length + one.session.position for one in batch)
        seconds = self._noisy(self._machine.target.step_seconds(rows, len(batch), held))
        for step in batch:
            self._after(seconds, partial(self._verified, step))
        self._after(seconds, self._step_target)

    def _verified(self, step: _Step) -> None:
        session = step.session
        session.at_target = False
        if step.index < session.sure_until:
            self._verify(session, 0)
        target_s = self.now - step.asked_at
        self._after(self._machine.wire_s / 2, partial(self._end, session, target_s))

    def _end(self, session: _Session, target_s: float) -> None:
        """The coordinator has a round's verdict."""
        chance = self._random.random()
        accepted = sum(chance < one for one in session.survival)
        num_tokens = min(1 + accepted, session.recording.num_tokens - session.position)
        session.policy.note(
            PlayedRound(
                num_asked=session.num_draft_tokens,
                survival=session.survival,
                num_tokens=num_tokens,
                context=session.recording.prompt_length + session.position,
                draft_s=session.draft_s,
                target_s=target_s,
                ended_at=self.now,
            )
        )
        session.position += num_tokens
        session.unread += num_tokens if session.num_draft_tokens == 0 else 0
        session.index += 1
        if session.position < session.recording.num_tokens:
            self._begin(session)
            return
        session.policy.close()
        seconds = self.now - session.began_at
        category = session.recording.category
        self.played.append(
            Played(category, session.position, seconds, session.index, session.num_plain)
        )
        self._next_session()

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._random.gauss(1.0, self._machine.noise))


def recorded(rule: str) -> list[Recording]:
    """The sessions of a rule, in the order in which they were measured."""
    found = json.loads((Path(__file__).parent / "recorded_rounds.json").read_text())
    return [
        Recording(category, prompt_length, num_tokens, tuple(_round(*one) for one in rounds))
        for category, prompt_length, num_tokens, rounds in found[rule]
    ]


def _round(num_drawn: int, *percent: int) -> Proposed:
    return Proposed(tuple(one / 100 for one in percent), num_drawn)


BOUND = 8
RUN_AHEAD = 8
MACHINE = Machine(
    target=StepCosts((1, 2, 3, 9, 17, 80), (0.0448, 0.0465, 0.048, 0.0537, 0.064, 0.130)),
    draft=StepCosts((1, 16, 256), (0.0134, 0.017, 0.060)),
    wire_s=0.0035,
)
"""As the rounds were measured: 2 cores, on a day on which they had half their usual speed."""
TABLES = {
    "true": (MACHINE.target, MACHINE.draft),
    "the draft looks slow": (MACHINE.target, StepCosts((1, 16, 256), (0.04, 0.05, 0.18))),
    "rows look dear": (StepCosts((1, 3, 9, 80), (0.0448, 0.068, 0.13, 0.8)), MACHINE.draft),
}
"""What the engines say of themselves, which may have been measured at a bad time."""

Policies = Callable[[Recording], LengthPolicy]


@dataclass(frozen=True)
class Speed:
    """Of some sessions."""

    tokens_per_second: float
    plain_share: float
    """Of their rounds."""


def fixed(num_draft_tokens: int) -> Policies:
    """The same K in each round."""
    return lambda recording: FixedLength(num_draft_tokens, RUN_AHEAD)


def controlled(rule: Rule, tables: str = "true") -> Policies:
    """One coordinator's choices."""
    target, draft = (_description(costs) for costs in TABLES[tables])
    controls, seeds = LengthControls(target, draft, RUN_AHEAD), count()
    return lambda one: controls.open(rule, next(seeds), BOUND, one.prompt_length)


def play(
    sessions: Sequence[Recording], policies: Policies, concurrency: int = 1, seed: int = 0
) -> list[Played]:
    """All of them."""
    return Replay(MACHINE, policies, seed).run(sessions, concurrency)


def speed(played: Sequence[Played], category: str | None = None) -> Speed:
    """Of the sessions of a category, or of all."""
    chosen = [one for one in played if category in (None, one.category)]
    num_rounds = sum(one.num_rounds for one in chosen)
    return Speed(
        sum(one.num_tokens for one in chosen) / sum(one.seconds for one in chosen),
        sum(one.num_plain for one in chosen) / num_rounds,
    )


def halved(sessions: Sequence[Recording]) -> list[Recording]:
    """Sessions that begin as one of `sessions` and go on as another one."""
    others = [*sessions[len(sessions) // 2 :], *sessions[: len(sessions) // 2]]
    return [
        replace(
            one,
            category="changing",
            rounds=one.rounds[: len(one.rounds) // 2] + other.rounds[: len(other.rounds) // 2],
        )
        for one, other in zip(sessions, others, strict=True)
    ]


def spoiled(sessions: Sequence[Recording]) -> list[Recording]:
    """The same with a draft that hits six times in ten where it did, and never twice in a row."""
    rng = random.Random(1)
    return [
        replace(one, category="spoiled", rounds=tuple(_spoiled(rng, it) for it in one.rounds))
        for one in sessions
    ]


def _spoiled(rng: random.Random, proposed: Proposed) -> Proposed:
    first = rng.random() < 0.6
    survival = (chance * (first and i == 0) for i, chance in enumerate(proposed.survival))
    return replace(proposed, survival=tuple(survival))


def _description(costs: StepCosts) -> ReplicaDescription:
    return ReplicaDescription("m", "", "", 100, "bfloat16", 0, (), 64, costs)
