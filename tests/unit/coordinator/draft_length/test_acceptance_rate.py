"""Acceptance and length by depth: what averages learn, and what they say where nothing is known."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.draft_length.acceptance import FIRST_ACCEPTED, DepthAverages
from outrider.limits import NUM_DRAFT_TOKENS_MAX

DEPTHS = NUM_DRAFT_TOKENS_MAX


def averages(prior: DepthAverages | None = None) -> DepthAverages:
    return DepthAverages(memory_rounds=200, prior_rounds=4, prior=prior)


def survival_of(chances: list[float]) -> tuple[float, ...]:
    return tuple(prod(chances[: n + 1]) for n in range(len(chances)))


def test_what_nobody_knows_is_taken_to_go_on_as_it_begins() -> None:
    found = averages().prospects(DEPTHS)
    assert found.committed == pytest.approx([FIRST_ACCEPTED ** (n + 1) for n in range(DEPTHS)])
    assert found.proposed.tolist() == [1.0] * DEPTHS


def test_a_proposal_that_ends_early_says_nothing_of_acceptance() -> None:
    """Half of the proposals are empty, and what is proposed is always accepted: the chance of
    eight tokens is a half, not (1/2)^8, and those of proposals and of commits are the same."""
    one = averages()
    for index in range(4000):
        one.note(8, (1.0,) * 8 if index % 2 else ())
    found = one.prospects(8)
    assert found.committed == pytest.approx([0.5] * 8, abs=0.03)
    assert found.proposed == pytest.approx([0.5] * 8, abs=0.03)


def test_long_proposals_may_be_the_good_ones() -> None:
    """Proposals of one token are never accepted, those of four always: depths behind the first are
    judged among the rounds that got there."""
    one = averages()
    for index in range(4000):
        one.note(4, (1.0,) * 4 if index % 2 else (0.0,))
    found = one.prospects(4)
    assert found.committed == pytest.approx([0.5] * 4, abs=0.03)
    assert found.proposed == pytest.approx([1.0, 0.5, 0.5, 0.5], abs=0.03)


def test_a_depth_that_a_session_has_not_tried_follows_the_one_before() -> None:
    """All accept 0.8 and then half of that; a session whose first token does better is expected to
    do better behind it in proportion, too."""
    shared = averages()
    for _ in range(2000):
        shared.note(2, survival_of([0.5, 0.4]))
    own = averages(shared)
    for _ in range(400):
        own.note(1, (0.75,))
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
    """After any rounds: between 0 and 1, never rising with depth, and what is committed was
    proposed in what these averages expect of the average round."""
    shared = averages()
    own = averages(shared)
    for asked, chances in rounds:
        for one in (own, shared):
            one.note(asked, survival_of(chances[:asked]))
    for one in (own, shared):
        found = one.prospects(num_asked)
        for values in (found.committed, found.proposed):
            assert all(0.0 <= b <= a <= 1.0 for a, b in zip((1.0, *values), values, strict=False))
