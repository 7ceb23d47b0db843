"""Resumes streams after a break. The id of each event says how far each choice was sent; a repeated
request with the same key continues the first one.

A resumed answer is made again from its first event, but parts that the client has are not sent. So
a part may depend on all earlier ones, but only on stored data.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from coordinator.decoding.sessions import RequestKey
from outrider.errors import BadRequest, SessionNotFound, Unavailable
from outrider.limits import EVENT_ID_CHOICES_MAX, IDEMPOTENCY_KEY_CHARS_MAX
from outrider.request import Event, PromptTokens, ResumeRequest, RoundReport, Tokens
from outrider.tokens import EMPTY_DIGEST, extend_digest

_CHOICE = r"\d{1,9}-[0-9a-f]{1,16}-\d{1,9}"
_EVENT_ID = re.compile(
    rf"(?P<num_parts>\d{{1,9}}):(?P<choices>{_CHOICE}(\.{_CHOICE})*)(\+(?P<begun>\d{{1,2}}-\d{{1,9}}-\d{{1,3}}))?",
    re.ASCII,
)
_KEY = re.compile(rf"[ -~]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")
_ID_CHARS_MAX = 64
"""Characters that an error shows of a wrong id."""
_WAITING_MAX = 8
"""Requests that wait for one with their key."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in the events of one choice."""

    num_tokens: int = 0
    digest: int = EMPTY_DIGEST
    """Digest of these tokens."""
    num_others: int = 0
    """Number of prompt tokens, plus the number of events without tokens: `Started`, text that was
    held back, `Finished`."""

    def after(self, event: Event) -> Position:
        if isinstance(event, Tokens) and event.token_ids:
            num_tokens = event.first_index + len(event.token_ids)
            digest = reduce(extend_digest, event.token_ids, self.digest)
            return replace(self, num_tokens=num_tokens, digest=digest)
        num_others = len(event.token_ids) if isinstance(event, PromptTokens) else 1
        return replace(self, num_others=self.num_others + num_others)


class Progress:
    """What a client has of the choices of a request."""

    def __init__(self, num_choices: int, last_event_id: str | None = None) -> None:
        """The client has this event and those before it; None = no events. Raises `BadRequest`."""
        self._now = [Position()] * num_choices
        """Position after the newest event of each choice."""
        self._sent = [*self._now]
        """Position after the newest event that had a part to send; an event whose text is held back
        has none."""
        self._num_parts = self.shift = 0
        """Number of parts that the client has, and that number minus the parts made here."""
        self.follows_event = last_event_id is not None
        self._known = [*self._now]
        """Position of each choice up to which the client has everything."""
        self._begun = (0, 0, 0)
        """An event of which the client has some parts, but not all: its choice, its number of
        tokens, and the number of parts that the client has."""
        if last_event_id is None:
            return
        found = _EVENT_ID.fullmatch(last_event_id)
        choices = found["choices"].split(".") if found else []
        if found is None or len(choices) != num_choices:
            raise BadRequest("Last-Event-ID", "is not the id of an event of this request")
        split = [one.split("-") for one in choices]
        self._known = [Position(int(n), int(digest, 16), int(m)) for n, digest, m in split]
        self._num_parts = self.shift = int(found["num_parts"])
        if found["begun"]:
            index, num_tokens, num_parts = map(int, found["begun"].split("-"))
            self._begun = index, num_tokens, num_parts

    def resume_request(self, index: int, session_id: str = "") -> ResumeRequest:
        """Asks for all events of a choice."""
        known = self._known[index]
        begun, num_tokens, _ = self._begun
        end = known.num_tokens + (num_tokens if begun == index else 0)
        return ResumeRequest(
            session_id, known.num_tokens, tokens_digest=known.digest, cuts=(known.num_tokens, end)
        )

    @property
    def has_begun(self) -> bool:
        """Whether there was an event."""
        return any(now != Position() for now in self._now)

    def is_behind(self, index: int) -> bool:
        """Whether the client has the next event of the choice."""
        now, known = self._now[index], self._known[index]
        return now.num_tokens < known.num_tokens or now.num_others < known.num_others

    def unsent(
        self, index: int, event: Event, parts: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """Each part of an event that the client lacks, with its id."""
        before, is_known, num_known = self._now[index], self.is_behind(index), 0
        if isinstance(event, RoundReport):  # It is not repeated when a session is resumed.
            after, is_known = before, False
        else:
            after = before.after(event)
            if parts and not is_known and self._begun[0] == index:
                num_known, self._begun = self._begun[2], (0, 0, 0)
        for place, part in enumerate(parts, 1):
            if is_known or place <= num_known:
                self.shift -= 1
                self._sent[index] = after if is_known else self._sent[index]
                continue
            self._num_parts += 1
            num_tokens = after.num_tokens - self._sent[index].num_tokens
            begun = f"+{index}-{num_tokens}-{place}"
            if place == len(parts):
                begun, self._sent[index] = "", after
            yield part, self._id(begun)
        self._now[index] = after

    def _id(self, begun: str = "") -> str:
        if len(self._now) > EVENT_ID_CHOICES_MAX:
            return ""
        each = (f"{one.num_tokens}-{one.digest:x}-{one.num_others}" for one in self._sent)
        return f"{self._num_parts}:{'.'.join(each)}{begun}"


def request_keys(key: str, tenant: str, request: bytes, num_choices: int) -> list[RequestKey]:
    """The key of each choice of a request with an `Idempotency-Key`. Raises `BadRequest`."""
    if not _KEY.fullmatch(key):
        raise BadRequest(
            "Idempotency-Key",
            f"must be 1 to {IDEMPOTENCY_KEY_CHARS_MAX} printable ASCII characters",
        )
    digest = hashlib.sha256(request).hexdigest()
    names = (json.dumps([tenant, key, index]).encode() for index in range(num_choices))
    return [RequestKey(hashlib.sha256(name).hexdigest(), digest) for name in names]


class _Turn:
    """The running requests with one key: one, and any that take over from it."""

    def __init__(self) -> None:
        self.running: list[Progress] = []
        self.ended = asyncio.Event()
        self.num_waiting = 0
        """Requests that wait for the end."""


class RepeatedRequests:
    """Requests with the same key, of which one runs at a time. Two at once would take the session
    from each other, again and again if their clients retry."""

    def __init__(self) -> None:
        self._turns: dict[RequestKey, _Turn] = {}

    @asynccontextmanager
    async def turn(self, key: RequestKey, progress: Progress) -> AsyncIterator[None]:
        """Waits until no other request with this key runs. A request that follows an event does not
        wait: its client has events of the running one, so the connection of that one is broken. If
        it fails before it has begun, the other one runs on. Raises `Unavailable` if too many wait.
        """
        while not progress.follows_event and (turn := self._turns.get(key)) is not None:
            if turn.num_waiting >= _WAITING_MAX:
                raise Unavailable(
                    f"{_WAITING_MAX} requests with this Idempotency-Key wait for the one that runs"
                )
            turn.num_waiting += 1
            try:
                await turn.ended.wait()
            finally:
                turn.num_waiting -= 1
        turn = self._turns.setdefault(key, _Turn())
        turn.running.append(progress)
        try:
            yield
        finally:
            is_newest = turn.running[-1] is progress
            turn.running.remove(progress)
            # The streams of earlier requests ended when the newest one began.
            if not turn.running or (is_newest and progress.has_begun):
                turn.ended.set()
                if self._turns.get(key) is turn:
                    del self._turns[key]


def split_answer_id(answer_id: str, prefixes: Iterable[str]) -> tuple[str, str]:
    """The prefix of an answer's id, and its session. Raises `SessionNotFound`."""
    found = re.fullmatch(rf"({'|'.join(prefixes)})([0-9a-f]{{32}})", answer_id)
    if found is None:
        raise SessionNotFound(f"there is no session {answer_id[:_ID_CHARS_MAX]}")
    return found[1], found[2]
