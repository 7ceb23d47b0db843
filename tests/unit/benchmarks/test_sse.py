"""Server-sent events however the bytes are cut."""

from __future__ import annotations

import pytest

from benchmarks import sse
from benchmarks.sse import EventReader

STREAM = (
    ': ping\ndata: {"a": "größer"}\n\nevent: x\ndata:first\r\ndata: second\r\n\r\n\n\nid: 3\n\n'
    "data: [DONE]\n\n"
).encode()
EVENTS = ['{"a": "größer"}', "first\nsecond", "[DONE]"]


@pytest.mark.parametrize("size", [*range(1, 12), len(STREAM)])
def test_events_are_the_same_however_bytes_are_cut(size: int) -> None:
    """Also within a character and between the bytes of a line's end."""
    reader = EventReader()
    found = []
    for first in range(0, len(STREAM), size):
        found += reader.feed(STREAM[first : first + size])
    assert found == EVENTS


def test_the_last_event_may_lack_its_empty_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: [DONE]") == []
    assert reader.finish() == ["[DONE]"]
    assert reader.finish() == []


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    for line in (b"data: " + b"x" * 30 + b"\n", b"x" * 30):
        reader = EventReader()
        with pytest.raises(ValueError, match="more than 100 bytes"):
            for _ in range(5):
                reader.feed(line)
