"""What choosing lengths brings over recorded rounds: run as a script, it replays them
(`round_replay.py`) under length control and under each fixed K, and prints their speed as a
multiple of plain decoding's.

A run is that of a deployment that has just begun. `later` are sessions that come after others."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from round_replay import Machine, Played, Proposed, Recording, Replay, recorded

from coordinator.draft_length.controller import LengthControls
from coordinator.draft_length.policy import FixedLength, LengthPolicy
from outrider.engine.step_costs import StepCosts
from outrider.messages import ReplicaDescription
from outrider.speculation.sampling_params import Rule

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


def _print(rule: Rule, sessions: Sequence[Recording], concurrency: int, repetitions: int) -> None:
    shuffled = [random.Random(seed).sample(sessions, len(sessions)) for seed in range(repetitions)]
    sides: dict[str, list[Played]] = {}
    for num in (0, 1, 2, 4, BOUND):
        sides[f"K = {num}"] = [
            one for run in shuffled for one in play(run, fixed(num), concurrency)
        ]
    for tables in TABLES:
        sides[f"control, {tables}"] = [
            one for run in shuffled for one in play(run, controlled(rule, tables), concurrency)
        ]
    later = [one for run in shuffled for one in run]
    sides["control, later"] = play(later, controlled(rule), concurrency)[len(sessions) :]
    categories = [None, *dict.fromkeys(one.category for one in sessions)]
    print(f"{'':30}" + "".join(f"{category or 'all':>16}" for category in categories))
    for side, played in sides.items():
        row = f"{side:30}"
        for category in categories:
            found, plain = speed(played, category), speed(sides["K = 0"], category)
            ratio = found.tokens_per_second / plain.tokens_per_second
            row += f"{ratio:8.3f} ({found.plain_share:4.0%}) "
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=8)
    arguments = parser.parse_args()
    sessions = recorded("greedy")
    for name, chosen in (
        ("as recorded, and two halves of different ones", [*sessions, *halved(sessions)]),
        ("a worse draft", spoiled(sessions)),
        ("temperature 1", recorded("token")),
    ):
        print(f"{name}, {arguments.concurrency} at a time")
        _print(Rule.GREEDY, chosen, arguments.concurrency, arguments.repetitions)


if __name__ == "__main__":
    main()
