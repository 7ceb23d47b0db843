"""Averages of acceptance and length by depth: what they learn, and what they assume before."""

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.draft_length.acceptance import (
    FIRST_ACCEPTED,
    FIRST_TAKEN,
    NO_SIBLINGS,
    SIBLINGS_OF_A_ROUND_MAX,
    DepthAverages,
    Prospects,
    SiblingAverages,
    SiblingChances,
    fitting,
    observed,
    shaped,
    sibling_chances,
)
from coordinator.draft_length.policy import FixedLength, RoundLength
from coordinator.draft_length.round_cost import Forecast
from outrider.limits import NUM_DRAFT_TOKENS_MAX, SIBLINGS_MAX, TREE_TOKENS_MAX
from outrider.speculation.proposal import caterpillar_tree, draft_tree

DEPTHS = NUM_DRAFT_TOKENS_MAX


def averages(prior: DepthAverages | None = None) -> DepthAverages:
    return DepthAverages(memory_rounds=200, prior_rounds=4, prior=prior)


def survival_of(chances: list[float]) -> tuple[float, ...]:
    return tuple(prod(chances[: n + 1]) for n in range(len(chances)))


def test_without_data_every_depth_has_the_assumed_acceptance() -> None:
    found = averages().prospects(DEPTHS)
    assert found.committed == pytest.approx([FIRST_ACCEPTED ** (n + 1) for n in range(DEPTHS)])
    assert found.proposed.tolist() == [1.0] * DEPTHS


def test_a_proposal_that_ends_early_says_nothing_of_acceptance() -> None:
    """Half of the proposals are empty, and proposed tokens are always accepted: the chance of eight
    tokens is 1/2, not (1/2)^8, for proposals as for commits."""
    one = averages()
    for index in range(4000):
        one.note(observed(8, (1.0,) * 8 if index % 2 else ()))
    found = one.prospects(8)
    assert found.committed == pytest.approx([0.5] * 8, abs=0.03)
    assert found.proposed == pytest.approx([0.5] * 8, abs=0.03)


def test_long_proposals_may_be_the_good_ones() -> None:
    """Proposals of one token are never accepted, those of four always: later depths count only
    rounds that reached them."""
    one = averages()
    for index in range(4000):
        one.note(observed(4, (1.0,) * 4 if index % 2 else (0.0,)))
    found = one.prospects(4)
    assert found.committed == pytest.approx([0.5] * 4, abs=0.03)
    assert found.proposed == pytest.approx([1.0, 0.5, 0.5, 0.5], abs=0.03)


def test_a_depth_that_a_session_has_not_tried_follows_the_one_before() -> None:
    """Over all sessions, acceptance is 0.5 and then 0.4. A session with more acceptance at the
    first depth is expected to have more at the second, in proportion."""
    shared = averages()
    for _ in range(2000):
        shared.note(observed(2, survival_of([0.5, 0.4])))
    own = averages(shared)
    for _ in range(400):
        own.note(observed(1, (0.75,)))
    first, both = own.prospects(2).committed
    assert first == pytest.approx(0.75, abs=0.02)
    assert both / first == pytest.approx(0.4 * 0.75 / 0.5, abs=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, DEPTHS), st.lists(st.floats(0, 1), max_size=DEPTHS)), max_size=60
    ),
    st.integers(1, DEPTHS),
)
def test_chances_are_chances(rounds: list[tuple[int, list[float]]], num_asked: int) -> None:
    """After any rounds they are between 0 and 1, and do not rise with depth."""
    shared = averages()
    own = averages(shared)
    for asked, chances in rounds:
        for one in (own, shared):
            one.note(observed(asked, survival_of(chances[:asked])))
    for one in (own, shared):
        found = one.prospects(num_asked)
        for values in (found.committed, found.proposed):
            assert all(0.0 <= b <= a <= 1.0 for a, b in zip((1.0, *values), values, strict=False))


def test_a_verdict_shows_what_siblings_were_worth() -> None:
    """Two places: two siblings of three asked for, and one of one."""
    tree = draft_tree(caterpillar_tree((2, 1)), 5)
    accept = (0.5, 0.4, 0.25, 0.2, 0.1)
    found = sibling_chances(tree, accept, (3, 1))
    assert found.asked == pytest.approx((0.5 + 0.5 * 0.8, 0.5 * 0.6, 0.5 * 0.6 * 0.75))
    assert found.offered == pytest.approx((0.5 + 0.5 * 0.8, 0.5 * 0.6, 0.0))
    assert found.taken == pytest.approx((0.5 * 0.4 + 0.5 * 0.8 * 0.1, 0.3 * 0.25, 0.0))
    assert sibling_chances(draft_tree((), 3), (0.5, 0.5, 0.5), ()) == NO_SIBLINGS


def test_rates_follow_what_is_seen() -> None:
    """They move from the assumption to what many rounds show. A session starts from the averages of
    all sessions."""
    shared = SiblingAverages(100.0, 10.0)
    assert shared.rates()[0].tolist() == [1.0] * SIBLINGS_MAX
    assert shared.rates()[1, :2] == pytest.approx((FIRST_TAKEN, FIRST_TAKEN / 2))
    for _ in range(1_000):
        shared.note(SiblingChances((1.0, 1.0), (1.0, 0.5), (0.6, 0.1)))
    (offered, seldom), (taken, second) = shared.rates()[:, :2]
    assert offered == pytest.approx(1.0)
    assert taken == pytest.approx(0.6, abs=0.05)
    assert seldom == pytest.approx(0.5, abs=0.06)
    assert second == pytest.approx(0.2, abs=0.02)
    session = SiblingAverages(50.0, 10.0, shared)
    assert session.rates()[:, 0] == pytest.approx((offered, taken))
    for _ in range(200):
        session.note(SiblingChances((1.0,), (1.0,), (0.0,)))
    assert session.rates()[1, 0] < 0.15


def prospects(*chances: tuple[float, ...]) -> Prospects:
    return Prospects(*(np.array(one) for one in chances))


PROSPECTS = prospects((0.4, 0.16), (1.0, 1.0), (0.6, 0.24))


RATES: Any = SimpleNamespace(rates=lambda: np.array([[1.0, 1.0, 1.0], [0.3, 0.2, 0.1]]))


def forecast(row_s: float, lost: float = 0.0, num_rows: int = 30) -> Forecast:
    rows, nothing = np.full(num_rows, row_s), np.zeros(0)
    return Forecast(0.0, 0.0, 0.0, nothing, nothing, rows, np.full(num_rows, lost), nothing)


def shape(
    row_s: float, lost: float = 0.0, num_rows: int = 30, siblings_max: int = 3
) -> tuple[tuple[int, ...], float, float]:
    """Siblings, and the tokens and seconds that they add."""
    costs = forecast(row_s, lost, num_rows)
    _, found = shaped([(1.0, 1.0), (1.56, 1.56)], PROSPECTS, RATES, costs, siblings_max)
    siblings, num_tokens, seconds = found
    return siblings, num_tokens - 1.56, seconds - 1.56


def test_siblings_are_added_while_they_pay() -> None:
    """All if rows cost nothing, none if they are expensive; in between, more at the first place."""
    siblings, num_tokens, seconds = shape(0.0)
    assert siblings == (3, 3)
    kept = 1 - 0.7 * 0.8 * 0.9
    assert num_tokens == pytest.approx(0.84 * kept)
    assert seconds == 0.0
    assert shape(0.2)[0] == ()
    siblings, _, seconds = shape(0.06)
    assert siblings == (2, 1)
    assert seconds == pytest.approx(3 * 0.06)
    assert shape(0.0, lost=0.1)[0] == (1, 0)
    assert shape(0.0, siblings_max=0)[0] == ()


def test_a_tree_is_bounded() -> None:
    """By the rows whose costs are known, the limit on siblings, and the room in the context."""
    assert sum(shape(0.0, num_rows=5)[0]) == 3
    halves = prospects((0.5,) * 8, (1.0,) * 8, (0.5,) * 8)
    rates: Any = SimpleNamespace(rates=lambda: np.array([[1.0] * 8, [0.5] * 8]))
    *_, many = shaped([(2.0, 1.0)] * 8, halves, rates, forecast(0.0, 0.0, 99), 8)
    assert sum(many[0]) == SIBLINGS_OF_A_ROUND_MAX
    assert fitting((3, 2, 1), 4) == (3, 1, 0)
    assert fitting((3, 2, 1), 0) == fitting((3,), -5) == ()
    assert fitting((), 9) == ()


@pytest.mark.parametrize("num_draft_tokens", [1, 7, 16])
def test_a_fixed_length_asks_for_the_same_tree_each_time(num_draft_tokens: int) -> None:
    policy = FixedLength(num_draft_tokens, 0, SIBLINGS_MAX)
    assert policy.choose(0, 99).siblings == ()
    siblings = policy.choose(1, 99).siblings
    assert len(siblings) == num_draft_tokens
    assert siblings[0] > 0
    assert num_draft_tokens + sum(siblings) <= TREE_TOKENS_MAX
    assert len(policy.choose(2, 4).siblings) == min(num_draft_tokens, 3)
    assert FixedLength(num_draft_tokens, 0).choose(1, 99).siblings == ()


def test_a_fixed_length_is_what_the_request_asks_for() -> None:
    fixed = FixedLength(3, 8)
    asked = [fixed.choose(index, left) for index, left in ((0, 99), (1, 99), (2, 3), (3, 1))]
    assert asked == [
        RoundLength(k, 0, next_max=most) for k, most in ((0, 3), (3, 3), (2, 1), (0, 0))
    ]
    assert not fixed.listens
    plain = FixedLength(0, 8)
    assert [plain.choose(index, 5) for index in (0, 1)] == [RoundLength(0, 4)] * 2
