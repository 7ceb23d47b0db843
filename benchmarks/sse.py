"""Server-sent events out of bytes, however these were cut."""

from __future__ import annotations

from typing import Final

DONE: Final = "[DONE]"
"""The data of the last event of OpenAI's streams."""
EVENT_BYTES_MAX: Final = 16 * 2**20


class EventReader:
    """Reads the data of one stream's events; their names, ids and comments are left out."""

    def __init__(self) -> None:
        self._rest = b""
        """Of a line that has not ended."""
        self._data: list[str] = []
        """Lines of an event that has not ended."""
        self._size = 0

    def feed(self, data: bytes) -> list[str]:
        """The data of the events that these bytes end. Raises `ValueError` for bytes that are not
        UTF-8, and for an event over `EVENT_BYTES_MAX`."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        found = []
        for line in lines:
            event = self._take(line.removesuffix(b"\r"))
            if event is not None:
                found.append(event)
        if self._size + len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"an event has more than {EVENT_BYTES_MAX} bytes")
        return found

    def finish(self) -> list[str]:
        """The data of an event that the stream's end cut off from its empty line."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes) -> str | None:
        if not line:
            event = "\n".join(self._data) if self._data else None
            self._data, self._size = [], 0
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode())
            self._size += len(value)
        return None
