"""The race of Gumbel-max sampling: its waits, and which of them are left out."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.speculation.gumbel_max import BLOCK, race, scores
from outrider.speculation.random_streams import Place, RowKeys, Stream
from tests.support.verdict_laws import row_keys

ALPHA = 1e-6


def keys_of(num_rows: int, seed: int = 5) -> RowKeys:
    places = [Place(row, 0) for row in range(num_rows)]
    return row_keys(seed, places, [Stream.TARGET] * num_rows)


def waits(num_rows: int, width: int, seed: int = 5) -> np.ndarray:
    ones = np.ones((num_rows, width))
    return 1 / scores(ones, np.arange(width)[None], keys_of(num_rows, seed))


def test_waits_are_independent_and_exponential():
    """4,000 rows of 300 tokens: each wait is Exp(1) (Kolmogorov-Smirnov), no two tokens of a block,
    of neighbouring blocks or of neighbouring rows are correlated, and each token of a block is as
    likely to have the least wait. Each check fails by chance with 1e-6."""
    drawn = waits(4000, 300)
    assert stats.kstest(drawn.ravel()[::7], "expon").pvalue > ALPHA
    assert stats.kstest(drawn[:, 5], "expon").pvalue > ALPHA
    uniform = np.exp(-drawn)
    for one, other in (
        (uniform[:, :-1], uniform[:, 1:]),
        (uniform[:, :BLOCK], uniform[:, BLOCK : 2 * BLOCK]),
        (uniform[:-1], uniform[1:]),
    ):
        assert stats.pearsonr(one.ravel(), other.ravel()).pvalue > ALPHA
    pairs = stats.contingency.crosstab(*(np.minimum(uniform[:, [3, 9]] * 8, 7).astype(int).T))
    assert stats.chi2_contingency(pairs.count).pvalue > ALPHA
    first = np.bincount(drawn[:, :BLOCK].argmin(axis=1), minlength=BLOCK)
    assert stats.chisquare(first).pvalue > ALPHA


def test_the_least_wait_of_a_block_is_independent_of_tokens_elsewhere():
    """In 2,000 rows of 3 blocks: no token of a block is correlated with the least wait of another
    one. If the number of a block was also that of a token, a correlation would be 0.99."""
    drawn = np.exp(-waits(2000, 3 * BLOCK)).reshape(2000, 3, BLOCK)
    most = drawn.max(axis=2)
    for block, other in itertools.permutations(range(3), 2):
        ranks = stats.rankdata(np.column_stack([most[:, other], drawn[:, block]]), axis=0)
        correlations = np.corrcoef(ranks, rowvar=False)[0, 1:]
        bound = stats.norm.isf(ALPHA / (6 * BLOCK) / 2) / np.sqrt(2000 - 1)
        assert np.abs(correlations).max() < bound


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from([1, 700, 4 * BLOCK + 1, 40 * BLOCK, 5000]),
    spread=st.sampled_from([0.0, 1.0, 4.0, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    zeros=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_the_winner_is_that_of_all_waits(seed, width, spread, dtype, zeros):
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(4, width, generator=generator, dtype=dtype) * spread).softmax(dim=1)
    weights[torch.rand(4, width, generator=generator) < zeros] = 0.0
    weights[3] = 0.0
    before, keys = weights.clone(), keys_of(4, seed)
    won = race(weights, keys)
    every_score = scores(weights.numpy(), np.arange(width)[None], keys)
    assert np.array_equal(won, every_score.argmax(axis=1))
    assert won[3] == 0
    assert torch.equal(weights, before)
    for row in range(4):
        assert race(weights[row : row + 1], keys[[row]]) == won[row]
