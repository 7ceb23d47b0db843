"""The sums of an audit, compared with the plain formulas."""

import math

import numpy as np
import pytest
import torch

from outrider.speculation.audit import NEAR_TIE, audit
from outrider.speculation.audit_totals import AuditSums
from outrider.speculation.logits_processing import target_probabilities
from outrider.speculation.sampling_params import SamplingParams, TokenHistory

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(top_k=3, logit_bias=((1, 2.0),)),
        SamplingParams(frequency_penalty=1.5, repetition_penalty=1.2),
    ],
)
def test_sums_are_those_of_the_sampled_distribution(params: SamplingParams) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, (4, 7))).float()
    history = TokenHistory((1, 2), (2, 5), (5, 5, 0, 6))
    p = target_probabilities(logits, params, history)
    tokens = p.argmax(dim=1).tolist()
    expected = [0.0, 0.0, 0.0]
    for row, token_id in zip(p.tolist(), tokens, strict=True):
        mean = sum(-mass * math.log(mass) for mass in row if mass > 0)
        expected[0] += -math.log(row[token_id])
        expected[1] += mean
        expected[2] += sum(mass * (math.log(mass) + mean) ** 2 for mass in row if mass > 0)
    sums = audit(logits, tokens, params, history)
    assert (sums.num_tokens, sums.num_impossible) == (4, 0)
    found = [sums.surprise, sums.entropy, sums.variance]
    assert found == pytest.approx(expected, rel=1e-9)


def test_tokens_that_cannot_be_drawn_are_counted_and_left_out() -> None:
    """A filter drops them, their logit is minus infinity, or they are outside the vocabulary."""
    rows = [[3.0, 0.0, -1.0], [0.0, -math.inf, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 0.0]]
    logits = torch.tensor(rows)
    params = SamplingParams(top_k=2)
    sums = audit(logits, (2, 1, 7, 1), params)
    assert (sums.num_tokens, sums.num_impossible) == (4, 3)
    alone = audit(logits[3:], (1,), params)
    assert (sums.surprise, sums.entropy) == (alone.surprise, alone.entropy)
    assert sums.variance == alone.variance > 0
    greedy = audit(logits, (2, 1, 7, 1), GREEDY)
    assert (greedy.num_tokens, greedy.num_impossible, greedy.num_unlikely) == (4, 2, 1)


def test_greedy_tokens_are_likeliest_near_ties_or_neither() -> None:
    near = 16.0 * (1 - 0.9 * NEAR_TIE)
    far = 16.0 * (1 - 1.1 * NEAR_TIE)
    logits = torch.tensor([[16.0, near, far, 0.0]]).repeat(4, 1)
    sums = audit(logits, (0, 1, 2, 3), GREEDY)
    assert sums == AuditSums(num_tokens=4, num_unlikely=2, num_near_ties=1)
    # A bias makes another one the likeliest.
    biased = SamplingParams(temperature=0.0, logit_bias=((3, 50.0),))
    assert audit(logits[:1], (3,), biased) == AuditSums(num_tokens=1)
