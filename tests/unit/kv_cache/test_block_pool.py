"""Pages of sequences: what is shared, copied, remembered and evicted, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.engine.interface import SequenceStep
from outrider.kv_cache.block_pool import BlockPool, Copy

SIZE = 4
PROMPT = tuple(range(100, 100 + 3 * SIZE))


def step(name: str, *ids: int, parents: tuple[int, ...] = ()) -> SequenceStep:
    return SequenceStep(name, ids, 1, parents)


def append(pool: BlockPool, steps: Sequence[SequenceStep]) -> list[Copy]:
    """A step that succeeds."""
    copies = pool.append(steps)
    pool.written(steps)
    return copies


def run(pool: BlockPool, name: str, *ids: int) -> None:
    """A step of one sequence."""
    append(pool, [step(name, *ids)])


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_pages=8, page_size=SIZE)


def test_whole_pages_of_a_running_sequence_are_shared(pool: BlockPool) -> None:
    """As soon as they are written, and never the last token that is asked for."""
    steps = [step("a", *PROMPT, 7)]
    pool.append(steps)
    assert pool.attach("too early", PROMPT) == 0
    pool.written(steps)
    assert pool.attach("b", PROMPT) == 2 * SIZE
    assert pool.attach("c", (*PROMPT, 7, 8)) == 3 * SIZE
    assert pool.attach("d", PROMPT[: SIZE + 1]) == SIZE
    assert pool.attach("e", PROMPT[1:]) == 0
    assert list(pool.pages("c")) == list(pool.pages("a"))[:3]
    assert pool.token_ids("c") == PROMPT
    counts = pool.counts()
    assert (counts.prefix_queries, counts.prefix_hits) == (54, 6 * SIZE)
    pool.check_integrity()


def test_a_released_sequence_is_remembered(pool: BlockPool) -> None:
    """With no page held by anyone, and nothing is evicted to find it."""
    append(pool, [step("a", *PROMPT, 7)])
    pool.release("a")
    assert pool.counts().num_free == 5
    assert pool.counts().num_evictable == 3
    assert pool.attach("b", (*PROMPT, 7)) == 3 * SIZE
    assert pool.counts().num_evictable == 0
    pool.check_integrity()


def test_a_tree_is_no_prefix_until_it_is_cut_to_a_path(pool: BlockPool) -> None:
    """Its slots lie side by side, but do not follow each other."""
    run(pool, "a", 1, 2)
    append(pool, [step("a", 3, 4, 5, 6, 7, 8, parents=(-1, -1, 1, 2, 2, 4))])
    assert pool.attach("b", (1, 2, 3, 4, 5)) == 0
    first, second = (page * SIZE for page in pool.pages("a"))
    moves = pool.keep("a", 2, (3, 4, 6, 7))
    assert moves == [
        (first + 3, first + 2),
        (second, first + 3),
        (second + 2, second),
        (second + 3, second + 1),
    ]
    assert pool.token_ids("a") == (1, 2, 4, 5, 7, 8)
    run(pool, "a", 9, 9)
    pool.release("b")
    assert pool.attach("b", (1, 2, 4, 5, 7, 8, 9, 9, 0)) == 2 * SIZE
    pool.check_integrity()


def test_branches_go_first_then_what_is_unused_for_longest(pool: BlockPool) -> None:
    """Of a prefix the last page goes first, and all that goes is only what must."""
    run(pool, "old", *PROMPT[: 2 * SIZE])
    run(pool, "gone", 1, 2, 3, 4, 5, 6, 7, 8)
    run(pool, "new", 9)
    pool.fork("new", "branch")
    pool.mark_idle("old")
    pool.release("gone")
    pool.mark_idle("new")
    pool.mark_idle("branch")
    pool.mark_idle("old")  # keeps its turn
    assert pool.counts().num_evictable == 6
    append(pool, [step("x", *range(3 * SIZE))])
    assert pool.length("branch") == 0
    assert pool.length("old") == 2 * SIZE
    append(pool, [step("x", 1)])
    assert pool.length("old") == 0
    assert pool.attach("old", (*PROMPT[:SIZE], 0)) == SIZE
    pool.release("old")
    append(pool, [step("x", *range(2 * SIZE))])
    assert pool.length("new") == 1
    assert pool.attach("old", (*PROMPT[:SIZE], 0)) == SIZE, "it was used after `gone`"
    assert pool.attach("gone", (1, 2, 3, 4, 5)) == 0
    pool.check_integrity()


def test_a_twin_is_remembered_as_long_as_what_continues_it() -> None:
    """The page that stands for a prefix is used whenever a twin of it is."""
    pool = BlockPool(5, SIZE)
    append(pool, [step("a", 1, 2, 3, 4), step("b", 1, 2, 3, 4)])
    pool.keep("a", SIZE)
    run(pool, "b", 5, 6, 7, 8)
    pool.release("a")
    run(pool, "c", 9, 9, 9, 9)
    pool.release("c")
    pool.release("b")
    append(pool, [step("x", *range(3 * SIZE))])
    assert pool.attach("d", (1, 2, 3, 4, 5, 6, 7, 8, 9)) == 2 * SIZE
