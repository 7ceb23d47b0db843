"""Copies of values with changed fields."""

from dataclasses import replace

from outrider.foundation.values import replaced
from outrider.interfaces.messages import VerifyItem
from tests.support.rounds import make_head


def test_a_changed_copy_equals_that_of_the_library_and_leaves_the_original() -> None:
    item = VerifyItem(make_head((1, 2, 3)), num_logprobs=3, audit=True)
    before = replace(item)
    changed = replaced(item, run_ahead=7, head=replaced(item.head, round=9))
    assert changed == replace(item, run_ahead=7, head=replace(item.head, round=9))
    assert item == before
