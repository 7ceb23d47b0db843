"""What is to be told of a session, in order, and not before it is committed."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from outrider.request import RoundReport, Tokens
from outrider.sessions.state import Session
from outrider.telemetry.observer import SILENT, RequestObserver

from .committer import Committer

ENTRIES_UNREAD_MAX: Final = 256
"""Rounds that a session may be ahead of a client that does not read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one round adds: shown when the session's first `end_length` tokens are committed."""

    end_length: int
    tokens: Tokens
    report: RoundReport | None
    decided_at: float
    round_index: int | None = None
    """None for what no round has added."""


class OutputQueue:
    """Written by the decode loop, read by whoever serves the client."""

    def __init__(
        self, session: Session, committer: Committer, observer: RequestObserver = SILENT
    ) -> None:
        self._observer = observer
        self._session = session
        self._committer = committer
        self._entries: deque[Entry] = deque()
        self._closed = False
        self._changed = asyncio.Event()

    async def room(self) -> None:
        """Waits until the reader is less than `ENTRIES_UNREAD_MAX` rounds behind."""
        while len(self._entries) >= ENTRIES_UNREAD_MAX:
            self._changed.clear()
            await self._changed.wait()

    def write(self, entry: Entry) -> None:
        """Adds a round."""
        self._entries.append(entry)
        self._changed.set()

    def close(self) -> None:
        """Nothing more will be written."""
        self._closed = True
        self._changed.set()

    async def read(self) -> tuple[Tokens, RoundReport | None] | None:
        """Waits for the next round to be committed, and adds the committed ones behind it where no
        reports are wanted; None when there is none any more. Raises what made the session lose
        its store."""
        while not self._entries:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        entry = self._entries[0]
        num_shown = await self._committer.shown(self._session, entry.end_length)
        self._entries.popleft()
        self._changed.set()
        seconds = self._told(entry)
        if entry.report is not None:
            return entry.tokens, replace(entry.report, commit_ms=seconds * 1e3)
        parts = [entry.tokens]
        while entry.tokens.token_ids and self._entries:
            entry = self._entries[0]
            if entry.end_length > num_shown or entry.report or not entry.tokens.token_ids:
                break
            self._told(self._entries.popleft())
            parts.append(entry.tokens)
        return _joined(parts), None

    def _told(self, entry: Entry) -> float:
        """Tells the observer of an entry; returns how many seconds ago it was decided."""
        seconds = asyncio.get_running_loop().time() - entry.decided_at
        if entry.round_index is not None:
            self._observer.shown(entry.round_index, len(entry.tokens.token_ids), seconds)
        return seconds


def _joined(parts: list[Tokens]) -> Tokens:
    """Consecutive tokens as one event."""
    if len(parts) == 1:
        return parts[0]
    return Tokens(
        parts[0].first_index,
        tuple(chain.from_iterable(part.token_ids for part in parts)),
        "".join(part.text_delta for part in parts),
        tuple(chain.from_iterable(part.origins for part in parts)),
        tuple(chain.from_iterable(part.logprobs for part in parts)),
    )
