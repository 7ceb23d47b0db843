"""Whole runs on a virtual clock under faults. `test_planted.py` shows that runs can fail."""

from collections import Counter

import pytest

from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.simulation.faults import GREATER, NUM_FAULTS
from tests.simulation.network import CALM, NOISE
from tests.simulation.scenario import P_VALUE_MIN, Result, run_seed
from tests.simulation.toy import ranked_law

NUM_SEEDS = 60


def test_runs_under_faults_lose_and_duplicate_nothing() -> None:
    """Seeds 0..59 (`make test` also runs 1,000): every check of `scenario` holds, and every kind of
    fault occurs. False alarm of the statistical checks: 2e-6."""
    total = Result()
    for seed in range(NUM_SEEDS):
        result = run_seed(seed)
        assert sum(result.faults[kind] for kind in GREATER) <= NUM_FAULTS[1]
        total.merge(result)
    assert set(total.faults) == GREATER | NOISE | {"oom_refusal"}
    assert sum(total.faults[kind] for kind in GREATER) >= NUM_FAULTS[0] * NUM_SEEDS
    assert total.num_moves > 5
    assert total.num_lost > 5
    assert total.ranks.total() > 1000
    assert set(total.p_values()) == {"token", "block"}
    assert min(total.p_values().values()) > P_VALUE_MIN


@pytest.mark.parametrize("seed", [5, 18])
def test_a_seed_replays(seed: int) -> None:
    """In seed 18 long records are decoded off the event loop."""
    first = run_seed(seed)
    assert all(run_seed(seed) == first for _ in range(5))


def test_without_faults_there_are_none() -> None:
    for seed in range(3):
        result = run_seed(seed, CALM, ())
        assert not result.faults
        assert not result.num_lost


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_ranks_that_are_not_drawn_from_their_law_are_seen(share: float) -> None:
    """Counts exactly as expected, and with a tenth of the likeliest token moved to the next, as a
    draft's distribution might."""
    law = ranked_law(SamplingParams(temperature=1.0))
    counts = {rank: 10_000 * p for rank, p in enumerate(law)}
    counts[1] += (1 - share) * counts[0]
    counts[0] *= share
    ranks = Counter(
        {
            (Rule.TOKEN.value, len(law), before, rank): round(count)
            for before in range(len(law))
            for rank, count in counts.items()
        }
    )
    assert (Result(ranks=ranks).p_values()["token"] > P_VALUE_MIN) == (share == 1.0)
