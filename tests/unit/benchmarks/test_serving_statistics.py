"""The figures of `bench serve` from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.serving_records import Record, RoundTimes, Speculation
from benchmarks.serving_statistics import (
    Samples,
    Spread,
    first_errors,
    is_good,
    round_values,
    running,
    speculation_values,
    tokens_by_chunk,
    tokens_by_time,
)

RECORD = Record(
    index=0,
    category="chat",
    due_s=0.0,
    started_s=1.0,
    chunk_s=(1.5, 2.0, 3.5),
    chunk_tokens=(1, 4, 2),
    ended_s=3.5,
    input_tokens=10,
    output_tokens=7,
)


def test_a_request_of_three_chunks() -> None:
    """TTFT to the first chunk; TPOT by the six tokens behind the first token; ITL by chunk."""
    assert RECORD.ttft_s == 0.5
    assert RECORD.latency_s == 2.5
    assert RECORD.tpot_s == pytest.approx(2.0 / 6)
    assert RECORD.itl_s == [0.5, 1.5]


def test_what_is_not_there_is_not_made_up() -> None:
    """One token has no TPOT and no ITL; without usage a chunk counts as a token; an answer without
    tokens has the time to its end."""
    one = replace(RECORD, chunk_s=(1.5,), chunk_tokens=(1,), output_tokens=1, ended_s=1.6)
    assert (one.tpot_s, one.itl_s) == (None, [])
    silent = replace(RECORD, chunk_tokens=None, output_tokens=None)
    assert silent.num_tokens == 3
    assert silent.tpot_s == pytest.approx(1.0)
    assert replace(RECORD, chunk_s=(), chunk_tokens=(), output_tokens=0).ttft_s == 2.5


def test_samples_are_of_all_requests_together() -> None:
    other = replace(RECORD, chunk_s=(2.0,), chunk_tokens=(1,), output_tokens=1, ended_s=2.0)
    found = Samples.of([RECORD, other])
    assert found.ttft == [0.5, 1.0]
    assert found.tpot == [pytest.approx(2.0 / 6)]
    assert found.itl == [0.5, 1.5]
    assert found.e2el == [2.5, 1.0]


def test_a_spread_is_numpys_in_ms() -> None:
    values = [0.001, 0.002, 0.006, 0.100]
    found = Spread.of(values, (50.0, 90.0, 99.9)).named("ttft")
    assert list(found) == [
        "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms",
        "p50_ttft_ms", "p90_ttft_ms", "p99.9_ttft_ms",
    ]  # fmt: skip
    ms = [1.0, 2.0, 6.0, 100.0]
    assert found["mean_ttft_ms"] == pytest.approx(27.25)
    assert found["median_ttft_ms"] == pytest.approx(4.0)
    assert found["std_ttft_ms"] == pytest.approx(float(np.std(ms)))
    assert found["p90_ttft_ms"] == pytest.approx(6.0 + 0.7 * 94.0)
    assert set(Spread.of([], (99.0,)).named("itl").values()) == {None}


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({}, True),
        ({"ttft": 500.0}, True),
        ({"ttft": 499.9}, False),
        ({"ttft": 500.0, "tpot": 334.0}, True),
        ({"ttft": 500.0, "tpot": 333.0}, False),
        ({"e2el": 2500.0}, True),
        ({"e2el": 2499.0, "ttft": 9999.0}, False),
    ],
)
def test_a_good_request_meets_every_goal(goals: dict[str, float], good: bool) -> None:
    assert is_good(RECORD, goals) is good


def test_a_request_of_one_token_meets_any_tpot() -> None:
    assert is_good(replace(RECORD, output_tokens=1), {"tpot": 0.0})


def test_tokens_fall_into_the_seconds_in_which_they_came() -> None:
    """Since the first request was sent; a chunk weighs its tokens, or an even share of all."""
    assert tokens_by_time([RECORD]).tolist() == [1, 4, 2, 0]
    assert tokens_by_time([RECORD], 0.5).tolist() == [0, 1, 4, 0, 0, 2]
    assert tokens_by_chunk(replace(RECORD, chunk_tokens=None)) == [pytest.approx(7 / 3)] * 3
    later = replace(RECORD, started_s=2.0, chunk_s=(4.2,), chunk_tokens=(3,), ended_s=4.2)
    assert tokens_by_time([RECORD, later]).tolist() == [1, 4, 2, 3, 0]
    assert tokens_by_time([]).tolist() == []


def test_concurrency_counts_half_open_intervals() -> None:
    """A request that ends as another begins does not meet it; two that begin together do."""
    first = replace(RECORD, started_s=0.0, ended_s=2.0)
    second = replace(RECORD, started_s=2.0, ended_s=3.0)
    third = replace(RECORD, started_s=2.0, ended_s=5.0)
    assert running([third, first, second]) == [(0.0, 1), (2.0, 2), (3.0, 1), (5.0, 0)]
    assert max(number for _, number in running([first, second])) == 1


def test_speculation_is_summed_over_those_who_told_of_it() -> None:
    told = replace(RECORD, speculation=Speculation(10, 40, 20))
    more = replace(RECORD, speculation=Speculation(30, 40, 40))
    assert speculation_values([told, RECORD, more]) == {
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 40,
        "spec_decode_draft_tokens": 80,
        "spec_decode_accepted_tokens": 60,
    }
    assert set(speculation_values([RECORD]).values()) == {None}
    plain = speculation_values([replace(RECORD, speculation=Speculation(7, 0, 0))])
    assert plain["spec_decode_acceptance_rate"] is None
    assert plain["spec_decode_acceptance_length"] == 1.0


def test_rounds_are_means_over_all_of_them() -> None:
    one = replace(RECORD, rounds=RoundTimes(1, 1, draft_ms=4.0, verify_ms=10.0))
    three = replace(RECORD, rounds=RoundTimes(3, 0, draft_ms=0.0, verify_ms=50.0))
    found = round_values([one, three, RECORD])
    assert found["look_ahead_hit_rate"] == 0.25
    assert found["mean_round_draft_ms"] == 1.0
    assert found["mean_round_verify_ms"] == 15.0
    assert set(round_values([RECORD]).values()) == {None}


def test_errors_are_counted_in_the_order_of_their_coming() -> None:
    errors = ["b", "a", "b", "", "c"]
    records = [replace(RECORD, error=error) for error in errors]
    assert first_errors(records, 2) == [("b", 2), ("a", 1)]
