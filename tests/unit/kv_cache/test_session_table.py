"""The table of what a replica holds, against a coordinator's view."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.config.emulated_spec import EmulatedSpec
from outrider.engine.emulated import EmulatedEngine
from outrider.foundation.tokens import TokenSequence
from outrider.interfaces.engine import SequenceStep
from outrider.interfaces.messages import ReplyKey, Resync, RoundHead
from outrider.kv_cache.session_table import SessionTable
from tests.support.pages import check_pages
from tests.support.rounds import make_head

SPEC = EmulatedSpec.parse("vocab_size=16,support=4,max_model_len=512,num_pages=256")


def head(committed: list[int], base_length: int, session_id: str = "s") -> RoundHead:
    """A round of a session with these committed tokens, stating the first `base_length`."""
    return replace(make_head(committed, base_length), session_id=session_id)


class Replica:
    """A service's use of table and engine."""

    def __init__(self, sequences_max: int = 8, num_pages: int = 256) -> None:
        spec = SPEC.model_copy(update={"num_pages": num_pages})
        self.engine = EmulatedEngine(spec, "target")
        self.table = SessionTable(self.engine)
        self.table.sequences_max = sequences_max

    def answer(self, at: RoundHead, guesses: tuple[int, ...] = ()) -> int | Resync:
        """The length held after running the new tokens and some guesses."""
        aligned = self.table.align(at)
        if isinstance(aligned, Resync):
            return aligned
        run = (*aligned.new_tokens, *guesses)
        self.engine.forward([SequenceStep(at.session_id, run, 1)])
        return self.engine.length(at.session_id)


@pytest.mark.parametrize(
    ("committed", "base_length", "offered"),
    [
        # Guesses are not offered: the coordinator may have refused them.
        ([1, 2, 3, 7, 8, 9], 5, [1, 2, 3]),
        # A coordinator died after it had decided more than was stored. The tokens that are held are
        # no shorter than the stated prefix, so some of them are wrong.
        ([1, 9, 3, 4], 2, []),
        ([1, 9, 3, 4], 3, []),
        # No sequence can have the stated length.
        ([1], 10**9, [1, 2, 3]),
    ],
)
def test_resync_offers_what_is_known_to_be_committed(
    committed: list[int], base_length: int, offered: list[int]
) -> None:
    replica = Replica()
    replica.answer(head([1, 2, 3], 0), (4, 5))
    asked = replace(head(committed, min(base_length, len(committed))), base_length=base_length)
    answer = replica.answer(asked)
    assert answer == Resync(asked.key, len(offered), TokenSequence(offered).digest())
    again = [*offered, 7, 8, 9]
    assert replica.answer(head(again, len(offered))) == len(again)


def test_resync_offers_no_committed_tokens_that_were_not_run() -> None:
    """A step without room for the session leaves such tokens."""
    replica = Replica()
    replica.answer(head([1, 2], 0))
    replica.table.align(head([1, 2, 3, 4], 2))
    answer = replica.answer(head([1, 2, 3, 4, 5], 4))
    assert answer == Resync(ReplyKey("s", 1, 0), 2, TokenSequence([1, 2]).digest())


PROMPT = list(range(10)) * 4
"""40 tokens, of which a page holds 16."""


def test_a_new_session_begins_on_what_others_have_left_of_its_tokens() -> None:
    """A session of the same tenant begins on two whole pages, one of another tenant on none. The
    last token is always left to run, as its logits are gone."""
    replica = Replica()
    replica.answer(head(PROMPT, 0, session_id="a"))
    replica.table.release("a")
    aligned = replica.table.align(head(PROMPT, 0, session_id="b"))
    assert list(aligned.sequence.ids) == PROMPT[:32]
    assert aligned.new_tokens == tuple(PROMPT[32:])
    other = replace(head(PROMPT, 0, session_id="c"), tenant="other")
    assert len(replica.table.align(other).new_tokens) == 40
    short = head(PROMPT[:32], 0, session_id="d")
    assert len(replica.table.align(short).sequence) == 16


def test_sessions_rank_by_age_and_tenants_take_turns() -> None:
    """A session's age counts from when it was first seen, also after a loss of slots."""
    replica = Replica()
    for name in "abcd":
        replica.answer(head([1, 2], 0, session_id=name))
    replica.answer(replace(head([1, 2], 0, session_id="e"), tenant="other"))
    assert [*replica.table.ranks(())] == ["a", "e", "b", "c", "d"]
    replica.engine.release("a")
    assert [*replica.table.ranks({"x"})] == ["b", "e", "c", "d"]
    assert replica.table.ranks({"a"}) == {"a": 0, "e": 1, "b": 2, "c": 3, "d": 4}


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


class CoordinatorAndReplica(RuleBasedStateMachine):
    """Tokens are committed, guessed, evicted, repeated and delayed in any order. An aligned session
    holds exactly the stated prefix, and a coordinator that follows a `Resync` needs one more
    message."""

    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica(sequences_max=3)
        self.committed: dict[str, list[int]] = {}
        self.sent: list[tuple[RoundHead, tuple[int, ...]]] = []

    @rule(name=st.sampled_from("abcde"), more=TOKENS, guesses=TOKENS, back=st.integers(0, 6))
    def play(self, name: str, more: list[int], guesses: list[int], back: int) -> None:
        committed = self.committed.setdefault(name, [])
        committed.extend(more)
        base = max(0, len(committed) - len(more) - back)
        at = head(committed, base, session_id=name)
        self.sent.append((at, tuple(guesses)))
        answer = self.replica.answer(at, tuple(guesses))
        if isinstance(answer, Resync):
            held = TokenSequence(committed[: answer.cached_length])
            assert answer.cached_length < base
            assert held.digest() == answer.prefix_digest
            at = head(committed, answer.cached_length, session_id=name)
            answer = self.replica.answer(at, tuple(guesses))
        assert answer == len(committed) + len(guesses)
        assert self.replica.engine.tokens(name).ids == committed + list(guesses)

    @rule(at=st.integers(0, 100))
    def late(self, at: int) -> None:
        if self.sent:
            self.replica.answer(*self.sent[at % len(self.sent)])

    @rule(name=st.sampled_from("abcde"))
    def release(self, name: str) -> None:
        self.replica.table.release(name)

    @rule(name=st.sampled_from("abcde"))
    def evict(self, name: str) -> None:
        self.replica.engine.release(name)

    @invariant()
    def integrity(self) -> None:
        check_pages(self.replica.engine)
        assert len(self.replica.table) <= 3


TestReplica = CoordinatorAndReplica.TestCase
TestReplica.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
