"""What happens to single messages and calls, drawn from a seed. `faults.py` does greater harm."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

TRAVEL_S = 0.0002
"""Of a message that nothing happens to."""


@dataclass(frozen=True)
class Odds:
    """How often what happens: probabilities per message or call."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    store_failure: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Odds:
        wildness = rng.choice((0.3, 1.0, 2.0))
        return cls(*(share * wildness for share in (0.02, 0.10, 0.05, 0.10, 0.05)))


CALM = Odds()
NOISE = frozenset(("drop", "delay", "duplicate", "reorder", "store"))
"""All kinds of what happens to one of them."""


class Adversary:
    """Draws all harm. `faults` counts what was done."""

    def __init__(self, rng: random.Random, odds: Odds) -> None:
        self.rng = rng
        self.odds = odds
        self.faults: Counter[str] = Counter()

    def travels(self) -> list[float]:
        """How long each copy of a message travels that is sent now: none where it is lost."""
        rng, odds = self.rng, self.odds
        if odds is CALM:
            return [TRAVEL_S]
        if rng.random() < odds.drop:
            self.faults["drop"] += 1
            return []
        travel_s = TRAVEL_S
        if rng.random() < odds.reorder:
            self.faults["reorder"] += 1
            travel_s += rng.uniform(0.0, 0.005)
        if rng.random() < odds.delay:
            self.faults["delay"] += 1
            travel_s += rng.expovariate(1 / 0.1)
        if rng.random() < odds.duplicate:
            self.faults["duplicate"] += 1
            return [travel_s, travel_s + rng.expovariate(1 / 0.05)]
        return [travel_s]

    def call_fails(self) -> bool:
        """Whether this half of a call of the store, its question or its answer, is lost."""
        odds = self.odds
        failed = odds is not CALM and self.rng.random() < odds.store_failure / 2
        if failed:
            self.faults["store"] += 1
        return failed
