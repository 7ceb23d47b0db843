"""Length control chooses trees where rows cost little, and chains where they do not."""

from __future__ import annotations

import random

import pytest

from coordinator.draft_length.acceptance import sibling_chances
from coordinator.draft_length.controller import LengthControl, LengthControls
from coordinator.draft_length.policy import PlayedRound, RoundLength
from outrider.engine.step_costs import StepCosts
from outrider.messages import ReplicaDescription
from outrider.speculation.proposal import caterpillar_tree, draft_tree
from outrider.speculation.sampling_params import Rule

BOUND = 4
VERIFY_S = 0.02
DRAFT_S = 0.002
ACCEPTED = 0.5
TAKEN = (0.4, 0.3, 0.2, 0.1)


def description(costs: StepCosts) -> ReplicaDescription:
    return ReplicaDescription("m", "", "", 100, "float32", 0, (), 64, costs)


def controls(row_s: float) -> LengthControls:
    target = StepCosts((1, 65), (VERIFY_S, VERIFY_S + 64 * row_s))
    return LengthControls(description(target), description(StepCosts((1,), (DRAFT_S,))), 8)


def play(
    control: LengthControl,
    row_s: float,
    taken: tuple[float, ...] = TAKEN,
    num_rounds: int = 60,
    others: int = 0,
) -> list[RoundLength]:
    """Rounds whose verdicts are these chances; the lengths that were chosen."""
    dice, now, chosen = random.Random(1), 0.0, []
    for index in range(num_rounds):
        length = control.choose(index, 10**6)
        chosen.append(length)
        num, siblings = length.num_draft_tokens, length.siblings
        counts = [siblings[d] if d < len(siblings) else 0 for d in range(num)]
        tree = draft_tree(caterpillar_tree(counts), num + sum(counts))
        accept = [
            ACCEPTED if tree.ranks[i] == 0 else taken[tree.ranks[i] - 1]
            for i in range(len(tree.parents))
        ]
        passed = 0
        while passed < num and dice.random() < ACCEPTED:
            passed += 1
        target_s = VERIFY_S + row_s * (1 + others) * (num + sum(counts))
        draft_s = DRAFT_S * num
        now += target_s + draft_s + 0.001
        control.note(
            PlayedRound(
                num_asked=num,
                survival=tuple(ACCEPTED ** (d + 1) for d in range(num)),
                num_tokens=1 + passed,
                context=100 + index,
                draft_s=draft_s,
                target_s=target_s,
                ended_at=now,
                num_siblings=sum(counts),
                siblings=sibling_chances(tree, accept, siblings),
            )
        )
    return chosen


@pytest.mark.parametrize(("row_s", "is_tree"), [(0.0, True), (0.007, False)])
def test_siblings_are_asked_for_where_rows_cost_little(row_s: float, is_tree: bool) -> None:
    control = controls(row_s).open(Rule.TOKEN, 1, BOUND, 100, siblings_max=4)
    last = play(control, row_s)[-20:]
    drafted = [length for length in last if length.num_draft_tokens > 0]
    assert drafted
    assert all(bool(length.siblings) is is_tree for length in drafted)
    if is_tree:
        assert all(len(length.siblings) <= length.num_draft_tokens for length in drafted)
        assert max(max(length.siblings) for length in drafted) == 4


def test_siblings_that_are_never_taken_are_given_up() -> None:
    """But for a few now and then: the text may have become another one."""
    row_s = 0.0003
    control = controls(row_s).open(Rule.TOKEN, 1, BOUND, 100, siblings_max=4)
    chosen = play(control, row_s, (0.0,) * 4, 300)
    assert sum(map(sum, (length.siblings for length in chosen[1:6]))) >= 10
    assert 0 < sum(map(sum, (length.siblings for length in chosen[-100:]))) < 50


def test_many_sessions_at_the_target_make_proposals_chains() -> None:
    """What a row costs all of them is more than what it brings to one."""
    row_s = 0.001
    alone = controls(row_s)
    one = play(alone.open(Rule.TOKEN, 1, BOUND, 100, siblings_max=4), row_s)
    assert any(length.siblings for length in one[-20:])
    busy = controls(row_s)
    sessions = [busy.open(Rule.TOKEN, seed, BOUND, 100, siblings_max=4) for seed in range(16)]
    chosen = [play(session, row_s, others=15)[-10:] for session in sessions]
    assert not any(length.siblings for lengths in chosen[8:] for length in lengths)
