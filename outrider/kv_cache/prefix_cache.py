"""Which page holds the keys and values of which prefix, and what a block pool knows of a sequence.

Known prefixes of whole pages form a tree for each salt; a child continues its parent by one page of
token ids.

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


class Prefix:
    """A prefix that ends with a whole page, and the page that holds its last tokens."""

    __slots__ = ("children", "packed_ids", "page", "parent")

    def __init__(self, parent: Prefix | None, packed_ids: bytes, page: int) -> None:
        self.parent = parent
        """The prefix one page shorter; the root of its salt before the first page."""
        self.packed_ids = packed_ids
        """The last page's token ids; of a root its salt."""
        self.page = page
        """Not to be written to as long as it is here; -1 for a root, and once it is forgotten."""
        self.children: dict[bytes, Prefix] = {}

    @property
    def known(self) -> bool:
        return self.page >= 0


class PrefixIndex:
    """The known prefixes. With each of them all shorter ones are known."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Prefix] = {}
        self._by_page: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, salt: str, parent: Prefix | None, packed_ids: bytes) -> Prefix | None:
        """The known prefix that continues `parent` (None = the empty one) by a page of these
        ids; None if there is none."""
        before = parent or self._roots.get(salt.encode())
        return None if before is None else before.children.get(packed_ids)

    def add(self, salt: str, parent: Prefix | None, packed_ids: bytes, page: int) -> Prefix:
        """Makes that prefix known, held by `page`, which must not be written to from now on.
        Returns the one that was known already, held by another page, if so."""
        found = self.find(salt, parent, packed_ids)
        if found is not None:
            return found
        check(page not in self._by_page, f"page {page} holds another prefix")
        check(parent is None or parent.known, "a prefix continues one that is forgotten")
        if parent is None:
            name = salt.encode()
            parent = self._roots.setdefault(name, Prefix(None, name, -1))
        prefix = Prefix(parent, packed_ids, page)
        self._by_page[page] = parent.children[packed_ids] = prefix
        return prefix

    def forget(self, page: int) -> list[int]:
        """Forgets the prefix that `page` holds and all that continue it; returns their pages."""
        first = self._by_page[page]
        parent = first.parent
        if parent is not None:
            del parent.children[first.packed_ids]
            if parent.parent is None and not parent.children:
                del self._roots[parent.packed_ids]
        waiting, pages = [first], []
        while waiting:
            prefix = waiting.pop()
            waiting.extend(prefix.children.values())
            prefix.children.clear()
            pages.append(prefix.page)
            del self._by_page[prefix.page]
            prefix.page = -1
        return pages

    def packed_ids(self, page: int) -> bytes:
        """The ids of the known prefix's last page, which `page` holds."""
        return self._by_page[page].packed_ids

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless pages and families agree."""
        found = {}
        waiting = list(self._roots.values())
        check(all(root.children for root in waiting), "a root without prefixes is left over")
        while waiting:
            parent = waiting.pop()
            waiting.extend(parent.children.values())
            for packed_ids, prefix in parent.children.items():
                check(prefix.parent is parent, f"page {prefix.page} is an orphan")
                check(prefix.packed_ids == packed_ids, f"page {prefix.page} cannot be found")
                found[prefix.page] = prefix
        check(found == self._by_page, "prefixes and their pages differ")


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
