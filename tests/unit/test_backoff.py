"""Waits between tries."""

from __future__ import annotations

import pytest

from outrider.backoff import backoff, spread


def test_it_doubles_up_to_a_longest_wait() -> None:
    waits = [backoff(0.05, 1.0, attempt, lambda: 1.0) for attempt in range(7)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff(0.05, 1.0, 10_000, lambda: 1.0) == 1.0


def test_half_of_it_is_by_chance() -> None:
    """Those that failed together come back apart."""
    assert backoff(0.2, 1.0, 0, lambda: 0.0) == pytest.approx(0.1)
    assert backoff(0.2, 1.0, 0, lambda: 0.5) == pytest.approx(0.15)


def test_waits_that_end_together_are_spread() -> None:
    """Never earlier than told."""
    assert spread(1.5, 0.25, lambda: 0.0) == 1.5
    assert spread(1.5, 0.25, lambda: 0.5) == pytest.approx(1.625)
