"""Which page holds the keys and values of which prefix, and what a block pool knows of a sequence.

A slot's keys and values depend on every slot that its token attended to. Only of a chain, where
each slot follows the one before it, do the ids up to a slot tell what it holds; so only whole pages
of the chain that a sequence begins with may be shared as a prefix. Behind the chain stand the slots
of a tree, until `keep` cuts it to a path, slots that were run behind such a tree, and slots that
hold something in a model's first layers alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import check


class Prefix:
    """A prefix that ends with a whole page, and the page that holds its last tokens."""

    __slots__ = ("children", "key", "page")

    def __init__(self, key: tuple[Prefix | str, bytes], page: int) -> None:
        self.key = key
        """The prefix one page shorter, or the salt before the first page; and the last page's
        token ids."""
        self.page = page
        """Not to be written to as long as it is here; -1 once it is forgotten."""
        self.children: dict[Prefix, None] = {}


class PrefixIndex:
    """The known prefixes. With each of them all shorter ones are known."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Prefix | str, bytes], Prefix] = {}
        self._by_page: dict[int, Prefix] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, parent: Prefix | str, packed_ids: bytes) -> Prefix | None:
        """The known prefix that continues another, or begins under a salt, by a page of these ids;
        None if there is none."""
        return self._by_key.get((parent, packed_ids))

    def add(self, parent: Prefix | str, packed_ids: bytes, page: int) -> Prefix:
        """Makes that prefix known, held by `page`, which must not be written to from now on.
        Returns the one that was known already, held by another page, if so."""
        key = (parent, packed_ids)
        found = self._by_key.get(key)
        if found is not None:
            return found
        check(page not in self._by_page, f"page {page} holds another prefix")
        prefix = self._by_page[page] = self._by_key[key] = Prefix(key, page)
        if isinstance(parent, Prefix):
            check(parent.page >= 0, "a prefix continues one that is forgotten")
            parent.children[prefix] = None
        return prefix

    def forget(self, page: int) -> list[int]:
        """Forgets the prefix that `page` holds and all that continue it; returns their pages."""
        first = self._by_page[page]
        if isinstance(first.key[0], Prefix):
            del first.key[0].children[first]
        waiting, pages = [first], []
        while waiting:
            prefix = waiting.pop()
            waiting.extend(prefix.children)
            pages.append(prefix.page)
            del self._by_page[prefix.page], self._by_key[prefix.key]
            prefix.page = -1
        return pages


class PagedSequence:
    """One sequence of slots."""

    def __init__(self, salt: str, is_branch: bool = False) -> None:
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
        self.chain_length = 0
        """Slots that the sequence begins with and that form a chain."""
        self.tree: Sequence[int] = ()
        """`SequenceStep.parents` of the slots behind the chain, where they are those of one tree.
        """
        self.num_shallow = 0
        """Slots at the end that hold something in a model's first layers alone."""

    def branch(self) -> PagedSequence:
        """A busy branch with the same slots on the same pages, all of which are whole."""
        check(not self.num_shallow, "a sequence whose last slots are shallow cannot be forked")
        branch = PagedSequence(self.salt, is_branch=True)
        branch.length, branch.chain_length, branch.tree = self.length, self.chain_length, self.tree
        branch.pages, branch.prefixes = self.pages.copy(), self.prefixes.copy()
        return branch

    def grow(self, num: int, parents: Sequence[int], whole: bool = True) -> None:
        """Notes `num` more slots; `parents` as in `SequenceStep`. Such as are not `whole` are
        shallow, and never come to be of the chain."""
        follows_chain = whole and self.chain_length == self.length
        self.length += num
        self.tree = parents if follows_chain else ()
        if not whole:
            self.num_shallow += num
        elif follows_chain and not parents:
            self.chain_length += num

    def shrink(self, length: int, path: Sequence[int]) -> None:
        """Notes that the first `length` slots and those of `path` are left. Those of a tree that
        form a path from its root on continue the chain."""
        chain, num_whole = self.chain_length, self.length - self.num_shallow
        self.length = length + len(path)
        kept = [*range(min(chain, length), length), *path]
        self.num_shallow = sum(slot >= num_whole for slot in kept)
        self.chain_length, last = min(chain, length), -1
        tree, self.tree = self.tree if length >= chain else (), ()
        for index in (slot - chain for slot in kept):
            if not 0 <= index < len(tree) or tree[index] != last:
                break
            last = index
            self.chain_length += 1
