"""Scenarios for the planner's simulation of a fleet."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.interfaces.step_costs import StepCosts
from outrider.planner.rounds import Option, ServiceTimes
from outrider.planner.simulation import Pair, Scenario
from outrider.speculation.sampling_params import Rule

TIMES = ServiceTimes(
    target=StepCosts((1, 4096), (0.020, 0.020)), draft=StepCosts((1, 4096), (0.001, 0.001))
)
"""A target's step takes 20 ms and a draft's 1 ms, whatever is in the step."""


def drafting_pair(*survival: float, **way: Any) -> Pair:
    """A pair whose draft model draws all K tokens in every round."""
    num = len(survival)
    known = {"num_draft_tokens": num, "proposed_per_round": num, "steps_per_round": num}
    return Pair(survival=survival, way=Option(rule=Rule.TOKEN, **known | way), times=TIMES)


def scenario_of(
    sessions: int | None = 1,
    targets: int = 1,
    drafts: int = 1,
    pair: Pair | None = None,
    times: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Scenario:
    known = {
        "sessions": sessions,
        "prompt_tokens": 16,
        "answer_tokens": math.inf,
        "coordinator_s": 0.0,
        "warm_up_s": 1.0,
        "seconds": 4.0,
    }
    changed = replace(TIMES, **times or {})
    return Scenario(
        fleet={"target": targets, "draft": drafts, "coordinator": 1},
        pair=replace(pair or drafting_pair(0.0, 0.0, 0.0, 0.0), times=changed),
        **known | changes,
    )
