"""Invariants of an engine's pages that must hold whenever no call of the engine runs."""

from collections import Counter
from typing import Any

from outrider.kv_cache.block_pool import BlockPool


def check_pages(owner: Any) -> None:
    """Every page of an engine, or of a pool, is counted exactly where it is used."""
    pool: BlockPool = owner if isinstance(owner, BlockPool) else owner._pool
    holders = Counter[int]()
    for name, sequence in pool._sequences.items():
        num_pages = -(-sequence.length // pool.page_size)
        assert len(sequence.pages) == len(set(sequence.pages)) == num_pages, name
        assert 0 <= sequence.num_written <= sequence.length, name
        holders.update(sequence.pages)
        for page, prefix in zip(sequence.pages, sequence.prefixes, strict=False):
            assert prefix.key[1] == pool._packed_ids(page), f"page {page} of {name} is corrupt"
    pages = range(pool.num_pages)
    assert pool._holders == [holders[page] for page in pages]
    remembered = set(pool._remembered)
    assert remembered == {page for page in pages if page in pool._prefixes} - set(holders)
    assert sorted(pool._free) == sorted(set(pages) - remembered - set(holders))
    check_prefixes(pool)


def check_prefixes(pool: BlockPool) -> None:
    """The known prefixes, their pages and their families agree with each other."""
    found = {prefix.page: prefix for prefix in pool._prefixes._by_key.values()}
    assert found == pool._prefixes._by_page
    num_children = sum(len(prefix.children) for prefix in found.values())
    for key, prefix in pool._prefixes._by_key.items():
        parent, ids = prefix.key
        assert prefix.key == key
        assert ids == pool._packed_ids(prefix.page), f"remembered page {prefix.page} is corrupt"
        if isinstance(parent, str):
            num_children += 1
        else:
            assert prefix in parent.children
            assert found.get(parent.page) is parent, f"page {prefix.page} is an orphan"
    assert num_children == len(found)
