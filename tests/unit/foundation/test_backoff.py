"""Waits between tries."""

import pytest

from outrider.foundation.backoff import backoff


def test_waits_double_with_jitter() -> None:
    waits = [backoff(0.05, 1.0, attempt, lambda: 1.0) for attempt in (0, 1, 2, 3, 4, 5, 10_000)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff(0.2, 1.0, 0, lambda: 0.5) == pytest.approx(0.15)
