"""Whom a replica still hears of, and through which connection."""

from __future__ import annotations

from typing import Any

from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.replica.service import SessionTracker
from outrider.replica.step_request import AnswerSender


def outlet() -> AnswerSender[Any]:
    return AnswerSender(lambda answers: None)


def test_a_closed_connection_takes_along_those_heard_on_it_last() -> None:
    presence, first, second = SessionTracker(), outlet(), outlet()
    for name in "abc":
        presence.hear(name, first, 0.0)
    presence.hear("b", second, 1.0)
    presence.forget("c")
    assert presence.leave(first) == ["a"]
    assert presence.leave(first) == []
    assert presence.leave(second) == ["b"]


def test_the_silent_are_told_once_unless_they_wait_or_speak_again() -> None:
    presence, stream = SessionTracker(), outlet()
    for at, name in enumerate("abcd"):
        presence.hear(name, stream, float(at))
    presence.hear("a", stream, 4.0)
    assert presence.fall_silent(2.0, waiting={"b"}) == ["c"]
    assert presence.fall_silent(2.0, waiting=()) == ["b"]
    assert presence.leave(stream) == ["d", "a"]


def test_silence_begins_with_the_last_answer() -> None:
    """However long that took; one that has ended is not heard again for it."""
    presence, stream = SessionTracker(), outlet()
    for name in "abc":
        presence.hear(name, stream, 0.0)
    presence.forget("c")
    for name in "ac":
        presence.answer(name, 5.0)
    assert presence.fall_silent(4.0, waiting=()) == ["b"]
    assert presence.fall_silent(5.0, waiting=()) == ["a"]


def test_it_remembers_a_bounded_number() -> None:
    presence, stream = SessionTracker(), outlet()
    for number in range(SEQUENCES_PER_REPLICA_MAX + 2):
        presence.hear(str(number), stream, 0.0)
    left = presence.leave(stream)
    assert (len(left), left[0]) == (SEQUENCES_PER_REPLICA_MAX, "2")
