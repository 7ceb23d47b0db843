"""What `bench emulate` can be asked to emulate, and how it decodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from outrider.config import EMULATED
from outrider.speculation.sampling_params import Rule

from .emulate_pair import PairLaw

RULES: Final = (Rule.TOKEN, Rule.COUPLED)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode."""

    name: str
    drafts: bool
    """Whether K is above 0."""
    looks_ahead: bool = False
    """Whether the draft works while the target verifies."""


PLAIN: Final = Mode("plain", drafts=False)
"""By the target alone, which runs ahead of the coordinator's answers."""
SYNCHRONOUS: Final = Mode("synchronous", drafts=True)
"""Draft and target wait for each other."""
LOOK_AHEAD: Final = Mode("look_ahead", drafts=True, looks_ahead=True)
"""The draft works on likely outcomes while the target verifies."""
MODES: Final = (PLAIN, SYNCHRONOUS, LOOK_AHEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a pair; names and meaning are those of `EmulatedSpec`."""

    verify_ms: float
    verify_tokens: int
    draft_ms: float
    draft_branches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A pair of models; all but what is said here means what it does in `EmulatedSpec`."""

    name: str
    vocab_size: int
    support: int
    exponent: float
    order: int
    acceptance: float
    """E[sum min(p, q)], for which the deviation of the draft is solved."""
    steps: Steps
    num_draft_tokens_max: int
    """K is at most this."""
    round_trip_ms: float
    """Added between coordinator and draft in the second part."""


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="70b-1b",
            vocab_size=32_000,
            support=64,
            exponent=1.706,
            order=3,
            acceptance=0.80,
            steps=Steps(verify_ms=18.3, verify_tokens=16, draft_ms=1.3, draft_branches=64),
            num_draft_tokens_max=14,
            round_trip_ms=5.0,
        ),
    )
}
"""By name."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two emulated models of a scenario."""

    scenario: Scenario
    deviation: float
    """Of log q - log p."""
    acceptance: dict[Rule, float]
    """Of each draft token whose predecessors were accepted."""

    @classmethod
    def of(cls, scenario: Scenario) -> Pair:
        """Solves the deviation."""
        law = PairLaw(scenario.support, scenario.exponent)
        deviation = law.solve_deviation(scenario.acceptance)
        return cls(scenario, deviation, {rule: law.acceptance(deviation, rule) for rule in RULES})

    @property
    def engine(self) -> str:
        """The `engine` setting of both replicas."""
        scenario = self.scenario
        values = {
            name: getattr(scenario, name) for name in ("vocab_size", "support", "exponent", "order")
        }
        values |= {"deviation": self.deviation, **asdict(scenario.steps)}
        return EMULATED + ",".join(f"{key}={value}" for key, value in values.items())
