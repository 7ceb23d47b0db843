"""The coordinator's own choice of lengths as a controller of many sequences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from core_rounds import K_MAX, PROMPT_LENGTH, Plan, Seen

from coordinator.draft_length.controller import LengthControl, LengthControls, Tuning
from coordinator.draft_length.policy import PlayedRound, RoundLength
from outrider.messages import ReplicaDescription
from outrider.speculation.accept_reject import survival
from outrider.speculation.sampling_params import Rule

NERVOUS = Tuning(
    memory_rounds=1.5,
    shared_memory_rounds=8.0,
    prior_rounds=0.2,
    shared_prior_rounds=1.0,
    first_looks=0,
    young_rounds=0,
    choice_rounds=1,
    switch_gain=0.0,
    plain_gain=0.0,
    plain_rounds=1,
    plain_rounds_max=2,
    credit_tokens=0.0,
    trial_share=0.0,
)
"""Chooses again each round, by little more than the last one: what a round showed decides the next
one's length, and nothing is left to averages."""
ENDLESS = 10**9


@dataclass(frozen=True)
class Times:
    """What rounds are said to take, s."""

    target_s: float = 1.0
    draft_s: float = 0.15
    """A draft token."""
    stall_s: float = 0.0
    """More where the slot behind the one that was corrected has a high uniform or drafted token 2:
    times may depend on all that was seen, too."""


TELLING = Times(draft_s=0.05, stall_s=2.0)
"""Long enough to decide the next length by themselves."""


class ChosenLate(LengthControl):
    """A fault: the length of a round is chosen when it begins, and not with the round before."""

    def choose(self, index: int, num_left: int) -> RoundLength:
        """See `LengthPolicy.choose`."""
        if self._current is not None:
            self._next = self._plan()
        return super().choose(index, num_left)


class ChosenLengths:
    """A `Controller`: one `LengthControl` a sequence, all of one coordinator, or each of its own,
    whose times are then this sequence's. Their first rounds, which run the prompt, are over."""

    def __init__(self, rule: Rule, seeds: np.ndarray, times: Times, *, together: bool) -> None:
        description = ReplicaDescription("m", "", "", 3, "float64", 0, (), 64)
        controls = LengthControls(description, description, 2, NERVOUS)
        self.counts: Counter[int] = Counter()
        """How often each K was chosen."""
        self._rule = rule
        self._times = times
        self._sessions: list[LengthControl] = []
        for seed in seeds.tolist():
            if not together:
                controls = LengthControls(description, description, 2, NERVOUS)
            self._sessions.append(controls.open(rule, seed, K_MAX, PROMPT_LENGTH))
        self._now = [0.0] * len(seeds)
        self._asked = [0] * len(seeds)
        for session in self._sessions:
            session.choose(0, ENDLESS)
            session.note(PlayedRound(0, (), 1, PROMPT_LENGTH, 0.0, times.target_s, 0.0))

    def __call__(self, seen: Seen) -> Plan:
        """K of every sequence's next round; the fair drafter."""
        if seen.round > 0:
            self._note(seen)
        for row, session in enumerate(self._sessions):
            self._asked[row] = session.choose(seen.round + 1, ENDLESS).num_draft_tokens
        self.counts.update(self._asked)
        return torch.tensor(self._asked), torch.zeros(len(self._asked), dtype=torch.int64)

    def _note(self, seen: Seen) -> None:
        stalls = (seen.thrown_away(seen.uniforms) > 0.5) | (seen.thrown_away(seen.drafted) == 2)
        rows = zip(
            self._sessions,
            seen.num_accepted.tolist(),
            seen.accept.tolist(),
            stalls.tolist(),
            strict=True,
        )
        for row, (session, accepted, accept, stall) in enumerate(rows):
            self._note_one(row, session, accepted, accept, stall)

    def _note_one(
        self, row: int, session: LengthControl, accepted: int, accept: list[float], stall: bool
    ) -> None:
        asked = self._asked[row]
        draft_s = asked * self._times.draft_s + self._times.stall_s * stall
        self._now[row] += draft_s + self._times.target_s
        session.note(
            PlayedRound(
                num_asked=asked,
                survival=survival(self._rule, accept[:asked]),
                num_tokens=accepted + 1,
                context=PROMPT_LENGTH,
                draft_s=draft_s,
                target_s=self._times.target_s,
                ended_at=self._now[row],
            )
        )
