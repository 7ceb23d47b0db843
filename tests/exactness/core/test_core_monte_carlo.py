"""Several rounds of every rule, 90,000 sequences each, against the target's own law.

Each test rejects an exact rule with probability <= 1e-6, and finds a total variation of 0.02 with
probability > 0.99 (`test_power`)."""

import numpy as np
import pytest
from core_rounds import (
    cells_of,
    fixed,
    generate,
    reads_everything,
    seeds_of,
    stops_after_a_weak_slot,
    varying,
)
from core_toys import ToyPair, sampling_pair
from exactness.law import chi_square, power

from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.sampling_params import Rule, SamplingParams

pytestmark = pytest.mark.xdist_group("monte-carlo")

NUM_SEQUENCES = 90_000
NUM_TOKENS = 4
CONTROLLERS = {
    "K=3": fixed(3),
    "K varying": varying,
    "stops after a weak slot": stops_after_a_weak_slot,
    "reads everything": reads_everything,
}
SAMPLED_RULES = [Rule.TOKEN, Rule.BLOCK, Rule.COUPLED]


@pytest.fixture(scope="module")
def pair() -> ToyPair:
    return sampling_pair()


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_sequences_have_the_targets_law(pair, rule, controller):
    """The law of the first four tokens, whatever chooses K and the drafter from what was seen.
    False alarm <= 1e-6."""
    seeds = seeds_of(NUM_SEQUENCES, test_seed=1)
    tokens = generate(pair, rule, CONTROLLERS[controller], seeds, NUM_TOKENS)
    result = chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS))
    assert not result.rejects, result


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_coupled_sequences_do_not_depend_on_the_drafter(pair, controller):
    """All tokens are those of plain decoding with the same seed."""
    seeds = seeds_of(20_000, test_seed=2)
    plain = generate(pair, Rule.COUPLED, fixed(0), seeds, NUM_TOKENS)
    drafted = generate(pair, Rule.COUPLED, CONTROLLERS[controller], seeds, NUM_TOKENS)
    assert np.array_equal(drafted, plain)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_greedy_sequences_are_the_likeliest_tokens(pair, controller):
    likeliest = target_probabilities(pair.p.log(), SamplingParams(temperature=0.0))
    greedy = ToyPair(likeliest, pair.q, pair.mass, pair.step)
    tokens = generate(greedy, Rule.GREEDY, CONTROLLERS[controller], seeds_of(20_000, 3), NUM_TOKENS)
    assert not chi_square(cells_of(tokens, 3), greedy.law(NUM_TOKENS)).rejects


def test_power():
    """TV 0.02 is found with probability 0.99."""
    assert power(0.02, NUM_SEQUENCES, degrees=80) > 0.99
