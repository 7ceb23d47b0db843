"""What a session's owner decides, sends to the store, and may show."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.decoding.loop import COMMIT_GRACE_S
from outrider.config.deployment import WAIT_MS_MAX
from outrider.errors import DataLoss, InvariantError, StaleEpoch
from outrider.foundation.tokens import TokenSequence
from outrider.limits import APPEND_TOKENS_MAX, DEADLINE_MS_MAX, KEY_TTL_S, TOKEN_ID_MAX
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState, Counters, FinishReason
from tests.support.session_model import new_session

NO_COUNTS = Counters()


def opened() -> Session:
    return Session(new_session())


def sent(session: Session) -> tuple[int, tuple[int, ...]] | None:
    append = session.next_append()
    return None if append is None else (append.expected_length, append.token_ids)


def test_an_append_says_all_that_a_successor_must_know() -> None:
    session = opened()
    draft, target = CacheState("d", 3), CacheState("t", 4)
    session.decide([1], Counters(1, 2, 0), draft=draft, target=target, logprobs=['{"a": 1}'])
    session.decide([2], Counters(2, 4, 0), target=CacheState("t", 5), logprobs=['{"a": 2}'])
    append = session.next_append()
    assert (append.session_id, append.epoch, append.owner) == (session.session_id, 1, "anna")
    assert append.prefix_digest == TokenSequence([*new_session().token_ids, 1, 2]).digest()
    assert (append.draft, append.target) == (draft, CacheState("t", 5))
    assert append.counters == Counters(2, 4, 0)
    assert append.logprobs == '{"a": 1}\n{"a": 2}\n'


def test_a_long_gap_is_sent_in_pieces() -> None:
    session = opened()
    num_tokens = APPEND_TOKENS_MAX + 1
    session.decide([7] * num_tokens, NO_COUNTS, logprobs=["{}"] * num_tokens)
    append = session.next_append()
    assert len(append.token_ids) == append.logprobs.count("\n") == APPEND_TOKENS_MAX
    assert append.prefix_digest == session.tokens.digest(3 + APPEND_TOKENS_MAX)
    session.acknowledge(3 + APPEND_TOKENS_MAX)
    assert sent(session) == (3 + APPEND_TOKENS_MAX, (7,))


def test_a_lost_session_sends_and_shows_nothing_more() -> None:
    session = opened()
    session.decide([1], NO_COUNTS)
    error = StaleEpoch("taken over")
    session.supersede(error)
    assert session.error is error
    assert session.next_append() is None
    assert session.showable_length == 3
    for illegal in (
        lambda: session.decide([2], NO_COUNTS),
        lambda: session.acknowledge(4),
        lambda: session.supersede(DataLoss("gone")),
    ):
        with pytest.raises(InvariantError, match=r"lost|is over"):
            illegal()


def test_an_ended_session_sends_what_the_store_lacks() -> None:
    session = opened()
    session.decide([1], NO_COUNTS)
    session.finish(FinishReason.STOP)
    for illegal in (
        lambda: session.decide([2], NO_COUNTS),
        lambda: session.finish(FinishReason.LENGTH),
        lambda: session.acknowledge(5),
    ):
        with pytest.raises(InvariantError, match=r"over: stop|store holds 5"):
            illegal()
    assert sent(session) == (3, (1,))
    session.acknowledge(4)
    assert session.showable_length == 4


def test_log_probabilities_are_of_all_tokens_or_of_none() -> None:
    for first, second in (([], ["{}"]), (["{}"], [])):
        session = opened()
        session.decide([1], NO_COUNTS, logprobs=first)
        with pytest.raises(InvariantError, match="some tokens"):
            session.decide([2], NO_COUNTS, logprobs=second)


def test_a_resumed_session_goes_on_from_what_is_stored() -> None:
    """Line separators inside a JSON string do not split it."""
    begun = opened()
    begun.decide([8, 9], Counters(1, 2, 1))
    record = replace(
        begun.record,
        owner="bert",
        epoch=4,
        token_ids=tuple(begun.tokens.ids),
        counters=begun.counters,
        logprobs='"a\u2028"\n"b"\n',
    )
    session = Session(record)
    assert (session.epoch, session.record.owner) == (4, "bert")
    assert (session.length, session.showable_length, session.prompt_length) == (5, 5, 3)
    assert session.counters == Counters(1, 2, 1)
    assert session.logprobs == ['"a\u2028"', '"b"']
    session.decide([1], NO_COUNTS, logprobs=["2"])
    assert sent(session) == (5, (1,))
    with pytest.raises(InvariantError):
        Session(replace(record, finish_reason=FinishReason.STOP))


class OwnerMachine(RuleBasedStateMachine):
    """The store may lose its last tokens. In the end all is stored, with log-probabilities. What
    may be shown never shrinks, and was stored at some time."""

    def __init__(self) -> None:
        super().__init__()
        self.session = opened()
        self.decided = list(new_session().token_ids)
        self.stored = list(self.decided)
        self.longest = self.shown = len(self.decided)

    @rule(ids=st.lists(st.integers(0, TOKEN_ID_MAX), min_size=1, max_size=5))
    def decide(self, ids: list[int]) -> None:
        self.session.decide(ids, NO_COUNTS, logprobs=[str(one) for one in ids])
        self.decided += ids

    @precondition(lambda self: self.session.num_uncommitted > 0)
    @rule(answered=st.booleans())
    def send(self, answered: bool) -> None:
        append = self.session.next_append()
        answer = self.decided[max(3, append.expected_length) :]
        assert append.logprobs == "".join(f"{one}\n" for one in answer)
        if append.expected_length == len(self.stored):
            self.stored += append.token_ids
            assert append.prefix_digest == TokenSequence(self.stored).digest()
        self.longest = max(self.longest, len(self.stored))
        if answered:
            self.session.acknowledge(len(self.stored))

    @rule(left=st.integers(0, 20))
    def lose_tail(self, left: int) -> None:
        del self.stored[left:]

    @invariant()
    def holds(self) -> None:
        self.session.check_integrity()
        assert self.stored == self.decided[: len(self.stored)]
        assert list(self.session.tokens.ids) == self.decided
        assert self.shown <= self.session.showable_length <= self.longest
        self.shown = self.session.showable_length

    def teardown(self) -> None:
        """The store answers the session's end with its length."""
        for _ in range(2):
            self.session.acknowledge(len(self.stored))
            append = self.session.next_append()
            if append is not None:
                assert append.expected_length == len(self.stored)
                self.stored += append.token_ids
        assert self.stored == self.decided
        assert self.session.showable_length == self.session.length


TestOwner = OwnerMachine.TestCase
TestOwner.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_what_a_key_keeps_does_not_expire_under_a_running_session() -> None:
    """Nothing renews its time to live while its session runs, and while its client is away."""
    assert KEY_TTL_S > (DEADLINE_MS_MAX + WAIT_MS_MAX) / 1e3 + COMMIT_GRACE_S
