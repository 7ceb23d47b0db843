"""Length control over recorded rounds of the demo pair (`hybrid:suffix,demo-drafter`), with its
times on two slow cores. `recorded_rounds.json` has, by rule, sessions with prompts of Spec-Bench:
category, prompt length, committed tokens, and rounds with the longest proposals. Each round has the
steps of the draft's model and then, in percent, the chances that the first, the first two, ...
tokens are accepted."""

import json
import random
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest

from coordinator.draft_length.controller import LengthControl, LengthControls
from coordinator.draft_length.policy import RoundResult
from outrider.interfaces.step_costs import StepCosts
from outrider.speculation.sampling_params import Rule
from tests.support.length_world import BOUND, RUN_AHEAD, description

TARGET = StepCosts((1, 2, 3, 9, 17, 80), (0.0448, 0.0465, 0.048, 0.0537, 0.064, 0.130))
DRAFT = StepCosts((1, 16, 256), (0.0134, 0.017, 0.060))
WIRE_S = 0.0035
TABLES = {
    "true": (TARGET, DRAFT),
    "the draft looks slow": (TARGET, StepCosts((1, 16, 256), (0.04, 0.05, 0.18))),
    "rows look dear": (StepCosts((1, 3, 9, 80), (0.0448, 0.068, 0.13, 0.8)), DRAFT),
}
"""The engines' tables, which may have been measured at a bad time."""
SHUFFLES = 16

Policies = Callable[[int], LengthControl]
"""By a prompt's length."""


def fixed(num_draft_tokens: int) -> Policies:
    controls = LengthControls(description(TARGET), description(DRAFT), RUN_AHEAD, adapts=False)
    return lambda prompt_length: controls.open(Rule.GREEDY, 1, num_draft_tokens, prompt_length)


def controlled(rule: Rule, tables: str = "true") -> Policies:
    target, draft = (description(costs) for costs in TABLES[tables])
    controls, seeds = LengthControls(target, draft, RUN_AHEAD), count()
    return lambda prompt_length: controls.open(rule, next(seeds), BOUND, prompt_length)


def speed(sessions: list[Any], policies: Callable[[], Policies]) -> float:
    """Tokens per second of a new deployment, over several orders of these sessions."""
    num_tokens = seconds = 0.0
    for seed in range(SHUFFLES):
        rng, opened = random.Random(seed), policies()
        for _, prompt_length, num, rounds in rng.sample(sessions, len(sessions)):
            num_tokens += num
            seconds += play(opened(prompt_length), prompt_length, num, rounds, rng)
    return num_tokens / seconds


def play(
    policy: LengthControl, prompt_length: int, num_max: int, rounds: Any, rng: random.Random
) -> float:
    """Seconds of a session. The next recorded round at a position says what is proposed."""
    starts = [0, *accumulate(1 + round(sum(percent) / 100) for _, *percent in rounds)]
    unread = prompt_length if policy.plans_plain else 0
    now, position, index, sure_until = 0.0, 0, 0, -1
    while position < num_max:
        length = policy.choose(num_max - position)
        num, draft_s, survival = length.num_draft_tokens, 0.0, ()
        wire_s = 0.0 if index <= sure_until else WIRE_S  # The target has run ahead.
        if num > 0:
            place = bisect_left(starts, position % starts[-1]) % len(rounds)
            num_drawn, *percent = rounds[place]
            survival = tuple(one / 100 for one in percent[:num])
            rows = [1 + unread, *(1,) * (num - 1)][: min(num, num_drawn)]
            draft_s = WIRE_S + sum(map(DRAFT.step_seconds, rows)) * rng.gauss(1.0, 0.05)
            unread = 0 if rows else unread
        sure_until = index + length.run_ahead
        step_s = TARGET.step_seconds(1 + len(survival), 1, prompt_length + position)
        target_s = step_s * rng.gauss(1.0, 0.05)
        now += draft_s + target_s + wire_s
        chance = rng.random()
        num_tokens = min(1 + sum(chance < one for one in survival), num_max - position)
        context = prompt_length + position
        policy.note(RoundResult(num, survival, num_tokens, context, draft_s, target_s, now))
        position, index = position + num_tokens, index + 1
        unread += num_tokens if num == 0 else 0
    policy.close()
    return now


def recorded(rule: str) -> list[Any]:
    path = Path(__file__).parents[3] / "support" / "recorded_rounds.json"
    return list(json.loads(path.read_text())[rule])


def halved() -> list[Any]:
    """Sessions that begin like one of those recorded and continue like another one."""
    sessions = recorded("greedy")
    others = sessions[len(sessions) // 2 :] + sessions[: len(sessions) // 2]
    return [
        [*one[:3], one[3][: len(one[3]) // 2] + other[3][: len(other[3]) // 2]]
        for one, other in zip(sessions, others, strict=True)
    ]


def spoiled() -> list[Any]:
    """A worse draft: only its first tokens are accepted, in six of ten cases."""
    rng = random.Random(1)

    def once(num_drawn: int, *percent: int) -> list[int]:
        return [num_drawn, *(n * (i == 0 and rng.random() < 0.6) for i, n in enumerate(percent))]

    return [
        [*one, [once(*numbers) for numbers in rounds]] for *one, rounds in 2 * recorded("greedy")
    ]


@pytest.mark.parametrize(
    ("name", "tables", "of_plain", "of_drafted"),
    [
        ("greedy", "true", 1.15, 0.98),
        ("greedy", "the draft looks slow", 1.15, 0.98),
        ("greedy", "rows look dear", 1.15, 0.98),
        ("token", "true", 0.97, 1.0),
        ("halved", "true", 1.0, 0.98),
        ("spoiled", "true", 0.965, 1.0),
    ],
)
def test_a_new_deployment_finds_what_is_faster(
    name: str, tables: str, of_plain: float, of_drafted: float
) -> None:
    """About as fast as plain decoding and as K = 8, whatever the tables say."""
    sessions = {"halved": halved, "spoiled": spoiled}.get(name, lambda: recorded(name))()
    rule = Rule.TOKEN if name == "token" else Rule.GREEDY
    found = speed(sessions, lambda: controlled(rule, tables))
    plain, drafted = speed(sessions, lambda: fixed(0)), speed(sessions, lambda: fixed(BOUND))
    assert found > of_plain * plain
    assert found > of_drafted * drafted
