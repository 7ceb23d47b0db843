"""What a page pool knows of one sequence: its pages, and which of its slots form a chain.

A slot's keys and values depend on every slot that its token attended to. Only of a chain, where
each slot follows the one before it, do the ids up to a slot tell what it holds; so only whole pages
of the chain that a sequence begins with may be shared as a prefix. Behind the chain stand the slots
of a tree, until `keep` cuts it to a path, slots that were run behind such a tree, and slots that
hold something in a model's first layers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.engine.interface import SequenceStep
from outrider.errors import check
from outrider.kv_cache.prefix_cache import Prefix

_MIXED = -2
"""Stands for the slot that a slot follows where it attended to more than those it stands behind, or
does not hold all that follows from them."""


class PagedSequence:
    """One sequence of slots."""

    __slots__ = (
        "busy", "is_branch", "length", "loose", "num_shallow", "pages", "prefixes", "salt",
    )  # fmt: skip

    def __init__(self, salt: str, is_branch: bool) -> None:
        self.salt = salt
        self.is_branch = is_branch
        self.busy = True
        self.length = 0
        """Slots held."""
        self.pages: list[int] = []
        """Of page size P: slot i is slot i % P of page i // P; none is held without need."""
        self.prefixes: list[Prefix] = []
        """The prefix that ends with each of the first pages. Another sequence's page may hold it,
        and those at the end may have been forgotten."""
        self.loose: list[int] = []
        """For each slot behind the chain the slot that it follows; -1 = it is the first."""
        self.num_shallow = 0
        """Slots at the end that hold something in a model's first layers alone."""

    @property
    def chain_length(self) -> int:
        """Slots that the sequence begins with and that form a chain."""
        return self.length - len(self.loose)

    def branch(self) -> PagedSequence:
        """A busy branch with the same slots on the same pages, all of which are whole."""
        check(not self.num_shallow, "a sequence whose last slots are shallow cannot be forked")
        branch = PagedSequence(self.salt, is_branch=True)
        branch.length = self.length
        branch.pages = self.pages.copy()
        branch.prefixes = self.prefixes.copy()
        branch.loose = self.loose.copy()
        return branch

    def grow(self, num: int, parents: Sequence[int], whole: bool = True) -> None:
        """Notes `num` more slots; `parents` as in `SequenceStep`. Such as are not `whole` are
        shallow, and never come to be of the chain."""
        held = self.length
        self.length += num
        if not whole:
            self.num_shallow += num
        if self.loose or not whole:
            self.loose += [_MIXED] * num
        elif parents:
            self.loose = [held + parent if parent >= 0 else held - 1 for parent in parents]
            self._settle()

    def shrink(self, length: int, path: Sequence[int]) -> None:
        """Notes that the first `length` slots and those of `path` are left."""
        chain_length, num_whole = self.chain_length, self.length - self.num_shallow
        first = min(length, chain_length)
        kept = [*range(first, length), *path]
        self.num_shallow = sum(slot >= num_whole for slot in kept)
        places = {slot: first + index for index, slot in enumerate(kept)}
        followed = [
            slot - 1 if slot < chain_length else self.loose[slot - chain_length] for slot in kept
        ]
        self.loose = [slot if slot < first else places.get(slot, _MIXED) for slot in followed]
        self.length = first + len(kept)
        self._settle()

    def check_integrity(self, name: str, page_size: int) -> None:
        """Raises `InvariantError` unless it has pages for its slots, and no others."""
        whole = -(-self.length // page_size)
        check(len(self.pages) == whole, f"{name} holds too many or too few pages")
        check(len(set(self.pages)) == whole, f"{name} holds a page twice")
        check(0 <= self.chain_length <= self.length, f"{name}: a bad chain")
        check(0 <= self.num_shallow <= len(self.loose), f"{name}: a shallow slot of the chain")

    def _settle(self) -> None:
        """Counts loose slots that continue the chain as its own."""
        last = self.chain_length - 1
        num = 0
        while num < len(self.loose) and self.loose[num] == last + num:
            num += 1
        del self.loose[:num]


def require_whole(sequences: Mapping[str, PagedSequence], steps: Sequence[SequenceStep]) -> None:
    """Raises `InvariantError` unless all slots that these steps stand behind are whole."""
    for step in steps:
        sequence = sequences.get(step.sequence_id)
        is_whole = sequence is None or not sequence.num_shallow
        check(is_whole, f"{step.sequence_id}: its last slots are shallow")
