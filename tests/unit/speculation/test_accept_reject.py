"""Which draft tokens a verdict and uniforms accept; acceptance over a text."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation import accept_reject
from outrider.speculation.sampling_params import Rule
from outrider.speculation.text_acceptance import acceptance_of_windows

A, C, B = accept_reject.Origin.ACCEPTED, accept_reject.Origin.CORRECTION, accept_reject.Origin.BONUS
VERDICT = accept_reject.Verdict((0.5, 0.2, 0.9), (10, 11, 12, 13))
PROPOSED = (1, 2, 3)


@pytest.mark.parametrize(
    ("uniforms", "left", "block"),
    [
        ((0.5, 0.2, 0.9), 3, 3),
        ((0.6, 0.1, 0.1), 0, 3),
        ((0.1, 0.3, 0.1), 1, 3),
        ((0.1, 0.3, 0.95), 1, 1),
        ((0.6, 0.1, 0.95), 0, 2),
        ((0.6, 0.3, 0.95), 0, 0),
    ],
)
def test_left_rules_stop_and_block_looks_at_all(uniforms, left, block):
    """Token, coupled and greedy stop at the first rejection; block takes the longest prefix whose
    own test passes. A uniform equal to the acceptance probability accepts."""
    for rule in Rule:
        accepted = block if rule is Rule.BLOCK else left
        outcome = accept_reject.decide(VERDICT, PROPOSED, rule, uniforms)
        assert outcome.num_accepted == accepted
        assert outcome.token_ids == (*PROPOSED[:accepted], 10 + accepted)
        assert outcome.origins == (A,) * accepted + ((B if accepted == 3 else C),)


def test_an_empty_proposal_gives_the_bonus():
    found = accept_reject.decide(accept_reject.Verdict((), (7,)), (), Rule.BLOCK, ())
    assert found == accept_reject.Outcome((7,), (B,))


@given(st.sampled_from(list(Rule)), st.lists(st.floats(0, 1), max_size=5))
def test_survival_against_the_law_of_the_count(rule, accept):
    expected = [0.0] * len(accept)
    for passes in itertools.product((False, True), repeat=len(accept)):
        chance = math.prod(a if passed else 1 - a for a, passed in zip(accept, passes, strict=True))
        for n in range(accept_reject.count_accepted(rule, passes)):
            expected[n] += chance
    assert accept_reject.survival(rule, accept) == pytest.approx(expected, abs=1e-12)


def test_each_window_has_ratios_of_its_own() -> None:
    texts = [[np.array([1.0, 0.5, 0.25]), np.array([0.2, 0.4])], [np.array([0.6])]]
    found = acceptance_of_windows(texts, 3)
    assert found[0] == pytest.approx((1.0 + 0.5 + 0.25 + 0.6) / 4)
    assert found[1] == pytest.approx((1.0 * 0.2 + 0.5 * 0.4) / (1.0 + 0.5))
    assert found[2] is None
