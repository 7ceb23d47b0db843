"""Several rounds of every rule, 90,000 sequences each, against the target's own law.

Each test rejects an exact rule with probability <= 1e-6, and finds a total variation of 0.02 with
probability > 0.99 (`test_power`). It rejects faults of real implementations, planted here."""

import numpy as np
import pytest
import torch
from core_rounds import (
    Broken,
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
from verdict_laws import NoiseRows

from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.random_streams import RowKeys, Stream, WordArray
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


class DraftNoiseForResiduals(NoiseRows):
    """The token after a rejection uses the noise that drew the rejected token."""

    def correction_keys(self, num_draft_tokens: int) -> RowKeys:
        keys = super().correction_keys(num_draft_tokens)
        keys[keys[:, 2] == int(Stream.RESIDUAL), 2] = int(Stream.DRAFT)
        return keys


class AbsolutePlaces(NoiseRows):
    """Every draw is keyed by its absolute position, discarded slots included. With a fixed K only
    block is biased by it: it reads beyond the slot where it stops."""

    def _places(self, lengths: WordArray, indices: WordArray) -> tuple[WordArray, WordArray]:
        return lengths + indices, np.uint64(0) * indices


class AlwaysZero(NoiseRows):
    """u = 0: everything passes, even what the target cannot say."""

    def accept_uniforms(self, num_draft_tokens: int, sibling: int = 0) -> torch.Tensor:
        return torch.zeros(len(self), num_draft_tokens, dtype=torch.float64)


def last_row_twice(rows: torch.Tensor) -> torch.Tensor:
    """A bonus from p of the last draft token."""
    return torch.cat([rows[:, :-1], rows[:, -2:-1]], dim=1) if rows.shape[1] > 1 else rows


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (Rule.TOKEN, Broken(noise=DraftNoiseForResiduals)),
        (Rule.BLOCK, Broken(noise=AbsolutePlaces)),
        (Rule.TOKEN, Broken(noise=AlwaysZero)),
        (Rule.BLOCK, Broken(rows=last_row_twice)),
    ],
    ids=["shared noise", "absolute places", "u = 0", "bonus"],
)
def test_planted_faults_are_rejected(pair, rule, fault):
    tokens = generate(pair, rule, fixed(3), seeds_of(NUM_SEQUENCES, 7), NUM_TOKENS, fault)
    assert chi_square(cells_of(tokens, 3), pair.law(NUM_TOKENS)).rejects
