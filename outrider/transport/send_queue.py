"""A bounded queue of messages that leaves as frames: everything that waits, in one write."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from outrider.limits import FRAME_BYTES_MAX, STREAM_QUEUE_ITEMS_MAX


class SendQueue:
    """Messages in order, at most `STREAM_QUEUE_ITEMS_MAX`. For the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, int]] = deque()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether `put` would be refused."""
        return len(self._waiting) >= STREAM_QUEUE_ITEMS_MAX

    def put(self, message: Any) -> bool:
        """Queues a protobuf message; False, and nothing queued, where the outbox is full."""
        if self.full:
            return False
        self._waiting.append((message, message.ByteSize()))
        self._changed.set()
        return True

    def wake(self) -> None:
        """Lets `wait` return though nothing was put."""
        self._changed.set()

    async def wait(self) -> None:
        """Returns after the next `put` or `wake` since the last return."""
        await self._changed.wait()
        self._changed.clear()

    def gather(self) -> list[Any]:
        """Takes what waits, up to `FRAME_BYTES_MAX` bytes and at least one message; empty when
        nothing waits."""
        frame: list[Any] = []
        total = 0
        while self._waiting and (not frame or total + self._waiting[0][1] <= FRAME_BYTES_MAX):
            message, size = self._waiting.popleft()
            frame.append(message)
            total += size
        return frame
