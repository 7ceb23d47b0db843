"""What is simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from outrider.errors import check
from outrider.limits import BATCHED_TOKENS_DEFAULT, SESSIONS_PER_COORDINATOR_MAX, SILENT_DRAFT_S
from outrider.planning.round_times import ServiceTimes
from outrider.registry.registry import Role

COORDINATOR_S: Final = 0.00029
"""Of a coordinator's one thread for a round, as `outrider bench capacity` measures it."""
DRAFT_TIMEOUT_S: Final = 1.0 + SILENT_DRAFT_S
"""By default: `--draft-timeout-ms`, and what a silent draft is waited for beyond that."""
SECONDS: Final = 60.0
WARM_UP_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Replicas of each role."""

    targets: int
    drafts: int
    coordinators: int = 1

    def of(self, role: Role) -> int:
        """How many of one role."""
        return {"target": self.targets, "draft": self.drafts}.get(role, self.coordinators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of the fleet; exactly one of `sessions` and `rate`."""

    sessions: int | None = None
    """That run at any time: where one ends the next one begins."""
    rate: float | None = None
    """Requests a second that begin whatever runs (a Poisson process)."""
    prompt_tokens: int = 64
    answer_tokens: float = 256.0
    """Mean; each token may be the last with the same chance. `inf` = nothing ends."""

    def __post_init__(self) -> None:
        check((self.sessions is None) != (self.rate is None), "sessions or a rate")
        check((self.sessions or 0) >= 0 and (self.rate or 0) >= 0, "a load is never negative")
        check(self.prompt_tokens > 0 and self.answer_tokens >= 1, "lengths are at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What rounds propose, and how much of it is accepted."""

    survival: tuple[float, ...]
    """[K]: the chance that 1, 2, ... K draft tokens or more are accepted; empty = plain."""
    num_proposed: float
    """Draft tokens a round, mean: fewer than K where a look-up finds nothing."""
    num_steps: float
    """Of the draft's model for a round, mean."""
    look_ahead: int = 0
    """Outcomes of each round worked out ahead."""
    hit_rate: float = 0.0
    """Share of the rounds whose outcome is among these."""

    def __post_init__(self) -> None:
        falling = pairwise((1.0, *self.survival, 0.0))
        check(all(a >= b - 1e-12 for a, b in falling), "a survival starts from 1 and never grows")
        check(0 <= self.num_proposed <= len(self.survival), "at most K are proposed")
        check(0 <= self.hit_rate <= 1, "a hit rate is a share")

    @classmethod
    def of(cls, survival: tuple[float, ...]) -> Drafting:
        """A model that draws all K tokens in every round."""
        num = float(len(survival))
        return cls(survival=survival, num_proposed=num, num_steps=num)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return not self.survival

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens, mean."""
        return 1.0 + sum(self.survival)


@dataclass(frozen=True, slots=True)
class Loss:
    """One replica of a role that goes without a word, and may come back with nothing held."""

    role: Role
    at_s: float
    """Since measuring began."""
    back_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet, what is asked of it, and what its parts take."""

    fleet: FleetSize
    demand: Demand
    drafting: Drafting
    times: ServiceTimes
    """Of a target and of a draft that do not share a device; `max_num_seqs` sessions share a step
    of the draft."""
    target_max_num_seqs: int | None = None
    """The same of a target; None = as many as of the draft."""
    round_trip_s: float = 0.0
    """Between coordinators and drafts, beside what messages take on one machine."""
    coordinator_s: float = COORDINATOR_S
    """Of a coordinator's one thread for a round."""
    max_num_batched_tokens: int = BATCHED_TOKENS_DEFAULT
    """Tokens of a step."""
    draft_timeout_s: float = DRAFT_TIMEOUT_S
    """What a draft that has gone is waited for before a round goes on without it."""
    sessions_max: int = SESSIONS_PER_COORDINATOR_MAX
    """Of one coordinator; more are refused."""
    losses: tuple[Loss, ...] = ()
    warm_up_s: float = WARM_UP_S
    """Before measuring begins ..."""
    seconds: float = SECONDS
    """... for so long."""
    seed: int = 0

    def __post_init__(self) -> None:
        fleet = self.fleet
        check(fleet.targets > 0 and fleet.coordinators > 0, "a fleet has targets and coordinators")
        check(fleet.drafts > 0 or self.drafting.is_plain, "whoever drafts has drafts")
        check(self.seconds > 0 and self.warm_up_s >= 0, "times are positive")
        check(self.round_trip_s >= 0 and self.coordinator_s >= 0, "times are never negative")
        check(all(0 <= loss.at_s < loss.back_s for loss in self.losses), "back comes after lost")

    @property
    def target_seats(self) -> int:
        """Sessions that share a step of a target."""
        return self.target_max_num_seqs or self.times.max_num_seqs
