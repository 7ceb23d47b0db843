"""Lengths of rounds whose proposals the target drafts itself, on a made-up clock."""

from __future__ import annotations

import random

import pytest

from coordinator.length_control import LengthControls
from coordinator.lengths import DraftedBeside, PlayedRound
from outrider.engine.costs import StepCosts
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling import Rule

BOUND = 8
RUN_AHEAD = 8
ENDLESS = 10**9


def play_own_drafts(draft_s: float, acceptance: float, rounds: int = 2400) -> tuple[float, float]:
    """Tokens a second with a target that takes `draft_s` for each token that it drafts beside the
    verdict before, and at the best K; of sessions of 200 rounds, the later half."""
    table = StepCosts((1, 2, 4, 8, 16), tuple(0.016 + 0.0015 * row for row in (0, 1, 3, 7, 15)))
    description = ReplicaDescription("m", "", "", 100, "float32", 0, (), 64, table, True)
    one, rng, now = LengthControls(description, None, RUN_AHEAD), random.Random(1), 0.0
    tokens = seconds = 0.0
    for session in range(rounds // 200):
        control, drafted = one.open(Rule.COUPLED, session, BOUND, 100), 0
        for index in range(200):
            length = control.choose(index, ENDLESS)
            num = min(length.num_draft_tokens, drafted)
            accepted = 0
            while accepted < num and rng.random() < acceptance:
                accepted += 1
            target_s, next_s = 0.016 + 0.0015 * num, draft_s * length.next_max
            now += target_s + next_s
            survival = tuple(float(depth < accepted) for depth in range(num))
            beside = DraftedBeside(drafted, draft_s * drafted) if drafted else None
            control.note(
                PlayedRound(
                    num, survival, 1 + accepted, 100 + index, 0.0, target_s, now,
                    beside=beside, next_draft_s=next_s,
                )
            )  # fmt: skip
            drafted = length.next_max
            if 400 * session >= rounds:
                tokens, seconds = tokens + 1 + accepted, seconds + target_s + next_s
        control.close()
    best = max(
        sum(acceptance**depth for depth in range(num + 1)) / (0.016 + (0.0015 + draft_s) * num)
        for num in range(BOUND + 1)
    )
    return tokens / seconds, best


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("draft_s", [0.0003, 0.004])
def test_what_a_targets_own_drafts_cost_is_known(draft_s: float, acceptance: float) -> None:
    """Whether they cost next to nothing, as heads, or a quarter of a step each, as first layers."""
    found, best = play_own_drafts(draft_s, acceptance)
    assert found > 0.9 * best
    assert found > 0.97 / 0.016
