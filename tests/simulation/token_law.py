"""Whether tokens that were drawn under token and block are the target's: Pearson's chi-square.

The toy target's likeliest token, second, ... have the same probabilities behind every prefix. So
ranks are independent draws from one law, whatever happened, and each is counted by the rank before
it as well, which shows draws that depend on one another.
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

Cell = tuple[str, int, int, int]
"""(rule, how many ranks are possible, rank of the token before or -1, rank)."""


@dataclass
class RankCounts:
    """How often each rank was committed."""

    counts: Counter[Cell] = field(default_factory=Counter)

    def add(self, request: GenerateRequest, shown: Sequence[int]) -> None:
        """The tokens of one session. Raises `InvariantError` for one that is impossible."""
        law = ranked_law(request.sampling)
        ranks = ranks_of(request, shown)
        check(all(rank < len(law) for rank in ranks), "an impossible token was shown")
        rule, num = rule_of(request).value, len(law)
        for before, rank in pairwise((-1, *ranks)):
            self.counts[rule, num, before, rank] += 1

    def merge(self, other: RankCounts) -> None:
        self.counts += other.counts

    def p_values(self) -> dict[str, float]:
        """By rule: the probability that a right one looks as wrong as this, or more so."""
        found = {}
        for rule in sorted({cell[0] for cell in self.counts}):
            statistic, freedom = 0.0, 0
            groups = {cell[1:3] for cell in self.counts if cell[0] == rule}
            for num, before in groups:
                seen = [self.counts[rule, num, before, rank] for rank in range(num)]
                law = ranked_law(SamplingParams(temperature=1.0, top_k=num))
                expected = [sum(seen) * p for p in law]
                if min(expected) < 5:
                    continue
                statistic += sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
                freedom += num - 1
            found[rule] = float(chi2.sf(statistic, freedom)) if freedom else 1.0
        return found
