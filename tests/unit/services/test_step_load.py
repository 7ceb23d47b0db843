"""What a replica says of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.decayed_average import DecayedSums
from outrider.engine.interface import PageCounts
from outrider.registry.registry import WINDOW_S
from outrider.replica.scheduler import StepLoad
from outrider.replica.step_request import StepFigures


def works(started_at: float, *arrived: float) -> Any:
    return [SimpleNamespace(arrived_at=at, started_at=started_at) for at in arrived]


def test_steps_one_after_the_other_are_busy_and_items_wait_for_them() -> None:
    """Steps of 20 ms with half of the places taken, for which items wait 10 ms; then nothing."""
    load, now = StepLoad(4, 0.0), 0.0
    while now < 60:
        load.stepped(works(now, now - 0.01, now - 0.01), now, now + 0.02)
        now += 0.02
    pages = PageCounts(10, 2, 3, 0, 0)
    found = load.figures(now, StepFigures(pages))
    assert found.busy == pytest.approx(1.0, abs=0.01)
    assert found.fill == pytest.approx(0.5)
    assert found.step_ms == pytest.approx(20)
    assert found.queue_steps == pytest.approx(0.5)
    assert found.kv_usage == pytest.approx(0.5)
    later = load.figures(now + 0.9 * WINDOW_S, StepFigures())
    assert later.busy == pytest.approx(0.41, abs=0.01)
    assert (later.kv_usage, later.fill) == (None, pytest.approx(0.5))
    after = load.figures(now + 1.1 * WINDOW_S, StepFigures())
    assert (after.fill, after.queue_steps) == (None, None), "what has ended is nobody's load"


def test_an_item_that_stays_for_several_steps_waited_once() -> None:
    load = StepLoad(1, 0.0)
    load.stepped(works(1.0, 0.0), 1.0, 2.0)
    load.stepped(works(1.0, 0.0), 2.0, 3.0)
    found = load.figures(3.0, StepFigures())
    assert found.queue_steps == pytest.approx(1.0)


def test_a_rate_is_right_from_the_start() -> None:
    """However short the time that it was told of."""
    sums = DecayedSums(5.0, 0.0)
    for tick in range(1, 21):
        sums.add(tick / 10, {"a": 3.0})
        if tick >= 5:
            assert sums.rate(tick / 10, "a") == pytest.approx(30.0, rel=0.1)
    assert sums.mean(2.0, "a", "b") is None
