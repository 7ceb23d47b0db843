"""An index of cached prefixes, and a block pool's record of a sequence.

The token ids up to a slot determine the slot's keys and values, so sequences share full pages."""

from __future__ import annotations

from outrider.errors import check


class Prefix:
    """A prefix that ends with a full page."""

    __slots__ = ("children", "key", "page")

    def __init__(self, key: tuple[Prefix | str, bytes], page: int) -> None:
        self.key = key
        """The prefix that is one page shorter, and the packed token ids of the last page. A prefix
        of one page has the salt in place of the shorter prefix."""
        self.page = page
        """The last page, which must not be written to. -1 after the prefix is forgotten."""
        self.children: dict[Prefix, None] = {}


class PrefixIndex:
    """The known prefixes. If a prefix is known, all shorter prefixes of the same tokens are
    known."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Prefix | str, bytes], Prefix] = {}
        self._by_page: dict[int, Prefix] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, parent: Prefix | str, packed_ids: bytes) -> Prefix | None:
        """Returns the known prefix that consists of `parent` and a page with these ids. For a
        prefix of one page, `parent` is the salt."""
        return self._by_key.get((parent, packed_ids))

    def add(self, parent: Prefix | str, packed_ids: bytes, page: int) -> Prefix:
        """Adds a prefix that ends in `page`, with the other arguments of `find`. If the prefix is
        known already, changes nothing and returns the known prefix. Otherwise, `page` must not be
        written to from now on."""
        key = (parent, packed_ids)
        found = self._by_key.get(key)
        if found is not None:
            return found
        check(page not in self._by_page, f"page {page} holds another prefix")
        prefix = self._by_page[page] = self._by_key[key] = Prefix(key, page)
        if isinstance(parent, Prefix):
            check(parent.page >= 0, "a prefix continues a forgotten prefix")
            parent.children[prefix] = None
        return prefix

    def forget(self, page: int) -> list[int]:
        """Forgets the prefix that ends in `page`, and all prefixes that continue it. Returns the
        last pages of the forgotten prefixes."""
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
    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.length = 0
        self.num_written = 0
        """The number of slots, from the first slot on, to which the whole model has written. Only
        these are shared."""
        self.num_queried = 0
        """The number of tokens that were looked up in the cache, until the first step."""
        self.pages: list[int] = []
        """The page table, without pages that the slots do not need."""
        self.prefixes: list[Prefix] = []
        """`prefixes[i]` has the tokens of the first i + 1 pages. `prefixes[i].page` may be another
        page with the same tokens as `pages[i]`. The list may be shorter than `pages`. The last
        prefixes in the list may be forgotten already."""

    @property
    def is_written(self) -> bool:
        return self.num_written == self.length

    def branch(self) -> PagedSequence:
        check(self.is_written, "a sequence whose last slots are not written cannot be forked")
        branch = PagedSequence(self.salt)
        branch.length = branch.num_written = self.length
        branch.pages, branch.prefixes = self.pages.copy(), self.prefixes.copy()
        return branch
