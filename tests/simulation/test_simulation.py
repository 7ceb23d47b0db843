"""What `make sim` and `make test` rely on; `test_planted.py` shows that its runs can fail."""

from collections import Counter
from itertools import product

import pytest

from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.simulation import scenario
from tests.simulation.network import CALM
from tests.simulation.scenario import P_VALUE_MIN, Result, run_seed
from tests.simulation.toy import ranked_law


@pytest.mark.parametrize("seed", [5, 17])
def test_a_seed_replays(seed: int) -> None:
    """In seed 17 long records are decoded off the event loop."""
    first = run_seed(seed)
    assert all(run_seed(seed) == first for _ in range(5))


def test_without_faults_there_are_none() -> None:
    for seed in range(3):
        result = run_seed(seed, CALM, ())
        assert not result.faults
        assert not result.num_lost


def test_sessions_wait_for_a_single_target_that_starts_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer than `target_gone_ms`."""
    monkeypatch.setattr(scenario, "SLOW_STARTS_SHARE", 1.0)
    total = Result()
    for seed in range(5):
        total.merge(run_seed(seed, CALM, ("crash",)))
    assert total.faults["crash"] >= 5
    assert not total.num_lost


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_ranks_that_are_not_drawn_from_their_law_are_seen(share: float) -> None:
    """Counts exactly as expected, and with a tenth of the likeliest token moved to the next, as a
    draft's distribution might."""
    law = ranked_law(SamplingParams(temperature=1.0))
    counts = {rank: 10_000 * p for rank, p in enumerate(law)}
    counts[1] += (1 - share) * counts[0]
    counts[0] *= share
    rule, num = Rule.TOKEN.value, len(law)
    cells = product(range(num), counts.items())
    ranks = Counter({(rule, num, before, rank): round(n) for before, (rank, n) in cells})
    assert (Result(ranks=ranks).p_values()["token"] > P_VALUE_MIN) == (share == 1.0)
