"""A naive model of a session store, and the machine that drives a real one beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.errors import (
    DataLoss,
    InvariantError,
    NotFound,
    OutriderError,
    StaleEpoch,
    Unavailable,
)
from outrider.sessions.state import Session
from outrider.sessions.store import (
    Append,
    CacheState,
    Counters,
    Finish,
    FinishReason,
    SessionRecord,
    SessionState,
    SessionStore,
    released,
)
from outrider.speculation.sampling_params import Rule
from outrider.tokens import TokenSequence

IDS = tuple(f"{k:032x}" for k in range(3))
OWNERS = ("anna", "bert")


def new_session(
    session_id: str = IDS[0],
    owner: str = OWNERS[0],
    prompt_ids: tuple[int, ...] = (5, 0, 2**31 - 1),
) -> SessionRecord:
    return SessionRecord.new(
        session_id, "tenant", owner, 2**64 - 1, Rule.BLOCK, '{"ü": 1}', prompt_ids
    )


def digest(token_ids: list[int] | tuple[int, ...]) -> int:
    return TokenSequence(token_ids).digest()


def next_append(session: Session) -> Append:
    append = session.next_append()
    assert append is not None
    return append


def end_of(session: Session, reason: FinishReason = FinishReason.STOP) -> Finish:
    """Ends a session; returns what its owner sends then."""
    session.finish(reason)
    return session.ending()


@dataclass
class Modelled:
    new: SessionRecord
    owner: str
    tokens: list[int]
    stored_digest: int
    epoch: int = 1
    counts: bool = True
    """Whether the stored tokens count: not those of a former owner."""
    pending: list[int] = field(default_factory=list)
    pending_logprobs: str = ""
    """Sent again, while the stored ones do not count."""
    reason: FinishReason | None = None
    logprobs: str = ""
    draft: CacheState = field(default_factory=CacheState)
    target: CacheState = field(default_factory=CacheState)
    counters: Counters = field(default_factory=Counters)

    @property
    def length(self) -> int:
        return len(self.tokens if self.counts else self.pending)

    def adopt(self, epoch: int, owner: str) -> None:
        """An owner writes whose take-over the store has lost."""
        self.epoch, self.owner, self.reason = epoch, owner, None
        self.counts, self.pending, self.pending_logprobs = False, [], ""

    def record(self) -> Any:
        if len(self.tokens) < len(self.new.token_ids) or digest(self.tokens) != self.stored_digest:
            return DataLoss
        return SessionRecord(
            self.new.session_id, self.new.tenant, self.owner,
            self.new.seed, self.new.rule, self.new.parameters, self.new.prompt_length,
            tuple(self.tokens), self.stored_digest, self.epoch,
            SessionState.FINISHED if self.reason else SessionState.RUNNING,
            self.draft, self.target, self.counters, self.logprobs, self.reason,
        )  # fmt: skip


class NaiveStore:
    """Each method returns what the store should return, or the type of what it should raise.
    Written from the docstrings of `SessionStore`, not from a store."""

    def __init__(self) -> None:
        self.sessions: dict[str, Modelled] = {}
        self.leases: dict[str, set[str]] = {}
        """By owner: the sessions that others asked for."""

    def write(self, session_id: str, epoch: int, owner: str) -> Any:
        """The session that an owner may write to."""
        s = self.sessions.get(session_id)
        if s is None:
            return DataLoss
        if epoch < s.epoch:
            return StaleEpoch
        if epoch > s.epoch:
            s.adopt(epoch, owner)
        return s if s.owner == owner else StaleEpoch

    def open(self, new: SessionRecord) -> Any:
        old = self.sessions.get(new.session_id)
        if old is None:
            self.sessions[new.session_id] = Modelled(
                new, new.owner, list(new.token_ids), digest(new.token_ids)
            )
            return None
        same = old.owner == new.owner and len(old.new.token_ids) == len(new.token_ids)
        return None if same else InvariantError

    def append(self, a: Append) -> Any:
        s = self.write(a.session_id, a.epoch, a.owner)
        if not isinstance(s, Modelled) or s.length != a.expected_length or not a.token_ids:
            return s.length if isinstance(s, Modelled) else s
        if not s.counts:
            s.pending += a.token_ids
            s.pending_logprobs += a.logprobs
            if a.more_follow:
                return s.length
            s.tokens, s.logprobs, s.counts = s.pending, s.pending_logprobs, True
        else:
            s.tokens += a.token_ids
            s.logprobs += a.logprobs
        s.stored_digest, s.draft, s.target, s.counters = (
            a.prefix_digest, a.draft, a.target, a.counters,
        )  # fmt: skip
        return s.length

    def release(self, session_id: str, epoch: int, owner: str) -> Any:
        s = self.sessions.get(session_id)
        if s is not None and s.reason is not None and epoch > s.epoch:
            return None
        s = self.write(session_id, epoch, owner)
        if not isinstance(s, Modelled):
            return s
        if s.reason is None:
            s.owner = released(owner)
        return None

    def take_over(self, seen: SessionRecord, owner: str) -> Any:
        is_others = seen.state is SessionState.RUNNING and seen.owner != owner
        if is_others and seen.owner in self.leases:
            self.leases[seen.owner].add(seen.session_id)
            return Unavailable
        s = self.sessions.get(seen.session_id)
        if s is None:
            return NotFound
        if s.reason is None:
            if (s.epoch, s.owner) != (seen.epoch, seen.owner):
                return Unavailable
            s.epoch, s.owner, s.counts = s.epoch + 1, owner, True
        return s.record()

    def finish(self, f: Finish) -> Any:
        s = self.write(f.session_id, f.epoch, f.owner)
        if not isinstance(s, Modelled):
            return s
        if s.reason is None and (f.length is None or (s.counts and f.length == s.length)):
            s.reason, s.counters = f.reason, f.counters
        return s.length

    def load(self, session_id: str) -> Any:
        s = self.sessions.get(session_id)
        return NotFound if s is None else s.record()


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
ids = st.sampled_from(IDS)
owners = st.sampled_from(OWNERS)
caches = st.builds(CacheState, st.sampled_from(["", "r1"]), st.integers(0, 2**40))
counts = st.builds(Counters, *[st.integers(0, 2**40)] * 3)


class StoreMachine(RuleBasedStateMachine):
    """Whatever is asked of a store, in whatever order, it answers as the naive model does."""

    store: SessionStore

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model = NaiveStore()
        self.seen: list[SessionRecord] = []
        self.set_up()

    def set_up(self) -> None:
        """Makes `self.store`."""
        raise NotImplementedError

    def end_leases(self) -> None:
        """Lets all leases run out."""
        raise NotImplementedError

    def replace_tokens(self, session_id: str, token_ids: tuple[int, ...]) -> None:
        """Damages what is stored, as only a broken server can."""
        raise NotImplementedError

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def outcome(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self.run(coroutine)
        except OutriderError as error:
            return type(error)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()

    @rule(session_id=ids, owner=owners, prompt=st.sampled_from([(1,), (7, 2**32 - 1)]))
    def open(self, session_id: str, owner: str, prompt: tuple[int, ...]) -> None:
        new = new_session(session_id, owner, prompt)
        assert self.outcome(self.store.open(new)) == self.model.open(new)

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        appends = []
        for session_id in data.draw(st.lists(ids, max_size=3, unique=True)):
            s = self.model.sessions.get(session_id)
            stored = s.tokens if s is not None else []
            if s is not None and not s.counts:
                stored = data.draw(st.sampled_from([stored, s.pending, s.pending]))
            lengths = st.sampled_from([len(stored), len(stored), 0, max(len(stored) - 1, 0), 9])
            epochs = st.sampled_from([s.epoch, s.epoch, 1, 2, 3] if s is not None else [1])
            new = data.draw(tokens)
            expected = data.draw(lengths)
            appends.append(
                Append(
                    session_id, data.draw(epochs), data.draw(owners), expected, new,
                    digest((*stored[:expected], *new)), data.draw(caches), data.draw(caches),
                    data.draw(counts), data.draw(st.sampled_from(["", '{"é\u2028": 1}\n'])),
                    data.draw(st.booleans()),
                )
            )  # fmt: skip
        answers = self.run(self.store.append(appends))
        found = [type(a) if isinstance(a, OutriderError) else a for a in answers]
        assert found == [self.model.append(a) for a in appends]

    @rule(owner=owners)
    def hold_lease(self, owner: str) -> None:
        found = self.run(self.store.hold_lease(owner))
        assert found == sorted(self.model.leases.get(owner, ()))
        self.model.leases[owner] = set()

    @rule(owner=owners)
    def end_lease(self, owner: str) -> None:
        self.run(self.store.end_lease(owner))
        self.model.leases.pop(owner, None)

    @rule(session_id=ids, epoch=st.integers(1, 3), owner=owners)
    def release(self, session_id: str, epoch: int, owner: str) -> None:
        found = self.outcome(self.store.release(session_id, epoch, owner))
        assert found == self.model.release(session_id, epoch, owner)

    @rule(session_id=ids)
    def look(self, session_id: str) -> None:
        """What is seen now may be taken over later."""
        found = self.outcome(self.store.load(session_id))
        if isinstance(found, SessionRecord):
            self.seen.append(found)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), owner=owners)
    def take_over(self, data: st.DataObject, owner: str) -> None:
        seen = data.draw(st.sampled_from(self.seen[-3:]))
        found = self.outcome(self.store.take_over(seen, owner))
        assert found == self.model.take_over(seen, owner)
        if isinstance(found, SessionRecord):
            self.seen.append(found)

    @rule(
        finish=st.builds(
            Finish,
            ids, st.integers(1, 3), owners, st.none() | st.integers(1, 9),
            st.sampled_from(FinishReason), counts,
        )
    )  # fmt: skip
    def finish(self, finish: Finish) -> None:
        """Beside the model's, the rules that hold of every end that is recorded."""
        before = self.outcome(self.store.load(finish.session_id))
        found = self.outcome(self.store.finish(finish))
        assert found == self.model.finish(finish)
        after = self.outcome(self.store.load(finish.session_id))
        if found is StaleEpoch:
            assert after == before
        elif isinstance(before, SessionRecord) and isinstance(after, SessionRecord):
            assert (after.epoch, after.owner) == (finish.epoch, finish.owner)
            assert before.epoch < after.epoch or before.owner == after.owner
            if after.finish_reason is not None and after != before:
                assert finish.length in (None, len(after.token_ids))

    @rule()
    def leases_run_out(self) -> None:
        self.end_leases()
        self.model.leases.clear()

    @rule(session_id=ids, left=st.integers(0, 3))
    def tail_is_torn_off(self, session_id: str, left: int) -> None:
        session = self.model.sessions.get(session_id)
        if session is not None and session.counts:
            del session.tokens[left:]
            self.replace_tokens(session_id, tuple(session.tokens))

    @invariant()
    def loads_are_equal(self) -> None:
        for session_id in IDS:
            assert self.outcome(self.store.load(session_id)) == self.model.load(session_id)
