"""Draft draws: quantised before they are sampled, and keyed as the target expects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvariantError
from outrider.speculation.drafting import draft_token, draft_tokens, quantise
from outrider.speculation.noise import RoundNoise, Stream
from outrider.speculation.noise_rows import NoiseBatch, uniforms, uniforms_at
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, decode_q, encode_q
from outrider.speculation.race import race, race_at
from outrider.speculation.sampling import Rule


def distribution(*weights: float) -> torch.Tensor:
    values = torch.tensor(weights, dtype=torch.float64)
    return values / values.sum()


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0, 1) | st.just(0.0), min_size=1, max_size=40).filter(any),
    entries_max=st.integers(1, 20),
)
def test_quantise(weights, entries_max):
    """Positive counts that sum to 2^16 over at most so many of the likeliest tokens, each within
    one of its share."""
    probabilities = torch.tensor(weights, dtype=torch.float64)
    q = quantise(probabilities, entries_max)
    assert sum(q.counts) == COUNT_TOTAL
    assert min(q.counts) > 0
    assert list(q.token_ids) == sorted(set(q.token_ids))
    ranked = sorted(range(len(weights)), key=lambda v: (-weights[v], v))
    assert set(q.token_ids) <= set(ranked[:entries_max])
    mass = sum(weights[v] for v in ranked[:entries_max])
    for token_id in ranked[:entries_max]:
        share = weights[token_id] / mass * COUNT_TOTAL
        listed = dict(zip(q.token_ids, q.counts, strict=True)).get(token_id, 0)
        assert abs(listed - share) < 1 + 1e-6


def test_quantise_drops_what_gets_no_count():
    """A token too light for one of 2^16 counts is left out, so that no listed q is zero."""
    q = quantise(distribution(1.0, 1.0, 1e-9), 64)
    assert q == DraftDistribution((0, 1), (COUNT_TOTAL // 2, COUNT_TOTAL // 2))
    with pytest.raises(InvariantError):
        quantise(distribution(1.0), 0)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_the_draw_is_a_race_over_the_counts(rule):
    """Token and block draw by DRAFT noise from the very numbers that go on the wire."""
    probabilities = torch.rand(500, dtype=torch.float64) ** 4
    noise = RoundNoise(11, rule, 40)
    token_id, q = draft_token(probabilities, noise, 3, entries_max=8)
    assert q == quantise(probabilities, 8)
    u = uniforms_at(11, noise.place(3), Stream.DRAFT, q.token_ids)
    scores = torch.tensor(q.counts) / -u.log()
    assert token_id == q.token_ids[int(scores.argmax())]
    assert decode_q(encode_q([q]), [(token_id,)]) == (q,)


def test_coupled_draws_as_the_target_does():
    """The draft's draw under coupled is the race over its whole row, by the target's noise at the
    absolute position; no q is sent."""
    probabilities = distribution(*range(1, 301))
    noise = RoundNoise(11, Rule.COUPLED, 40)
    u = uniforms(11, [noise.place(2)], Stream.TARGET, 300)[0]
    expected = int((probabilities / -u.log()).argmax())
    assert draft_token(probabilities, noise, 2) == (expected, None)
    moved = RoundNoise(11, Rule.COUPLED, 42)
    assert draft_token(probabilities, moved, 0) == (expected, None)


def test_one_hot_draws_have_no_distribution():
    """A support of one, and everything greedy, is one-hot: None."""
    sharp = distribution(0, 0, 1, 0)
    for rule in Rule:
        assert draft_token(sharp, RoundNoise(1, rule, 9), 0) == (2, None)
    flat = distribution(1, 2, 2)
    assert draft_token(flat, RoundNoise(1, Rule.GREEDY, 9), 0) == (1, None)


@pytest.mark.parametrize("rule", Rule)
def test_a_batch_draws_what_each_session_would_alone(rule):
    """Batching sessions, with supports of different sizes, changes nothing."""
    torch.manual_seed(0)
    rows = torch.rand(5, 700, dtype=torch.float64) ** 6
    rows[1, 3:] = 0
    rows[2, 1:] = 0
    noises = [RoundNoise(i, rule, 100 + i) for i in range(5)]
    indices = [0, 4, 2, 2, 1]
    together = draft_tokens(rows, noises, indices, 16)
    alone = [draft_token(row, n, i, 16) for row, n, i in zip(rows, noises, indices, strict=True)]
    assert together == alone
    assert draft_tokens(rows[:0], [], [], 16) == []


def test_a_race_over_sparse_rows_equals_the_race_over_full_ones():
    """Noise at the positive weights alone picks the same winners as noise for every token."""
    torch.manual_seed(3)
    weights = torch.rand(6, 4000, dtype=torch.float64)
    weights *= torch.rand(6, 4000) < 0.01
    keys = NoiseBatch.of([RoundNoise(5, Rule.TOKEN, 3)]).correction_keys(5)
    sparse = race(weights, keys)
    every = torch.arange(4000).repeat(6, 1)
    assert torch.equal(sparse, race_at(every, weights, keys))
    dense = race(weights + 1e-300, keys)
    assert torch.equal(sparse, dense)
