"""Resumes broken streams, and continues repeated requests.

The client receives server-sent events, here called *parts*. The id of a part says how much of each
choice the client has after this part. To resume an answer, the coordinator makes all parts of the
answer again, and sends only those that the client lacks. So a part may depend only on earlier parts
and on data that is stored with the session.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from coordinator.decoding.sessions import RequestKey
from outrider.errors import BadRequest, Overloaded, Unavailable
from outrider.foundation.tokens import EMPTY_DIGEST, extend_digest
from outrider.interfaces.request import Event, PromptTokens, ResumeRequest, RoundReport, Tokens
from outrider.limits import EVENT_ID_CHOICES_MAX, IDEMPOTENCY_KEY_CHARS_MAX, REPEATED_REQUESTS_MAX

_CHOICE = r"\d{1,9}-[0-9a-f]{1,16}-\d{1,9}"
_EVENT_ID = re.compile(
    rf"(?P<num_parts>[1-9]\d{{0,8}}):(?P<choices>{_CHOICE}(\.{_CHOICE})*)(\+(?P<begun>\d{{1,2}}-\d{{1,9}}-\d{{1,3}}))?",
    re.ASCII,
)
_KEY = re.compile(rf"[ -~]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")
_WAITING_MAX = 8
"""At most this many requests wait for a running request with the same key."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in the events of one choice. The fields describe all events before it."""

    num_tokens: int = 0
    """Number of the answer's tokens."""
    digest: int = EMPTY_DIGEST
    """Digest of the answer's tokens."""
    num_others: int = 0
    """Number of prompt tokens in `PromptTokens` events, plus number of events without tokens."""

    def after(self, event: Event) -> Position:
        if isinstance(event, Tokens) and event.token_ids:
            num_tokens = event.first_index + len(event.token_ids)
            digest = reduce(extend_digest, event.token_ids, self.digest)
            return replace(self, num_tokens=num_tokens, digest=digest)
        num_others = len(event.token_ids) if isinstance(event, PromptTokens) else 1
        return replace(self, num_others=self.num_others + num_others)


class Progress:
    """Tracks how much of each choice the client has. An event becomes zero or more parts."""

    def __init__(self, num_choices: int, last_event_id: str | None = None) -> None:
        """`last_event_id` is the id of the newest part that the client has, if any. Raises
        `BadRequest` if the id is malformed or is not for `num_choices` choices."""
        self._now = [Position()] * num_choices
        """For each choice, the position after its newest event."""
        self._sent = [*self._now]
        """For each choice, the position up to which the client has all parts."""
        self.num_parts = 0
        """Number of parts that the client has. Begins at the number in `last_event_id`, or at 0."""
        self._begun = (0, 0, 0)
        """Describes the event of which the client has only some parts: the index of its choice, its
        number of tokens, and the number of parts that the client has. Zeros = no such event."""
        if last_event_id is not None:
            match = _EVENT_ID.fullmatch(last_event_id)
            choices = match["choices"].split(".") if match else []
            if match is None or len(choices) != num_choices:
                raise BadRequest("Last-Event-ID", "is not the id of an event of this request")
            split = [position.split("-") for position in choices]
            self._sent = [Position(int(n), int(digest, 16), int(m)) for n, digest, m in split]
            self.num_parts = int(match["num_parts"])
            index, num_tokens, num_parts = map(int, (match["begun"] or "0-0-0").split("-"))
            self._begun = index, num_tokens, num_parts

    def resume_request(self, index: int, session_id: str = "") -> ResumeRequest:
        """Returns a request for all events of a choice. Must be called before the choice's first
        event. `ResumeRequest.cuts` has two token counts. The client has all parts of the events up
        to the first count, and perhaps some parts of an event that ends at the second count."""
        known = self._sent[index]
        begun, num_tokens, _ = self._begun
        end = known.num_tokens + (num_tokens if begun == index else 0)
        return ResumeRequest(
            session_id, known.num_tokens, tokens_digest=known.digest, cuts=(known.num_tokens, end)
        )

    @property
    def has_begun(self) -> bool:
        return any(now != Position() for now in self._now)

    def is_behind(self, index: int) -> bool:
        """Whether the choice's next event repeats an event that the client has."""
        now, known = self._now[index], self._sent[index]
        return now.num_tokens < known.num_tokens or now.num_others < known.num_others

    def unsent(
        self, index: int, event: Event, parts: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields those `parts` of an event that the client lacks, each with its id ("" = none)."""
        before, is_known, num_known = self._now[index], self.is_behind(index), 0
        if isinstance(event, RoundReport):  # A resumed session repeats no round reports.
            after, is_known = before, False
        else:
            after = before.after(event)
            if parts and not is_known and self._begun[0] == index:
                num_known, self._begun = self._begun[2], (0, 0, 0)
        for place, part in enumerate(() if is_known else parts, 1):
            if place <= num_known:
                continue
            self.num_parts += 1
            num_tokens = after.num_tokens - self._sent[index].num_tokens
            begun = f"+{index}-{num_tokens}-{place}"
            if place == len(parts):
                begun, self._sent[index] = "", after
            yield part, self._id(begun)
        self._now[index] = after

    def _id(self, begun: str = "") -> str:
        if len(self._now) > EVENT_ID_CHOICES_MAX:
            return ""
        each = (
            f"{position.num_tokens}-{position.digest:x}-{position.num_others}"
            for position in self._sent
        )
        return f"{self.num_parts}:{'.'.join(each)}{begun}"


def request_keys(key: str, tenant: str, digest: str, num_choices: int) -> list[RequestKey]:
    """Derives a key for each choice from the `Idempotency-Key`. `digest` is a hash of the request.
    Raises `BadRequest`."""
    if not _KEY.fullmatch(key):
        reason = f"must be 1 to {IDEMPOTENCY_KEY_CHARS_MAX} printable ASCII characters"
        raise BadRequest("Idempotency-Key", reason)
    names = (json.dumps([tenant, key, index]).encode() for index in range(num_choices))
    return [RequestKey(hashlib.sha256(name).hexdigest(), digest) for name in names]


class _Turn:
    """The running requests with one key, oldest first. Each later request took the session over."""

    def __init__(self) -> None:
        self.running: list[Progress] = []
        self.ended = asyncio.Event()
        self.num_waiting = 0


class RepeatedRequests:
    """Lets only one request with each key run at a time, so that repeated requests do not take the
    session from each other again and again."""

    def __init__(self) -> None:
        self._turns: dict[RequestKey, _Turn] = {}
        self._num_waiting: Counter[str] = Counter()
        """Tenant -> number of its requests that wait."""

    @asynccontextmanager
    async def turn(self, key: RequestKey, progress: Progress, tenant: str) -> AsyncIterator[None]:
        """Waits until no other request with this key runs. Raises `Unavailable` if too many
        requests with this key wait already, and `Overloaded` if too many of the tenant do.

        A request with a `Last-Event-ID` takes the session over at once. Its client has parts of the
        running request's answer, so the connection of that request has broken. If the new request
        fails before its first event, the running request goes on."""
        while not progress.num_parts and (turn := self._turns.get(key)) is not None:
            if turn.num_waiting >= _WAITING_MAX:
                raise Unavailable(
                    f"{_WAITING_MAX} requests with this Idempotency-Key are waiting already"
                )
            if self._num_waiting[tenant] >= (most := REPEATED_REQUESTS_MAX):
                raise Overloaded(
                    f"{most} requests of your tenant wait for running requests with the same "
                    "Idempotency-Key, the most allowed; try again later",
                    limit="repeated_requests",
                )
            turn.num_waiting += 1
            self._num_waiting[tenant] += 1
            try:
                await turn.ended.wait()
            finally:
                turn.num_waiting -= 1
                self._num_waiting[tenant] -= 1
                self._num_waiting += Counter()  # Removes entries that are 0.
        turn = self._turns.setdefault(key, _Turn())
        turn.running.append(progress)
        try:
            yield
        finally:
            is_newest = turn.running[-1] is progress
            turn.running.remove(progress)
            # The first event of the newest request has ended the streams of the other requests.
            if not turn.running or (is_newest and progress.has_begun):
                turn.ended.set()
                if self._turns.get(key) is turn:
                    del self._turns[key]
