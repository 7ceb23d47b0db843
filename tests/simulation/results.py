"""What seeds came to, one or many: added up, and told in two lines.

Whether tokens that were drawn under token and block are the target's says Pearson's chi-square: the
toy target's likeliest token, second, ... have the same probabilities behind every prefix, so ranks
are independent draws from one law, whatever happened. Each is counted by the rank before it as
well, which shows draws that depend on one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from scipy.stats import chi2

from outrider.errors import check
from outrider.request import GenerateRequest
from outrider.speculation.sampling_params import SamplingParams
from tests.simulation.toy import ranked_law, ranks_of, rule_of

P_VALUE_MIN = 1e-6
"""Of a chi-square, two in a run: the probability of a false alarm."""
_NUMBERS = (
    "num_seeds", "num_failed", "num_tokens", "num_sessions", "num_moves", "num_lost",
)  # fmt: skip


Cell = tuple[str, int, int, int]
"""(rule, how many ranks are possible, rank of the token before or -1, rank)."""


@dataclass
class Result:
    faults: Counter[str] = field(default_factory=Counter)
    num_seeds: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_sessions: int = 0
    num_moves: int = 0
    num_lost: int = 0
    """Sessions that ended with what Redis lost, and were asked for again."""
    ranks: Counter[Cell] = field(default_factory=Counter)

    def merge(self, other: Result) -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults += other.faults
        self.ranks += other.ranks

    def count(self, request: GenerateRequest, shown: Sequence[int]) -> None:
        """The tokens of one session. Raises `InvariantError` for one that is impossible."""
        law = ranked_law(request.sampling)
        ranks = ranks_of(request, shown)
        check(all(rank < len(law) for rank in ranks), "an impossible token was shown")
        rule, num = rule_of(request).value, len(law)
        for before, rank in pairwise((-1, *ranks)):
            self.ranks[rule, num, before, rank] += 1

    def p_values(self) -> dict[str, float]:
        """By rule: the probability that a right one looks as wrong as this, or more so."""
        found = {}
        for rule in sorted({cell[0] for cell in self.ranks}):
            statistic, freedom = 0.0, 0
            groups = {cell[1:3] for cell in self.ranks if cell[0] == rule}
            for num, before in groups:
                seen = [self.ranks[rule, num, before, rank] for rank in range(num)]
                law = ranked_law(SamplingParams(temperature=1.0, top_k=num))
                expected = [sum(seen) * p for p in law]
                if min(expected) < 5:
                    continue
                statistic += sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
                freedom += num - 1
            found[rule] = float(chi2.sf(statistic, freedom)) if freedom else 1.0
        return found

    @property
    def is_good(self) -> bool:
        """Whether no seed failed, and the drawn tokens are the target's."""
        return not self.num_failed and min(self.p_values().values(), default=1.0) > P_VALUE_MIN

    def lines(self) -> list[str]:
        faults = " ".join(f"{kind}={count}" for kind, count in sorted(self.faults.items()))
        chi_squares = " ".join(f"{rule}: p={p:.3g}" for rule, p in self.p_values().items())
        return [
            f"chi-square of {self.ranks.total()} drawn tokens {{{chi_squares}}}",
            f"seeds={self.num_seeds} failed={self.num_failed} faults{{{faults}}} "
            f"tokens={self.num_tokens} sessions={self.num_sessions} lost={self.num_lost} "
            f"sessions_moved={self.num_moves}",
        ]
