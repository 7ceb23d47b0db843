"""Several rounds of every rule, 90,000 sequences each, against the target's own law.

Each test rejects an exact rule with probability <= 1e-6, and finds a total variation of 0.02 with
probability > 0.99 (`test_power`)."""

from __future__ import annotations

import numpy as np
import pytest
from core_rounds import (
    K_MAX,
    TELLING,
    ChosenLengths,
    Times,
    cells_of,
    fixed,
    generate,
    reads_everything,
    seeds_of,
    stops_after_a_weak_slot,
    varying,
)
from core_toys import ToyPair, random_pair, sampling_pair
from exactness.law import chi_square, power

from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.sampling_params import Rule, SamplingParams

pytestmark = pytest.mark.xdist_group("monte-carlo")

NUM_SEQUENCES = 90_000
NUM_CHOSEN = 14_500
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
    """The law of the first four tokens is the target's, whoever chooses K and the drafter from
    whatever was seen. False alarm <= 1e-6."""
    seeds = seeds_of(NUM_SEQUENCES, test_seed=1)
    tokens = generate(pair, rule, CONTROLLERS[controller], seeds, NUM_TOKENS)
    result = chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS))
    assert not result.rejects, result


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_coupled_sequences_do_not_depend_on_the_drafter(pair, controller):
    """Under coupled the tokens are those of plain decoding with the same seed, every one."""
    seeds = seeds_of(20_000, test_seed=2)
    plain = generate(pair, Rule.COUPLED, fixed(0), seeds, NUM_TOKENS)
    drafted = generate(pair, Rule.COUPLED, CONTROLLERS[controller], seeds, NUM_TOKENS)
    assert np.array_equal(drafted, plain)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_greedy_sequences_are_the_likeliest_tokens(pair, controller):
    """At temperature 0 all sequences are the one that follows the likeliest token."""
    likeliest = target_probabilities(pair.p.log(), SamplingParams(temperature=0.0))
    greedy = ToyPair(likeliest, pair.q, pair.mass, pair.step)
    tokens = generate(greedy, Rule.GREEDY, CONTROLLERS[controller], seeds_of(20_000, 3), NUM_TOKENS)
    assert not chi_square(cells_of(tokens, 3), greedy.law(NUM_TOKENS)).rejects


@pytest.mark.parametrize(
    ("rule", "together"),
    [
        (Rule.TOKEN, False),
        (Rule.BLOCK, True),
        pytest.param(Rule.COUPLED, False, marks=pytest.mark.full),
        pytest.param(Rule.TOKEN, True, marks=pytest.mark.full),
        pytest.param(Rule.BLOCK, False, marks=pytest.mark.full),
        pytest.param(Rule.COUPLED, True, marks=pytest.mark.full),
    ],
)
def test_lengths_that_the_coordinator_chooses_leave_the_law(pair, rule, together):
    """The same with the real choice of lengths, made nervous: what a round showed, thrown-away
    slots included, decides the next K. Either all sequences have averages in common, or each has a
    coordinator of its own and times that tell of those slots. False alarm <= 1e-6."""
    seeds = seeds_of(NUM_CHOSEN, test_seed=4)
    times = Times() if together else TELLING
    lengths = ChosenLengths(rule, seeds, times, together=together)
    tokens = generate(pair, rule, lengths, seeds, NUM_TOKENS)
    result = chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS))
    assert not result.rejects, result
    assert min(lengths.counts[k] for k in range(K_MAX + 1)) > NUM_CHOSEN / 50


def test_coupled_sequences_do_not_depend_on_the_lengths_that_are_chosen(pair):
    seeds = seeds_of(5_000, test_seed=5)
    plain = generate(pair, Rule.COUPLED, fixed(0), seeds, NUM_TOKENS)
    lengths = ChosenLengths(Rule.COUPLED, seeds, TELLING, together=True)
    assert np.array_equal(generate(pair, Rule.COUPLED, lengths, seeds, NUM_TOKENS), plain)


def test_power():
    """The bar of the tests above: TV 0.02, and 0.05 where lengths are chosen, is found with
    probability 0.99."""
    assert power(0.02, NUM_SEQUENCES, degrees=80) > 0.99
    assert power(0.05, NUM_CHOSEN, degrees=80) > 0.99


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", SAMPLED_RULES)
def test_grid(rule, k, seed):
    """Other pairs, with more zeros and ties, every K: three tokens over vocabularies 3 and 4.
    False alarm <= 1e-6."""
    pair = random_pair(3 + seed % 2, 100 + seed)
    tokens = generate(pair, rule, fixed(k), seeds_of(NUM_SEQUENCES, 50 + seed), 3)
    result = chi_square(cells_of(tokens, pair.vocab_size), pair.law(3))
    assert not result.rejects, result
