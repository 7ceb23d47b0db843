"""Averages of acceptance and length by depth: what they learn, and what they assume before."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.draft_length.acceptance import FIRST_ACCEPTED, DepthAverages, depth_counts
from outrider.limits import NUM_DRAFT_TOKENS_MAX

DEPTHS = NUM_DRAFT_TOKENS_MAX


def averages(prior: DepthAverages | None = None) -> DepthAverages:
    return DepthAverages(memory_rounds=200, prior_rounds=4, prior=prior)


def survival_of(chances: list[float]) -> tuple[float, ...]:
    return tuple(prod(chances[: n + 1]) for n in range(len(chances)))


def test_without_data_every_depth_has_the_assumed_acceptance() -> None:
    found = averages().chances(DEPTHS)
    assert found.committed == pytest.approx([FIRST_ACCEPTED ** (n + 1) for n in range(DEPTHS)])
    assert found.proposed.tolist() == [1.0] * DEPTHS


@pytest.mark.parametrize("short", [(), (0.0,)])
def test_a_proposal_that_ends_early_says_nothing_of_later_depths(short: tuple[float, ...]) -> None:
    """Half of the proposals are empty or refused, the others accepted. So eight tokens have the
    chance 1/2."""
    one = averages()
    for index in range(4000):
        one.note(depth_counts(8, (1.0,) * 8 if index % 2 else short))
    found = one.chances(8)
    assert found.committed == pytest.approx([0.5] * 8, abs=0.03)
    assert found.proposed == pytest.approx([1.0 if short else 0.5, *[0.5] * 7], abs=0.03)


def test_a_depth_that_a_session_has_not_tried_follows_the_one_before() -> None:
    """A session with more acceptance at the first depth is expected to have more at the second."""
    shared = averages()
    for _ in range(2000):
        shared.note(depth_counts(2, survival_of([0.5, 0.4])))
    own = averages(shared)
    for _ in range(400):
        own.note(depth_counts(1, (0.75,)))
    first, both = own.chances(2).committed
    assert first == pytest.approx(0.75, abs=0.02)
    assert both / first == pytest.approx(0.4 * 0.75 / 0.5, abs=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, DEPTHS), st.lists(st.floats(0, 1), max_size=DEPTHS)), max_size=60
    ),
    st.integers(1, DEPTHS),
)
def test_chances_are_chances(rounds: list[tuple[int, list[float]]], num_asked: int) -> None:
    shared = averages()
    own = averages(shared)
    for asked, chances in rounds:
        for one in (own, shared):
            one.note(depth_counts(asked, survival_of(chances[:asked])))
    for one in (own, shared):
        found = one.chances(num_asked)
        for values in (found.committed, found.proposed):
            assert all(0.0 <= b <= a <= 1.0 for a, b in zip((1.0, *values), values, strict=False))
