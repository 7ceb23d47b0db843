"""What a client is shown of one session, and what must be true of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.decoding.resumption import read_logprobs
from outrider.errors import check
from outrider.interfaces.messages import PositionLogprobs
from outrider.interfaces.request import Event, Finished, GenerateRequest, Started, Tokens
from outrider.sessions.store import FinishReason, SessionRecord
from tests.simulation.redis_host import History
from tests.simulation.toy import allowed_after, ending_of, fault_free, logprobs_of, rule_of

TOLERANCE = 1e-6


class Answer:
    """The events of one session so far."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.session_id = ""
        self.token_ids: list[int] = []
        self.text = ""
        self.finished: Finished | None = None
        self.num_events = 0

    @property
    def shapes(self) -> list[str]:
        """What has ended the answer, besides its length."""
        names = ("stop_string", "stop_token_id")
        found = [name for name in names if getattr(self.finished, name, None) is not None]
        is_late = self.finished is not None and self.finished.finish_reason is FinishReason.DEADLINE
        is_bound = self.request.constraint is not None
        return [*found, *["deadline"] * is_late, *["constraint"] * is_bound]

    def add(self, event: Event, history: History) -> None:
        """Raises `InvariantError` for tokens with a gap before them, with wrong log-probabilities,
        or that were not stored."""
        self.num_events += 1
        if isinstance(event, Started):
            self.session_id = event.session_id
        elif isinstance(event, Tokens):
            check(event.first_index == len(self.token_ids), f"a gap before {event}")
            self.token_ids.extend(event.token_ids)
            self.text += event.text_delta
            whole = (*self.request.prompt, *self.token_ids)  # type: ignore[arg-type]
            check(history.held(self.session_id, whole), "shown, but never stored")
            self._check_entries(event.logprobs, event.first_index)
        elif isinstance(event, Finished):
            self.finished = event

    def _check_entries(self, entries: Sequence[PositionLogprobs], first: int) -> None:
        """Compares the log-probabilities of all tokens from index `first` on with the target's."""
        expected: list[PositionLogprobs] = []
        if self.request.logprobs is not None:
            expected = logprobs_of(self.request, self.token_ids, first)
        is_right = len(entries) == len(expected) and all(map(_equal, entries, expected))
        check(is_right, f"log-probabilities {entries}, the target's are {expected}")

    def check_part(self) -> None:
        """Raises `InvariantError` if the tokens or the text so far cannot begin an answer. Under
        coupled and greedy, the tokens must be the target's own."""
        shown = self.token_ids
        if shown and rule_of(self.request).absolute_noise:
            expected = fault_free(self.request, shown)
            check(expected == shown, f"{shown} were shown, fault-free they are {expected}")
        if (constraint := self.request.constraint) is not None:
            for place, token_id in enumerate(shown):
                is_allowed = allowed_after(constraint, shown[:place])[token_id]
                check(is_allowed, f"{shown} was shown under {constraint}")
        end = ending_of(self.request, shown)
        check(end.num_tokens == len(shown), f"{shown} were shown after {end}")
        check(end.text.startswith(self.text), f"{self.text} was shown of {end}")

    def check_end(self, is_cancelled: bool, is_late: bool) -> None:
        """Raises `InvariantError` unless the answer is whole, its client has cancelled it, or its
        deadline has passed."""
        finished, end = self.finished, ending_of(self.request, self.token_ids)
        check(finished is not None, "the stream ended without its last event")
        assert finished is not None
        check(self.text == end.text, f"{self.text} was shown of {end}")
        early = {FinishReason.CANCELLED: is_cancelled, FinishReason.DEADLINE: is_late}
        if not early.get(finished.finish_reason, False):
            shown = finished.finish_reason, finished.stop_string, finished.stop_token_id
            wanted = end.finish_reason, end.stop_string, end.stop_token_id
            check(shown == wanted, f"ended with {finished} instead of {end}")

    def check_stored(self, record: SessionRecord) -> None:
        """Raises `InvariantError` if the store has something else than was shown. A stream without
        a last event ended because another coordinator has cancelled the session."""
        reason = FinishReason.CANCELLED if self.finished is None else self.finished.finish_reason
        check(record.finish_reason is reason, f"{reason} is stored as {record.finish_reason}")
        if self.finished is None:
            return
        whole = (*self.request.prompt, *self.token_ids)  # type: ignore[arg-type]
        check(record.token_ids == whole, "the store holds something else")
        self._check_entries([read_logprobs(line) for line in record.logprobs.split("\n")[:-1]], 0)

    def check_same(self, other: Answer) -> None:
        """Raises `InvariantError` unless both clients saw the same session."""
        one, two = ((each.session_id, each.token_ids, each.text) for each in (self, other))
        check(one == two, f"{one} and {two} have the same idempotency key")


def _equal(found: PositionLogprobs, expected: PositionLogprobs) -> bool:
    """Whether the likeliest tokens are the same, and the numbers almost."""
    ids, numbers = _parts(found)
    expected_ids, expected_numbers = _parts(expected)
    return ids == expected_ids and numbers == pytest.approx(expected_numbers, abs=TOLERANCE)


def _parts(entry: PositionLogprobs) -> tuple[list[int], list[float]]:
    ids = [token_id for token_id, _ in entry.top]
    return ids, [entry.logprob, *(number for _, number in entry.top)]
