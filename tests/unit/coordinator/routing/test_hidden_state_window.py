"""Features of a session's newest tokens, as the coordinator keeps them."""

from __future__ import annotations

from coordinator.routing.draft_client import FeatureWindow
from outrider.hidden_states import Features
from outrider.limits import FEATURES_MAX


def rows(first: int, end: int, mark: int = 0) -> Features:
    """Each row names its place."""
    return Features(
        first, 2, b"".join(bytes([p % 256, p // 256, mark, 0]) for p in range(first, end))
    )


def test_the_newest_are_kept_and_told_once() -> None:
    window = FeatureWindow()
    assert window.news is None
    window.put(rows(5, 7), 5 + 1)
    assert window.news == rows(5, 7)
    window.tell()
    assert window.news is None
    window.put(rows(7, 10), 7 + 1)
    assert window.news == rows(7, 10)
    window.told = 0
    assert window.news == rows(5, 10)


def test_no_more_are_kept_than_a_draft_looks_at() -> None:
    window = FeatureWindow()
    for first in range(0, 3 * FEATURES_MAX, 17):
        window.put(rows(first, first + 17), first + 1)
    news = window.news
    assert news is not None
    assert news == rows(news.end - FEATURES_MAX, news.end)


def test_behind_a_gap_it_begins_anew_and_what_comes_later_stands() -> None:
    window = FeatureWindow()
    window.put(rows(5, 7), 5 + 1)
    window.put(rows(9, 11), 9 + 1)
    assert window.news == rows(9, 11)
    window.put(rows(10, 12, mark=1), 10 + 1)
    found = window.news
    assert found is not None
    assert found.since(9) == Features(9, 2, rows(9, 10).rows + rows(10, 12, mark=1).rows)
    window.put(Features(12, 3, bytes(6)), 13)  # Of another width: another target's.
    assert window.news == Features(12, 3, bytes(6))


def test_what_cannot_be_of_the_round_is_left_out() -> None:
    window = FeatureWindow()
    for committed_length in (5, 7):
        window.put(rows(5, 7), committed_length)
    assert window.news is None
