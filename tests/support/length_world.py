"""Simulated drafters, costs and a clock, reproducible by seed, to test length control."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.draft_length.controller import LengthControl, LengthControls
from coordinator.draft_length.policy import DraftedBeside, RoundLength, RoundResult
from outrider.interfaces.messages import ReplicaDescription
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.sampling_params import Rule

BOUND = 8
RUN_AHEAD = 8
ENDLESS = 10**9


def description(costs: StepCosts | None) -> ReplicaDescription:
    return ReplicaDescription("m", "", "", 100, "float32", 0, (), 64, costs)


def controls(
    target: StepCosts | None = None, draft: StepCosts | None = None, *, delays: bool = False
) -> LengthControls:
    return LengthControls(description(target), description(draft), RUN_AHEAD, delays=delays)


@dataclass
class World:
    """The conditions of a session. Times are in seconds."""

    acceptance: float = 0.7
    """Chance that each draft token is accepted, given that all earlier ones were."""
    draft_s: float = 0.002
    """Time per draft token."""
    verify_s: float = 0.016
    """Time of a target step over one row."""
    row_s: float = 0.0008
    """Time of each further row of a target step."""
    wire_s: float = 0.001
    """Time of messages to either side and back. Plain decoding does not wait for them."""
    noise: float = 0.1
    """Standard deviation of each time, relative to the time."""
    length: Callable[[random.Random], int] | None = None
    """Length of a proposal; None = as requested."""
    tables: bool = True
    """Whether the draft has a table of step costs."""
    prompt_length: int = 100
    drafts_itself: bool = False
    """Whether the target drafts together with the verdict before."""
    by_target: bool = False
    """Whether the target's look-up drafts, so that rounds with drafts run ahead. The target waits
    for `wire_s` before a round that did not."""
    delays: bool = False
    """Whether the target waits while the draft works, because they share cores."""
    stall: Callable[[random.Random], float] = lambda _: 0.0
    """Time added to each proposal."""
    now: float = 0.0
    ran_ahead: bool = False
    """Whether the target runs the round without a request for it."""
    num_beside: int = 0
    """Number of tokens that the newest verdict brought."""
    controls: LengthControls = field(init=False)

    def __post_init__(self) -> None:
        target = StepCosts((1, 33), (self.verify(1), self.verify(33)))
        draft = StepCosts((1, 65), (self.draft_s, 2 * self.draft_s)) if self.draft_s else None
        self.controls = controls(target, draft if self.tables else None, delays=self.delays)
        self.random = random.Random(0)

    def verify(self, num_rows: int) -> float:
        return self.verify_s + self.row_s * (num_rows - 1)

    def rate(self, num_asked: int) -> float:
        """Tokens a second with this K in every round, if proposals have the requested length."""
        if num_asked == 0:
            return 1 / self.verify_s
        tokens = sum(self.acceptance**n for n in range(num_asked + 1))
        step_s = self.verify(1 + num_asked) + num_asked * self.draft_s
        return tokens / (step_s + (0.0 if self.drafts_itself else 2 * self.wire_s))

    @property
    def best(self) -> int:
        """The fastest K."""
        return max(range(BOUND + 1), key=self.rate)

    def open(self, seed: int = 1, bound: int = BOUND) -> LengthControl:
        return self.controls.open(Rule.TOKEN, seed, bound, self.prompt_length)

    def play(self, control: LengthControl, num_rounds: int, first_index: int = 0) -> Run:
        started_at, chosen, tokens, num_ahead = self.now, [], [], 0
        granted = 0, (-1, 0.0)
        for index in range(first_index, first_index + num_rounds):
            length = control.choose(ENDLESS, by_target=self.by_target)
            chosen.append(length)
            kind = length.num_draft_tokens, length.min_chance
            self.ran_ahead = self.by_target and granted[0] >= index and granted[1] == kind
            if not self.ran_ahead or granted[0] - index < length.run_ahead // 2:
                granted = index + length.run_ahead, kind
            num_ahead += self.ran_ahead
            tokens.append(self._round(control, length, is_first=index == first_index))
        return Run(chosen, tokens, self.now - started_at, num_ahead)

    def session(self, seed: int, num_rounds: int) -> Run:
        control = self.open(seed)
        run = self.play(control, num_rounds)
        control.close()
        return run

    def _round(self, control: LengthControl, length: RoundLength, *, is_first: bool) -> int:
        num_asked, wire_s, beside = length.num_draft_tokens, self.wire_s, None
        num_proposed = num_asked
        if self.length is not None:
            num_proposed = min(num_asked, self.length(self.random))
        if self.drafts_itself:
            num_proposed, wire_s = min(num_asked, self.num_beside), 0.0
            took_s = self.draft_s * self.num_beside
            beside = DraftedBeside(self.num_beside, took_s, took_s) if num_proposed else None
            self.num_beside = length.next_max
        passes = [self.random.random() < self.acceptance for _ in range(num_proposed)]
        survival = tuple(float(all(passes[: n + 1])) for n in range(num_proposed))
        draft_s = 0.0
        if num_asked and not (self.drafts_itself or self.by_target):
            draft_s = wire_s + self._noisy(num_proposed * self.draft_s) + self.stall(self.random)
        if draft_s > length.draft_budget_s:
            draft_s, num_asked, survival = length.draft_budget_s, 0, ()
        target_s = self._noisy(self.verify(1 + len(survival)))
        next_draft_s = self.draft_s * self.num_beside
        waits = draft_s or is_first or (self.by_target and not self.ran_ahead)
        self.now += draft_s + target_s + next_draft_s + (wire_s if waits else 0.0)
        num_tokens = 1 + int(sum(survival))
        control.note(
            RoundResult(
                num_asked,
                survival,
                num_tokens,
                100,
                draft_s,
                target_s,
                self.now,
                beside=beside,
                next_draft_s=next_draft_s,
                work_s=max(0.0, draft_s - wire_s) if num_asked else 0.0,
                ran_ahead=self.ran_ahead,
            )
        )
        return num_tokens

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.2, self.random.gauss(1.0, self.noise))


@dataclass(frozen=True)
class Run:
    """Rounds that were played."""

    lengths: list[RoundLength]
    num_tokens: list[int]
    seconds: float
    num_ahead: int = 0
    """Number of rounds that ran ahead."""

    @property
    def asked(self) -> list[int]:
        return [length.num_draft_tokens for length in self.lengths]

    @property
    def rate(self) -> float:
        return sum(self.num_tokens) / self.seconds

    @property
    def plain_share(self) -> float:
        return self.asked.count(0) / len(self.asked)
