"""Invariants of services and of their pages that must hold whenever no call runs."""

from collections import Counter
from typing import Any

from outrider.kv_cache.block_pool import BlockPool, _next_key


def check_service(service: Any) -> None:
    """Nothing in a service that runs no step contradicts anything else."""
    if hasattr(service, "check_integrity"):
        service.check_integrity()
    else:
        check_pages(service._worker._engine)


def check_pages(owner: Any) -> None:
    """Every page of an engine, or of a pool, is counted exactly where it is used."""
    engine = getattr(owner, "_engine", owner)  # The leader's engine of several ranks.
    pool: BlockPool = owner if isinstance(owner, BlockPool) else engine._pool
    holders, size = Counter[int](), pool.page_size
    for name, sequence in pool._sequences.items():
        length, keys = len(sequence.tokens), sequence.keys
        assert len(sequence.pages) == len(set(sequence.pages)) == -(-length // size), name
        assert 0 <= sequence.num_written <= length, name
        assert len(keys) - 1 == sequence.num_written // size, name
        for index, key in enumerate(keys[1:]):
            ids = sequence.tokens.since(index * size, (index + 1) * size)
            assert key == _next_key(keys[index], ids), f"page {index} of {name} is corrupt"
            assert pool._key_of.get(sequence.pages[index], key) == key
        holders.update(sequence.pages)
    pages = range(pool.num_pages)
    assert pool._holders == [holders[page] for page in pages]
    assert {key: page for page, key in pool._key_of.items()} == pool._page_of
    remembered = set(pool._remembered)
    assert remembered == set(pool._key_of) - set(holders)
    assert sorted(pool._free) == sorted(set(pages) - remembered - set(holders))
