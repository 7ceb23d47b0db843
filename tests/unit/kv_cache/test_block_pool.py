"""Pages of sequences: what is shared, copied, remembered and evicted, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pages import check_pages

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
    check_pages(pool)


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
    check_pages(pool)
