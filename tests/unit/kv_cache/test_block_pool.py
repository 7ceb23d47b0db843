"""Pages of sequences: which are shared, copied, remembered and evicted, and in which order. The
pool is compared with a model that remembers what was written to each slot."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.errors import OutOfPages
from outrider.interfaces.engine import SequenceStep
from outrider.kv_cache.block_pool import BlockPool, Copy
from tests.support.pages import check_pages

SIZE = 4
PROMPT = tuple(range(100, 100 + 3 * SIZE))


def step(name: str, *ids: int) -> SequenceStep:
    return SequenceStep(name, ids, 1)


def append(pool: BlockPool, steps: Sequence[SequenceStep]) -> list[Copy]:
    """Runs a step that succeeds."""
    copies = pool.append(steps)
    pool.written(steps)
    return copies


def run(pool: BlockPool, name: str, *ids: int) -> None:
    """A step of one sequence."""
    append(pool, [step(name, *ids)])


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_pages=8, page_size=SIZE)


@pytest.mark.parametrize("kept", [-2, 0, 3, None])
def test_slots_of_a_draft_layer_are_not_shared(pool: BlockPool, kept: int | None) -> None:
    """The sequence keeps some of them, or is released. The model ran one whole page."""
    length = 2 * SIZE - 2
    run(pool, "a", *PROMPT[:length])
    pool.append([step("a", *PROMPT[length:])], whole=False)
    if kept is not None:
        pool.keep("a", length + kept)
        assert pool.attach("b", PROMPT) == SIZE
    pool.release("a")
    assert pool.attach("c", PROMPT) == SIZE
    run(pool, "c", *PROMPT[SIZE:])
    assert pool.attach("d", (*PROMPT, 1)) == 3 * SIZE
    check_pages(pool)


def test_whole_pages_of_a_running_sequence_are_shared(pool: BlockPool) -> None:
    steps = [step("a", *PROMPT, 7)]
    pool.append(steps)
    assert pool.attach("too early", PROMPT) == 0
    pool.written(steps)
    assert pool.attach("b", PROMPT) == 2 * SIZE
    assert pool.attach("c", (*PROMPT, 7, 8)) == 3 * SIZE
    assert pool.attach("d", PROMPT[: SIZE + 1]) == SIZE
    assert pool.attach("e", PROMPT[1:]) == 0
    assert list(pool.pages("c")) == list(pool.pages("a"))[:3]
    assert pool.tokens("c").since(0) == PROMPT
    for name in "bc":
        run(pool, name, 7)
    counts = pool.counts()
    assert (counts.prefix_queries, counts.prefix_hits) == (2 * len(PROMPT) + 2, 5 * SIZE)
    check_pages(pool)


def test_what_is_unused_for_longest_goes_first(pool: BlockPool) -> None:
    """The last page of a prefix is evicted first, and no more pages are evicted than needed."""
    run(pool, "old", *PROMPT[: 2 * SIZE])
    run(pool, "gone", 1, 2, 3, 4, 5, 6, 7, 8)
    pool.release("old")
    pool.release("gone")
    assert pool.counts().num_evictable == 4
    append(pool, [step("x", *range(5 * SIZE))])
    assert pool.attach("old", PROMPT) == SIZE
    pool.release("old")
    append(pool, [step("x", *range(2 * SIZE))])
    assert pool.attach("old", PROMPT) == SIZE, "it was used after `gone`"
    assert pool.attach("gone", (1, 2, 3, 4, 5)) == 0
    check_pages(pool)


NUM_PAGES, PAGE_SIZE = 12, 3
NAMES = "abcde"
IDS = st.integers(1, 7).flatmap(
    lambda num: st.sampled_from([[0] * num, [0] * num, [1] * num, [0] * (num - 1) + [1]])
)
"""Most are alike, so that prefixes are shared."""
STEPS = st.lists(
    st.tuples(st.sampled_from(NAMES), IDS), min_size=1, max_size=3, unique_by=lambda step: step[0]
)

Value = tuple[Any, ...]
"""What keys and values depend on: a salt, and the ids of all slots attended to, its own last."""


class Slots:
    """The pages of an engine: copies what the pool says, and writes where its tables point."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.values: list[Value | None] = [None] * (pool.num_pages * pool.page_size)

    def slot(self, name: str, index: int) -> int:
        page, size = self.pool.pages(name)[index // self.pool.page_size], self.pool.page_size
        return page * size + index % size

    def copy_pages(self, copies: list[Copy]) -> None:
        size = self.pool.page_size
        for origin, target in copies:
            copied = self.values[origin * size : (origin + 1) * size]
            self.values[target * size : (target + 1) * size] = copied

    def held(self, name: str) -> list[Value | None]:
        return [self.values[self.slot(name, i)] for i in range(self.pool.length(name))]


class ModelSequence:
    """One sequence of the naive model, which shares nothing."""

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self.ids: list[int] = []

    @property
    def values(self) -> list[Value]:
        return [(self.salt, *self.ids[: index + 1]) for index in range(len(self.ids))]


class PoolAndModel(RuleBasedStateMachine):
    """Sequences begin, run, are cut, branch and end in any order. The slots of each hold what was
    run for it. A call that raises an error changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_PAGES, PAGE_SIZE)
        self.slots = Slots(self.pool)
        self.model: dict[str, ModelSequence] = {}

    def state(self) -> tuple[Any, ...]:
        pool = self.pool
        held = {name: (pool.tokens(name).since(0), list(pool.pages(name))) for name in NAMES}
        return held, self.pool.counts(), list(self.pool._remembered)

    @rule(data=STEPS)
    def append(self, data: list[tuple[str, list[int]]]) -> None:
        steps = [step(name, *ids) for name, ids in data]
        before = self.state()
        roomy = self.pool.can_hold(steps)
        assert self.state() == before
        try:
            self.slots.copy_pages(self.pool.append(steps))
        except OutOfPages:
            assert not roomy
            assert self.state() == before
            self.check_that_nothing_fits(steps)
            return
        assert roomy
        for name, ids in data:
            sequence = self.model.setdefault(name, ModelSequence())
            held = len(sequence.ids)
            sequence.ids += ids
            for index, value in enumerate(sequence.values[held:], held):
                self.slots.values[self.slots.slot(name, index)] = value
        self.pool.written(steps)

    def check_that_nothing_fits(self, steps: list[SequenceStep]) -> None:
        pages = {p for n in self.model for p in self.pool.pages(n)}
        new = sum(
            -(-(self.pool.length(s.sequence_id) + len(s.token_ids)) // PAGE_SIZE)
            - len(self.pool.pages(s.sequence_id))
            + (self.pool.length(s.sequence_id) % PAGE_SIZE > 0)
            for s in steps
        )
        assert len(pages) + new > NUM_PAGES

    @rule(data=STEPS, leaving=st.sets(st.sampled_from(NAMES)))
    def can_hold_without(self, data: list[tuple[str, list[int]]], leaving: set[str]) -> None:
        """Pages are counted as if the sequences in `leaving` were released first."""
        steps = [step(name, *ids) for name, ids in data if name not in leaving]
        after = deepcopy(self.pool)
        for name in leaving:
            after.release(name)
        assert self.pool.can_hold(steps, leaving) == after.can_hold(steps)
        assert self.pool._num_missing(steps, leaving) == after._num_missing(steps, ())

    @rule(
        name=st.sampled_from(NAMES),
        ids=st.tuples(IDS, IDS).map(lambda both: both[0] + both[1]),
        salt=st.sampled_from(["", "", "x"]),
    )
    def attach(self, name: str, ids: list[int], salt: str) -> None:
        if self.pool.length(name):
            self.pool.release(name)
        free = self.pool.counts().num_free
        num = self.pool.attach(name, ids, salt)
        assert num % PAGE_SIZE == 0
        assert num < len(ids)
        assert self.pool.counts().num_free == free
        self.model[name] = ModelSequence(salt)
        self.model[name].ids = ids[:num]

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 9), cut=st.integers(0, 8))
    def keep(self, at: int, cut: int) -> None:
        name = sorted(self.model)[at % len(self.model)]
        sequence = self.model[name]
        length = max(0, len(sequence.ids) - cut)
        self.pool.keep(name, length)
        del sequence.ids[length:]

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 9), cut=st.integers(1, 7), ids=IDS)
    def cut_and_go_on(self, at: int, cut: int, ids: list[int]) -> None:
        self.keep(at, cut)
        self.append([(sorted(self.model)[at % len(self.model)], ids)])

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 9), branch=st.sampled_from(NAMES))
    def fork(self, at: int, branch: str) -> None:
        name = sorted(self.model)[at % len(self.model)]
        if branch == name:
            return
        self.release(branch)
        before = self.pool.counts()
        self.pool.fork(name, branch)
        assert self.pool.counts() == before
        copy = self.model[branch] = ModelSequence(self.model[name].salt)
        copy.ids = self.model[name].ids.copy()

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        self.pool.release(name)
        self.model.pop(name, None)

    @invariant()
    def slots_hold_what_was_run(self) -> None:
        for name in NAMES:
            sequence = self.model.get(name, ModelSequence())
            assert self.pool.tokens(name).ids == sequence.ids
            assert self.slots.held(name) == sequence.values

    @invariant()
    def integrity(self) -> None:
        check_pages(self.pool)
        held = {p for n in self.model for p in self.pool.pages(n)}
        counts = self.pool.counts()
        assert counts.num_free + counts.num_evictable == NUM_PAGES - len(held)


TestPoolAndModel = PoolAndModel.TestCase
TestPoolAndModel.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
"""10,000 steps."""
