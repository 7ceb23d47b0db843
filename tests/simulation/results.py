"""What seeds came to, one or many: added up, kept in files, told in a line."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.token_law import RankCounts

P_VALUE_MIN = 1e-6
"""Of a chi-square, two in a run: the probability of a false alarm."""
_NUMBERS = (
    "num_seeds", "num_failed", "num_tokens", "num_sessions", "num_moves", "num_lost",
)  # fmt: skip


@dataclass
class Result:
    """What seeds came to."""

    faults: Counter[str] = field(default_factory=Counter)
    num_seeds: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    """That were shown."""
    num_sessions: int = 0
    num_moves: int = 0
    """Of sessions to another replica."""
    num_lost: int = 0
    """Sessions that ended with what Redis lost, and were asked for again."""
    ranks: RankCounts = field(default_factory=RankCounts)

    def merge(self, other: Result) -> None:
        """Adds another's."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults += other.faults
        self.ranks.merge(other.ranks)

    @property
    def is_good(self) -> bool:
        """Whether no seed failed, and the drawn tokens are the target's."""
        return not self.num_failed and min(self.p_values.values(), default=1.0) > P_VALUE_MIN

    @property
    def p_values(self) -> dict[str, float]:
        """See `RankCounts.p_values`."""
        return self.ranks.p_values()

    def lines(self) -> list[str]:
        """For people."""
        faults = " ".join(f"{kind}={count}" for kind, count in sorted(self.faults.items()))
        chi_squares = " ".join(f"{rule}: p={p:.3g}" for rule, p in self.p_values.items())
        return [
            f"chi-square of {self.ranks.counts.total()} drawn tokens {{{chi_squares}}}",
            f"seeds={self.num_seeds} failed={self.num_failed} faults{{{faults}}} "
            f"tokens={self.num_tokens} sessions={self.num_sessions} lost={self.num_lost} "
            f"sessions_moved={self.num_moves}",
        ]

    def save(self, path: Path) -> None:
        """As JSON."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        ranks = [[*cell, count] for cell, count in sorted(self.ranks.counts.items())]
        path.write_text(json.dumps({**numbers, "faults": self.faults, "ranks": ranks}))

    @classmethod
    def load(cls, path: Path) -> Result:
        """What `save` has kept."""
        kept = json.loads(path.read_text())
        counts = Counter({(rule, *cell): count for rule, *cell, count in kept["ranks"]})
        return cls(
            faults=Counter(kept["faults"]),
            ranks=RankCounts(counts),  # type: ignore[arg-type]
            **{name: kept[name] for name in _NUMBERS},
        )
