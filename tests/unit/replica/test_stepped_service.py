"""Whom a replica still hears of, and through which connection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rounds import make_head, session_name

from outrider.engine.interface import PageCounts
from outrider.limits import RELEASES_REMEMBERED_MAX
from outrider.registry.registry import WINDOW_S
from outrider.replica.service import SessionTracker, StaleRoundFilter, StepLoad
from outrider.replica.step_request import AnswerSender, StepFigures


def outlet() -> AnswerSender:
    return AnswerSender(lambda answers: None)


def test_a_closed_connection_takes_along_those_heard_on_it_last() -> None:
    tracker, first, second = SessionTracker(), outlet(), outlet()
    for name in "abc":
        tracker.hear(name, first, 0.0)
    tracker.hear("b", second, 1.0)
    tracker.forget("c")
    assert tracker.leave(first) == ["a"]
    assert tracker.leave(first) == []
    assert tracker.leave(second) == ["b"]


def test_rounds_and_epochs_only_grow() -> None:
    """Equal ones are repetitions and pass; a release by an older epoch lifts nothing, and
    after one nothing of the epoch passes, known or not."""
    rounds = StaleRoundFilter()
    assert rounds.admit(make_head((1,), epoch=1, round_index=5)) is None
    assert rounds.admit(make_head((1,), epoch=1, round_index=5)) is None
    behind = rounds.admit(make_head((1,), epoch=1, round_index=4))
    assert behind is not None
    assert behind.code == 1
    assert rounds.admit(make_head((1,), epoch=2, round_index=0)) is None
    over = rounds.admit(make_head((1,), epoch=1, round_index=9))
    assert over is not None
    assert over.code == 10
    assert not rounds.release(session_name(1), 1)
    assert rounds.admit(make_head((1,), epoch=1, round_index=9)) is not None
    assert rounds.release(session_name(1), 2)
    late = rounds.admit(make_head((1,), epoch=2, round_index=2**40))
    assert late is not None
    assert late.code == 1
    assert rounds.admit(make_head((1,), epoch=1)) is not None
    assert rounds.admit(make_head((1,), epoch=3)) is None
    assert rounds.release(session_name(2), 1)
    assert rounds.admit(make_head((1,), session=2)) is not None
    for session in range(3, RELEASES_REMEMBERED_MAX + 3):
        rounds.release(session_name(session), 1)
    assert rounds.admit(make_head((1,), session=2)) is None


def works(started_at: float, *arrived: float) -> Any:
    return [SimpleNamespace(arrived_at=at, started_at=started_at) for at in arrived]


def test_steps_one_after_the_other_are_busy_and_items_wait_for_them() -> None:
    """Steps of 20 ms with half of the places taken, for which items wait 10 ms; then nothing."""
    load, now = StepLoad(4, 0.0), 0.0
    while now < 60:
        load.stepped(works(now, now - 0.01, now - 0.01), now, now + 0.02)
        now += 0.02
    figures = StepFigures()
    figures.pages = PageCounts(10, 2, 3, 0, 0)
    found = load.figures(now, figures)
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
