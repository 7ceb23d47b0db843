"""Traps in which real implementations lost exactness, numbered. Statistical tests have a false
alarm <= 1e-6 for each statistic. Trap 8, a draft token that is dropped because of its value, is in
`test_core_enumeration.py`."""

import math

import numpy as np
import pytest
import torch

from outrider.foundation.tokens import TokenSequence
from outrider.speculation.accept_reject import Verdict, decide
from outrider.speculation.gumbel_max import _exponentials, numbers, race, token_keys, uniforms
from outrider.speculation.random_streams import RoundNoise, Stream, row_words, uniform
from outrider.speculation.sampling_params import Rule
from tests.exactness.law import cells_of, chi_square
from tests.support.verdict_laws import row_keys


def test_trap_05_draft_accept_and_residual_share_no_noise():
    """Four streams are independent at each place: 100,000 numbers of each fill a 4-dimensional grid
    evenly."""
    num = 100_000
    places = [RoundNoise(0, Rule.TOKEN, length).place(0) for length in range(num)]
    streams = (Stream.TARGET, Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL)
    keys = [row_keys(77, places, [stream] * num) for stream in streams]
    first = np.zeros((1, 1), dtype=np.int64)
    drawn = [uniforms(numbers(token_keys(each), first))[:, 0] for each in keys]
    drawn[2] = uniform(row_words(keys[2])[0].astype(np.float64))
    grid = np.stack([(u * 4).astype(np.int64) for u in drawn], axis=1)
    assert not chi_square(cells_of(grid, 4), np.full(256, 1 / 256)).rejects


@pytest.mark.parametrize("rule", Rule)
def test_trap_06_no_uniform_accepts_the_impossible(rule):
    """The smallest uniform is 2^-33, so an acceptance of 0 rejects; the largest is under 1, so an
    acceptance of 1 accepts; uniforms differ."""
    smallest, largest = uniform(0), uniform(2**32 - 1)
    assert decide(Verdict((0.0,), (1, 2)), (0,), rule, (smallest,)).num_accepted == 0
    assert decide(Verdict((1.0,), (1, 2)), (0,), rule, (largest,)).num_accepted == 1
    if rule.needs_q:
        noise = [RoundNoise(seed, rule, 4).accept_uniforms(3) for seed in range(300)]
        assert len({u for us in noise for u in us}) == 900


def test_trap_09_the_tail_of_the_noise_is_resolved():
    """Waits reach down to 2^-53 without becoming 0, so a Gumbel number reaches 36.7 where float32
    would stop at 16.6. The smallest ones are distinct, and unlikely tokens win as often as they
    should."""
    waits = _exponentials(np.array([-1, -1 - 2**12, 0]))
    assert -math.log(waits[0]) > 36.7
    assert 0 < waits[0] < waits[1] < waits[2] < 37
    num = 200_000
    weights = torch.tensor([1.0, 1e-3, 1e-4, 1e-4], dtype=torch.float64).expand(num, -1)
    places = [RoundNoise(9, Rule.TOKEN, length).place(0) for length in range(num)]
    won = race(weights, row_keys(9, places, [Stream.TARGET] * num))
    assert not chi_square(won, np.array([1.0, 1e-3, 1e-4, 1e-4]) / 1.0012).rejects


def test_trap_12_a_lost_token_is_noticed():
    """Each change of a prefix changes its digest, and a rollback restores the digest of what is
    kept."""
    sequence = TokenSequence([3, 1, 4, 1, 5])
    digests = [sequence.digest(n) for n in range(6)]
    changed = [[3, 1, 4, 1], [3, 1, 4, 1, 5, 0], [1, 3, 4, 1, 5], [3, 1, 4, 1, 6], [0, 1, 4, 1, 5]]
    assert sequence.digest() not in {TokenSequence(ids).digest() for ids in changed}
    sequence.truncate(2)
    assert sequence.digest() == digests[2]
    sequence.extend([4, 1, 5])
    assert [sequence.digest(n) for n in range(6)] == digests
    assert len({TokenSequence([a, b]).digest() for a in range(300) for b in range(300)}) == 90_000
