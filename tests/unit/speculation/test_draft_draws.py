"""Draft draws: quantised before they are sampled, and keyed as the target expects."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_laws import draft_token, draft_tokens

from outrider.errors import InvariantError
from outrider.speculation.draft_sampling import place_of, quantise
from outrider.speculation.gumbel_max import race, token_keys, uniforms
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution, decode_q, encode_q
from outrider.speculation.random_streams import RoundNoise, Stream, row_keys
from outrider.speculation.sampling_params import Rule


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
    assert len(set(q.token_ids)) == len(q.token_ids)
    ranked = sorted(weights, reverse=True)[:entries_max]
    counts = [*q.counts, *[0] * len(ranked)]
    for token_id, weight, count in zip(q.token_ids, ranked, counts, strict=False):
        assert weights[token_id] == weight
        assert abs(count - weight / sum(ranked) * COUNT_TOTAL) < 1 + 1e-6


def test_quantise_drops_what_gets_no_count():
    """A token too light for one of 2^16 counts is left out, so that no listed q is zero."""
    q = quantise(distribution(1.0, 1.0, 1e-9), 64)
    assert q == DraftDistribution((0, 1), (COUNT_TOTAL // 2, COUNT_TOTAL // 2))
    with pytest.raises(InvariantError):
        quantise(distribution(1.0), 0)


def test_a_row_without_mass_is_no_distribution():
    for bad in (torch.nan, 0.0):
        with pytest.raises(InvariantError):
            quantise(torch.full((3,), bad, dtype=torch.float64), 3)


def test_a_uniform_falls_on_each_count_as_often_as_it_says():
    """By every level that there is, and at the ends of each; on arrays and on tensors."""
    counts = np.array([[60_000.0, 5_000.0, 0.0, 536.0]])
    levels = np.repeat(counts.cumsum(1), COUNT_TOTAL, axis=0)
    for inside in (0.5**40, 0.5, 1 - 0.5**30):
        uniform = (np.arange(COUNT_TOTAL)[:, None] + inside) / COUNT_TOTAL
        places = place_of(levels, uniform)
        assert np.bincount(places, minlength=4).tolist() == counts[0].tolist()
        on_device = place_of(torch.from_numpy(levels), torch.from_numpy(uniform))
        assert on_device.tolist() == places.tolist()


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_the_draw_is_where_a_uniform_falls_on_the_counts(rule):
    """Token and block draw by DRAFT noise from the very numbers that go on the wire."""
    probabilities = torch.rand(500, dtype=torch.float64) ** 4
    seen = set()
    for index in range(40):
        noise = RoundNoise(11, rule, 40)
        token_id, q = draft_token(probabilities, noise, index, entries_max=8)
        assert q == quantise(probabilities, 8)
        keys = token_keys(row_keys(11, [noise.place(index)], [Stream.DRAFT]))
        level = float(uniforms(keys, np.array([[0]]))[0, 0]) * COUNT_TOTAL
        place = sum(total <= level for total in itertools.accumulate(q.counts))
        assert token_id == q.token_ids[place]
        assert decode_q(encode_q([q]), [(token_id,)]) == (q,)
        seen.add(token_id)
    assert len(seen) > 3


def test_coupled_draws_as_the_target_does():
    """The draft's draw under coupled is the race over its whole row, by the target's noise at the
    absolute position; no q is sent."""
    probabilities = distribution(*range(1, 301))
    noise = RoundNoise(11, Rule.COUPLED, 40)
    keys = row_keys(11, [noise.place(2)], [Stream.TARGET])
    expected = int(race(probabilities[None], keys))
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
