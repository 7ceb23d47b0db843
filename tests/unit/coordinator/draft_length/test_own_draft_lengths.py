"""Lengths of rounds whose proposals the target drafts itself, on a made-up clock."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from session_links import context_of, session
from virtual_time import virtually

from coordinator.decoding.loop import Decoding
from coordinator.draft_length.controller import LengthControls
from coordinator.draft_length.policy import DraftedBeside, PlayedRound
from coordinator.routing.drafts import Drafted
from outrider.engine.step_costs import StepCosts
from outrider.messages import ReplicaDescription, ReplyKey, VerdictReply
from outrider.speculation.accept_reject import Verdict, decide
from outrider.speculation.proposal import NOTHING_SEALED
from outrider.speculation.sampling_params import Rule

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
    for number in range(rounds // 200):
        control, drafted = one.open(Rule.COUPLED, number, BOUND, 100), 0
        for index in range(200):
            length = control.choose(index, ENDLESS)
            num = min(length.num_draft_tokens, drafted)
            accepted = 0
            while accepted < num and rng.random() < acceptance:
                accepted += 1
            target_s, next_s = 0.016 + 0.0015 * num, draft_s * length.next_max
            now += target_s + next_s
            survival = tuple(float(depth < accepted) for depth in range(num))
            beside = (
                DraftedBeside(drafted, draft_s * drafted, draft_s * drafted) if drafted else None
            )
            control.note(
                PlayedRound(
                    num, survival, 1 + accepted, 100 + index, 0.0, target_s, now,
                    beside=beside, next_draft_s=next_s,
                )
            )  # fmt: skip
            drafted = length.next_max
            if 400 * number >= rounds:
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


@virtually
async def test_drafting_beside_a_verdict_is_no_time_of_the_verdict() -> None:
    """What the target took for the next proposal is told apart from its step, and what this
    round's took comes with it."""
    notes: list[PlayedRound] = []

    class Lengths:
        def note(self, played: PlayedRound) -> None:
            notes.append(played)

    parts: Any = dict.fromkeys(("completion", "draft", "committer", "meter"))
    parts["target"] = SimpleNamespace(verified=NOTHING_SEALED)
    lengths: Any = Lengths()
    decoding = Decoding(context_of(session()), lengths=lengths, length_max=99, **parts)
    reply = VerdictReply(
        ReplyKey("0" * 32, 1, 0), Verdict((), (9,)), 4,
        queue_ms=5.0, compute_ms=40.0, next_draft_ms=10.0, next_work_ms=5.0,
    )  # fmt: skip
    beside = DraftedBeside(3, 0.02, 0.01)
    drafted = Drafted(NOTHING_SEALED, "local", 0.0, 2, beside=beside)
    decoding._note(drafted, reply, decide(reply.verdict, (), Rule.GREEDY, ()))
    [played] = notes
    assert played.target_s == pytest.approx(0.035)
    assert played.next_draft_s == pytest.approx(0.01)
    assert played.beside == DraftedBeside(3, 0.02, 0.01)
