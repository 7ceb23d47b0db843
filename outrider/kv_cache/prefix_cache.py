"""Which page holds the keys and values of which prefix.

A prefix of whole pages is named by a chain of digests, BLAKE2b-128 over the digest before and the
page's token ids, begun with the salt. A digest only finds a candidate: the salt, the ids and the
prefix before are compared too, so two prefixes with one digest are never taken for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from outrider.engine.interface import SequenceStep
from outrider.errors import check

Digest = Callable[[bytes, bytes], bytes]
"""(digest of the prefix before, or b"" before a salt; packed token ids, or the salt) -> digest."""


def chain_digest(previous: bytes, content: bytes) -> bytes:
    """128 bits that name `content` after `previous`; salts and pages never share an input."""
    return blake2b(content, digest_size=16, key=previous).digest()


class Prefix:
    """A prefix that ends with a whole page, and the page that holds its last tokens."""

    __slots__ = ("children", "digest", "packed_ids", "page", "parent", "salt")

    def __init__(
        self, salt: str, parent: Prefix | None, packed_ids: bytes, digest: bytes, page: int
    ) -> None:
        self.salt = salt
        self.parent = parent
        """The prefix one page shorter; none before the first page."""
        self.packed_ids = packed_ids
        """The last page's token ids."""
        self.digest = digest
        self.page = page
        """Not to be written to as long as it is here; -1 once the prefix is forgotten."""
        self.children: dict[Prefix, None] = {}
        """The known prefixes one page longer, in the order they came."""

    @property
    def known(self) -> bool:
        """Whether the index still has it."""
        return self.page >= 0


class PrefixIndex:
    """The known prefixes. With each of them all shorter ones are known."""

    def __init__(self, digest: Digest = chain_digest) -> None:
        self._digest = digest
        self._by_digest: dict[bytes, Prefix] = {}
        self._by_page: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, salt: str, parent: Prefix | None, packed_ids: bytes) -> Prefix | None:
        """The known prefix that continues `parent` (None = the empty one) by a page of these
        ids; None if there is none."""
        found = self._by_digest.get(self._name(salt, parent, packed_ids))
        return found if found and _is(found, salt, parent, packed_ids) else None

    def add(self, salt: str, parent: Prefix | None, packed_ids: bytes, page: int) -> Prefix | None:
        """Makes that prefix known, held by `page`, which must not be written to from now on.

        Returns the one that was known already, held by another page, if so; None where a
        different prefix has its digest: that one stays."""
        digest = self._name(salt, parent, packed_ids)
        found = self._by_digest.get(digest)
        if found is not None:
            return found if _is(found, salt, parent, packed_ids) else None
        check(page not in self._by_page, f"page {page} holds another prefix")
        check(parent is None or parent.known, "a prefix continues one that is forgotten")
        prefix = Prefix(salt, parent, packed_ids, digest, page)
        self._by_digest[digest] = self._by_page[page] = prefix
        if parent is not None:
            parent.children[prefix] = None
        return prefix

    def forget(self, page: int) -> list[int]:
        """Forgets the prefix that `page` holds and all that continue it; returns their pages."""
        first = self._by_page[page]
        if first.parent is not None:
            del first.parent.children[first]
        waiting, pages = [first], []
        while waiting:
            prefix = waiting.pop()
            waiting.extend(prefix.children)
            prefix.children.clear()
            pages.append(prefix.page)
            del self._by_page[prefix.page], self._by_digest[prefix.digest]
            prefix.page = -1
        return pages

    def packed_ids(self, page: int) -> bytes:
        """The ids of the known prefix's last page, which `page` holds."""
        return self._by_page[page].packed_ids

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless digests, pages and families agree."""
        check(len(self._by_digest) == len(self._by_page), "prefixes and their pages differ")
        for page, prefix in self._by_page.items():
            check(prefix.page == page, f"page {page} is not where its prefix says")
            check(self._by_digest.get(prefix.digest) is prefix, f"page {page} cannot be found")
            name = self._name(prefix.salt, prefix.parent, prefix.packed_ids)
            check(prefix.digest == name, f"page {page} has the digest of another prefix")
            parent = prefix.parent
            check(parent is None or parent.known, f"page {page} continues a forgotten prefix")
            check(parent is None or prefix in parent.children, f"page {page} is an orphan")

    def _name(self, salt: str, parent: Prefix | None, packed_ids: bytes) -> bytes:
        before = parent.digest if parent else self._digest(b"", salt.encode())
        return self._digest(before, packed_ids)


def _is(found: Prefix, salt: str, parent: Prefix | None, packed_ids: bytes) -> bool:
    return found.parent is parent and found.packed_ids == packed_ids and found.salt == salt


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
