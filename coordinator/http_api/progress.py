"""Resumes streams after a break. The id of each event of a stream says how much of each choice the
client has. A repeated request with the same key continues the first one.

To resume an answer, the coordinator makes it again from its first event, and sends only the parts
that the client lacks. A part may therefore depend on all earlier ones. It must not depend on
anything that is not stored with the session.
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
"""Most characters that an error shows of a wrong id."""
_WAITING_MAX = 8
"""Most requests that wait for a running one with the same key."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in the events of one choice."""

    num_tokens: int = 0
    """Tokens of the answer before this position."""
    digest: int = EMPTY_DIGEST
    """Digest of these tokens."""
    num_others: int = 0
    """What precedes this position besides tokens of the answer. Each prompt token of a
    `PromptTokens` event counts 1, and so does each other event without tokens."""

    def after(self, event: Event) -> Position:
        """The position after an event that stands at this one."""
        if isinstance(event, Tokens) and event.token_ids:
            num_tokens = event.first_index + len(event.token_ids)
            digest = reduce(extend_digest, event.token_ids, self.digest)
            return replace(self, num_tokens=num_tokens, digest=digest)
        num_others = len(event.token_ids) if isinstance(event, PromptTokens) else 1
        return replace(self, num_others=self.num_others + num_others)


class Progress:
    """What a client has of the choices of a request. Each event of a choice is sent in some number
    of parts."""

    def __init__(self, num_choices: int, last_event_id: str | None = None) -> None:
        """The client has the event with this id, and those before it. None = it has no events.
        Raises `BadRequest`."""
        self._now = [Position()] * num_choices
        """For each choice, the position after its newest event."""
        self._sent = [*self._now]
        """For each choice, the position after its newest event that had parts."""
        self._num_parts = 0
        """Number of parts that the client has."""
        self.shift = 0
        """`_num_parts` minus the number of parts that were made here, sent or not. Parts are
        numbered as they are made here. The shift corrects the numbers of those that are sent."""
        self.follows_event = last_event_id is not None
        self._known = [*self._now]
        """For each choice, the position up to which the client has all parts."""
        self._begun = (0, 0, 0)
        """Describes the event of which the client has some parts, but not all: the index of its
        choice, its number of tokens, and the number of parts that the client has. Zeros if there is
        no such event."""
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
        """Asks for all events of a choice. Cuts its tokens into events after the last event that
        the client has whole, and after the event of which it has some parts."""
        known = self._known[index]
        begun, num_tokens, _ = self._begun
        end = known.num_tokens + (num_tokens if begun == index else 0)
        return ResumeRequest(
            session_id, known.num_tokens, tokens_digest=known.digest, cuts=(known.num_tokens, end)
        )

    @property
    def has_begun(self) -> bool:
        """Whether the request has had an event."""
        return any(now != Position() for now in self._now)

    def is_behind(self, index: int) -> bool:
        """Whether the client has the next event of the choice."""
        now, known = self._now[index], self._known[index]
        return now.num_tokens < known.num_tokens or now.num_others < known.num_others

    def unsent(
        self, index: int, event: Event, parts: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """Of the parts of an event, those that the client lacks, each with its id."""
        before, is_known, num_known = self._now[index], self.is_behind(index), 0
        if isinstance(event, RoundReport):  # A resumed session does not repeat these.
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
    """The running requests with one key: the first one, and those that took over from it."""

    def __init__(self) -> None:
        self.running: list[Progress] = []
        self.ended = asyncio.Event()
        self.num_waiting = 0
        """Number of requests that wait for `ended`."""


class RepeatedRequests:
    """Lets one request with each key run at a time. Two requests at once would take the session
    from each other, for ever if their clients repeat broken requests."""

    def __init__(self) -> None:
        self._turns: dict[RequestKey, _Turn] = {}

    @asynccontextmanager
    async def turn(self, key: RequestKey, progress: Progress) -> AsyncIterator[None]:
        """Waits until no other request with this key runs. A request with a `Last-Event-ID` does
        not wait but takes over: its client had events of the running request, so the connection of
        that request is broken. If the request that takes over fails before its first event, the
        other one goes on. Raises `Unavailable` if too many requests wait."""
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
            # The first event of the newest request has ended the streams of the earlier ones.
            if not turn.running or (is_newest and progress.has_begun):
                turn.ended.set()
                if self._turns.get(key) is turn:
                    del self._turns[key]


def split_answer_id(answer_id: str, prefixes: Iterable[str]) -> tuple[str, str]:
    """The prefix of an answer's id, and the id of its session. Raises `SessionNotFound`."""
    found = re.fullmatch(rf"({'|'.join(prefixes)})([0-9a-f]{{32}})", answer_id)
    if found is None:
        raise SessionNotFound(f"there is no session {answer_id[:_ID_CHARS_MAX]}")
    return found[1], found[2]
