"""How far a choice depends on the prompts that were asked: a bootstrap over their texts.

As many texts as there are get drawn with replacement, and the choice is made again (the percentile
bootstrap of B. Efron, Bootstrap Methods, Annals of Statistics 7, 1979). Measured times and hit
rates stay as they are, so the intervals say nothing of their errors. With few texts they are too
narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from outrider.errors import check
from outrider.planning.choosing import Choice, Chooser, Option
from outrider.planning.replay import Rounds
from outrider.planning.round_times import Load, ServiceTimes

RESAMPLES: Final = 200
LEVEL: Final = 0.9
"""Share of the resamples that lie in an interval."""
TEXTS_MIN: Final = 2
"""Of fewer there is nothing to draw from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What other prompts of the same kind might have led to."""

    num_texts: int
    num_resamples: int
    level: float
    speedup: tuple[float, float]
    """Of what was chosen, over plain decoding: lowest and highest within the level."""
    num_draft_tokens: tuple[int, int]
    """The K that would be chosen, likewise."""
    same_share: float
    """Share of the resamples that lead to the same rule and K."""


class _Sums:
    """The rounds of texts as rows of numbers, whose sums are rounds again."""

    def __init__(self, parts: Sequence[Rounds]) -> None:
        self._kinds = list(dict.fromkeys(kind for part in parts for kind in part.kinds))
        self._depths = len(parts[0].reached)
        self._rows = np.array(
            [
                [
                    part.num_tokens, part.num_rounds, part.contexts, *part.reached, *part.accepted,
                    *(part.kinds.get(kind, 0.0) for kind in self._kinds),
                ]
                for part in parts
            ]
        )  # fmt: skip

    def of(self, counts: npt.NDArray[np.int64]) -> Rounds:
        """Of each text as many times as `counts` [texts] says."""
        tokens, num_rounds, contexts, *rest = (float(value) for value in counts @ self._rows)
        depths = self._depths
        return Rounds(
            num_texts=int(counts.sum()),
            num_tokens=round(tokens),
            num_rounds=num_rounds,
            contexts=contexts,
            kinds={
                kind: number
                for kind, number in zip(self._kinds, rest[2 * depths :], strict=True)
                if number
            },
            reached=tuple(rest[:depths]),
            accepted=tuple(rest[depths : 2 * depths]),
        )


def spread(
    choice: Choice,
    times: ServiceTimes,
    load: Load,
    prompt_tokens: Sequence[int],
    plain: Sequence[Rounds],
    options: Sequence[Sequence[Rounds]],
    seed: int = 0,
) -> Spread | None:
    """Of a `choice` by `Chooser` for these times and load. `prompt_tokens` and `plain` are by text,
    `options` by option of the choice and text. None of fewer than `TEXTS_MIN` texts."""
    num = len(prompt_tokens)
    check(len(plain) == num and len(options) == len(choice.options), "each option has its texts")
    if num < TEXTS_MIN:
        return None
    generator = np.random.default_rng(seed)
    plain_sums, sums = _Sums(plain), [_Sums(parts) for parts in options]
    speedups, chosen = [], []
    for _ in range(RESAMPLES):
        drawn = generator.integers(num, size=num)
        counts = np.bincount(drawn, minlength=num)
        chooser = Chooser(
            times, load, [prompt_tokens[at] for at in drawn], plain_sums.of(counts),
            choice.plain.rule,
        )  # fmt: skip
        again = [
            chooser.once_more(option, rounds.of(counts))
            for option, rounds in zip(choice.options, sums, strict=True)
        ]
        best = chooser.best(again)
        chosen.append((best.rule, best.num_draft_tokens))
        speedups.append(_like(choice.chosen, [choice.plain, *again]).speedup)
    same = (choice.chosen.rule, choice.chosen.num_draft_tokens)
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    ks = np.quantile([k for _, k in chosen], tails, method="nearest")
    low, high = np.quantile(speedups, tails)
    return Spread(
        num_texts=num,
        num_resamples=RESAMPLES,
        level=LEVEL,
        speedup=(float(low), float(high)),
        num_draft_tokens=(int(ks[0]), int(ks[1])),
        same_share=sum(found == same for found in chosen) / RESAMPLES,
    )


def _like(chosen: Option, options: Sequence[Option]) -> Option:
    return next(
        option
        for option in options
        if (option.rule, option.num_draft_tokens) == (chosen.rule, chosen.num_draft_tokens)
    )
