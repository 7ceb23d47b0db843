"""Lengths that nothing changes."""

from __future__ import annotations

from coordinator.draft_length.policy import FixedLength, RoundLength

RUN_AHEAD = 8


def test_a_length_that_is_fixed_is_what_was_asked_for() -> None:
    fixed = FixedLength(3, RUN_AHEAD)
    asked = [fixed.choose(index, left) for index, left in ((0, 99), (1, 99), (2, 3), (3, 1))]
    assert asked == [
        RoundLength(k, 0, next_max=most) for k, most in ((0, 3), (3, 3), (2, 1), (0, 0))
    ]
    assert not fixed.listens
    plain = FixedLength(0, RUN_AHEAD)
    assert [plain.choose(index, 5) for index in (0, 1)] == [RoundLength(0, 4)] * 2
