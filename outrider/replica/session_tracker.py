"""Which sessions of a replica somebody still waits for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.replica.step_request import AnswerSender


class SessionTracker:
    """Through which connection each session was heard last, and when it last spoke or was answered.

    Remembers `SEQUENCES_PER_REPLICA_MAX` sessions, those heard last.
    """

    def __init__(self) -> None:
        self._heard: OrderedDict[str, tuple[AnswerSender[Any], float]] = OrderedDict()

    def hear(self, session_id: str, outlet: AnswerSender[Any], now: float) -> None:
        """An item of the session has come."""
        self._heard[session_id] = (outlet, now)
        self._heard.move_to_end(session_id)
        if len(self._heard) > SEQUENCES_PER_REPLICA_MAX:
            self._heard.popitem(last=False)

    def answer(self, session_id: str, now: float) -> None:
        """The session has been answered: its silence begins now. Unknown ones are ignored."""
        if session_id in self._heard:
            self._heard[session_id] = (self._heard[session_id][0], now)
            self._heard.move_to_end(session_id)

    def forget(self, session_id: str) -> None:
        """The session has ended; unknown ones are ignored."""
        self._heard.pop(session_id, None)

    def leave(self, outlet: AnswerSender[Any]) -> list[str]:
        """The connection has closed: forgets and returns the sessions that it was last heard of
        for; those heard on another one since are still there."""
        gone = [name for name, (last, _) in self._heard.items() if last is outlet]
        for name in gone:
            del self._heard[name]
        return gone

    def fall_silent(self, since: float, waiting: Collection[str]) -> list[str]:
        """Forgets and returns the sessions that have neither spoken nor been answered since then,
        except those that wait for us."""
        silent: list[str] = []
        for name, (_, active_at) in self._heard.items():
            if active_at > since:
                break
            if name not in waiting:
                silent.append(name)
        for name in silent:
            del self._heard[name]
        return silent
