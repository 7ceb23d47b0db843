"""Draws that nobody looks at in between, against those that are made one after another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.errors import InvariantError
from outrider.limits import SEED_MAX
from outrider.speculation.draft_sampling import (
    DeviceDraws,
    DraftedToken,
    Drawing,
    can_draw,
    draw_from_logits,
)
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(min_p=0.05, top_k=40, top_p=0.6),
    SamplingParams(top_p=1e-9),
    SamplingParams(temperature=0.0),
)
NUM_DEPTHS = 3


def draw(
    logits: torch.Tensor,
    drawings: list[Drawing],
    entries_max: int,
    num_rows: int,
    vocabulary: DraftVocabulary | None = None,
) -> list[list[DraftedToken]]:
    """Of logits [K, S, V] the tokens of each session, drawn beside rows that nobody wants."""
    draws = DeviceDraws(drawings, len(logits), entries_max, vocabulary)
    words = torch.from_numpy(draws.words(num_rows)).to(logits.device)
    padding = logits.new_zeros((num_rows - len(drawings), logits.shape[2]))
    rows = [
        draws.draw(torch.cat([each, padding]), words, depth).cpu().numpy()
        for depth, each in enumerate(logits)
    ]
    return [[draws.read(row[i], i) for row in rows] for i in range(len(drawings))]


@pytest.mark.parametrize("vocab_size", [50, 3_001])
@pytest.mark.parametrize("entries_max", [1, 7, 64])
@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("rules", [tuple(Rule), (Rule.TOKEN,), (Rule.COUPLED,), (Rule.GREEDY,)])
def test_the_same_tokens_and_the_same_q(
    vocab_size: int, entries_max: int, rules: tuple[Rule, ...], is_reduced: bool, device: str
) -> None:
    """Every rule under all sampling parameters, in one batch: token ids and q to the count; also
    where the logits are those of every third token. A sum that rounds differently changes a
    count with a probability under 1e-8."""
    drawings = [
        Drawing(sampling, rule, RoundNoise(SEED_MAX - 7 * i, rule, 1_000 + i))
        for i, (sampling, rule) in enumerate((s, r) for s in SAMPLINGS for r in rules)
    ]
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn((NUM_DEPTHS, len(drawings), vocab_size), generator=generator)
    vocabulary = DraftVocabulary(3 * np.arange(vocab_size) + 2) if is_reduced else None
    found = draw(logits.to(device), drawings, entries_max, len(drawings) + 3, vocabulary)
    for index, drawing in enumerate(drawings):
        for depth in range(NUM_DEPTHS):
            [expected], _ = draw_from_logits(
                logits[depth, index][None], drawing.sampling, [drawing.noise], [depth],
                entries_max, vocabulary=vocabulary,
            )  # fmt: skip
            assert found[index][depth] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers(bad: float) -> None:
    """They are one session's own, and are found when its row is read."""
    logits = torch.zeros((1, 2, 20))
    logits[0, 1, 3] = bad
    drawings = [
        Drawing(SamplingParams(), Rule.TOKEN, RoundNoise(1, Rule.TOKEN, 5)) for _ in range(2)
    ]
    draws = DeviceDraws(drawings, 1, 64)
    rows = draws.draw(logits[0], torch.from_numpy(draws.words(2)), 0).numpy()
    assert draws.read(rows[0], 0)[0] < 20
    with pytest.raises(InvariantError, match="no numbers to sample from"):
        draws.read(rows[1], 1)


def test_what_depends_on_more_than_logits_is_not_drawn_so() -> None:
    assert can_draw(SamplingParams(top_k=3))
    assert not can_draw(SamplingParams(repetition_penalty=1.1))
    assert not can_draw(SamplingParams(logit_bias=((1, 2.0),)))


def test_what_one_vocabulary_recorded_is_not_replayed_for_another() -> None:
    """Though they are as wide: its work reads that one's table."""
    drawings = [Drawing(SamplingParams(), Rule.TOKEN, RoundNoise(1, Rule.TOKEN, 5))]
    one, other = (DraftVocabulary(np.arange(4) + first) for first in (0, 3))
    keys = [DeviceDraws(drawings, 1, 64, each).key for each in (one, one, other, None)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
