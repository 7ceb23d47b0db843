"""Free pages are taken once, come back, and are handed out in runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvariantError
from outrider.kv_cache.free_pages import FreePages


@given(
    num_pages=st.integers(1, 20),
    calls=st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 19), st.booleans()), max_size=40),
)
def test_pages_are_taken_once_and_come_back(
    num_pages: int, calls: list[tuple[int, int, bool]]
) -> None:
    """Against a set: what is taken was free, follows `after` where it can, and may be given back
    in any order."""
    free, taken = FreePages(num_pages), list[int]()
    for num, place, give_back in calls:
        if give_back and taken:
            free.put(taken.pop(place % len(taken)))
        elif num <= num_pages - len(taken):
            after = taken[place % len(taken)] if taken and place >= 0 else -1
            before = set(range(num_pages)) - set(taken)
            pages = free.take(num, after)
            assert len(set(pages)) == num
            assert set(pages) <= before
            if num and after >= 0 and after + 1 in before:
                assert pages[0] == after + 1
            taken += pages
        assert free.pages() == sorted(set(range(num_pages)) - set(taken))
        assert len(free) == num_pages - len(taken)
        free.check_integrity()


def test_a_place_to_begin_leaves_room_to_the_one_before() -> None:
    """The first half of the longest run is for whoever holds the page before it, unless all of it
    is needed."""
    free = FreePages(32)
    assert free.take(2) == [0, 1]
    assert free.take(2) == [17, 18]
    assert free.take(3, after=1) == [2, 3, 4]
    assert free.take(12) == list(range(5, 17))
    assert free.take(13) == list(range(19, 32))
    assert len(free) == 0


def test_a_long_request_takes_several_runs() -> None:
    free = FreePages(8)
    free.take(8)
    for page in (1, 2, 5, 6, 7):
        free.put(page)
    assert free.take(5, after=0) == [1, 2, 5, 6, 7]


def test_more_than_are_free_is_our_bug() -> None:
    free = FreePages(2)
    with pytest.raises(InvariantError):
        free.take(3)
    assert free.pages() == [0, 1]
