"""How often a draft guesses right: rounds that are played, and what is counted of them."""

from __future__ import annotations

import pytest

from benchmarks.hits import (
    FAN_OUTS,
    OUTCOMES,
    GuessedRound,
    HitOptions,
    Way,
    WayFigures,
    render,
    way_figures,
)
from benchmarks.hits_rounds import measure
from outrider.engine.emulated import EmulatedEngine
from outrider.engine.emulated_spec import EmulatedSpec
from outrider.errors import SettingError
from outrider.speculation.sampling_params import Rule


def engines_of(deviation: float) -> tuple[EmulatedEngine, EmulatedEngine]:
    spec = EmulatedSpec(vocab_size=400, support=12, max_model_len=512, deviation=deviation)
    return EmulatedEngine(spec, "target"), EmulatedEngine(spec, "draft")


def hits(deviation: float) -> dict[tuple[str, float], WayFigures]:
    """By rule and temperature."""
    engines = engines_of(deviation)
    report = measure(
        HitOptions(num_prompts=7, max_tokens=40),
        *engines,
        lambda prompt: [ord(letter) for letter in prompt[:20]],
        draft_model="toy",
        progress=lambda line: None,
    )
    for engine in engines:
        engine.check_integrity()
    assert render(report).row_count == len(report.ways)
    return {(way.rule, way.temperature): way for way in report.ways}


def test_a_draft_that_is_the_target_knows_the_outcome() -> None:
    """Under coupled and greedy all is accepted and the bonus is the first guess; under token and
    block the bonus is, whose race is the target's own."""
    for way in hits(0.0).values():
        assert way.tokens_per_round > 4.5
        assert way.by_noise[1] == 1.0
        assert way.planned[OUTCOMES[-1]] > 0.95
        if way.temperature == 1.0:
            assert way.by_q[1] < 0.9


def test_noise_tells_more_than_q() -> None:
    """Of a draft that errs, under coupled; and more guesses hit more often."""
    found = hits(0.6)
    way = found["coupled", 1.0]
    assert way.by_noise[2] > way.by_q[2] + 0.1
    assert found["greedy", 0.0].by_noise == found["greedy", 0.0].by_q
    for way in found.values():
        for shares, counts in ((way.by_noise, FAN_OUTS), (way.planned, OUTCOMES)):
            assert tuple(shares) == counts
            assert list(shares.values()) == sorted(shares.values())


def test_shares_are_of_all_rounds() -> None:
    rounds = [GuessedRound(4, 4, 0, 2, 9), GuessedRound(4, 1, None, 0, None)]
    figures = way_figures(Way(Rule.TOKEN, 1.0), rounds)
    assert figures.tokens_per_round == 3.5
    assert list(figures.by_noise.values()) == [0.5] * 4
    assert list(figures.by_q.values()) == [0.5, 0.5, 1.0, 1.0]
    assert list(figures.planned.values()) == [0.0, 0.0, 0.5, 0.5, 0.5]


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(SettingError, match="num_draft_tokens"):
        HitOptions(num_draft_tokens=0)
    engines = engines_of(0.5)
    with pytest.raises(SettingError, match="prompts"):
        measure(
            HitOptions(num_prompts=6), *engines, lambda prompt: [], draft_model="toy",
            progress=lambda line: None,
        )  # fmt: skip
