"""Assigns the pages of an engine's keys and values to sequences.

The pool holds no tensors. It returns the page copies that the engine must make before a step.

    state of a page    sequences that hold it    prefix known    evicted
    free               none                      no              -
    remembered         none                      yes             least recently used first
    held               at least one              yes or no       never

The *prefix* of a page is all tokens up to the end of the page. These tokens alone determine the
page's keys and values. Once the prefix of a full page is known, new sequences with this prefix
share the page. Before a sequence writes to a page that other sequences hold too, it gets a copy of
the page. If no other sequence holds the page, the pool instead forgets the page's prefix."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from outrider.errors import InvariantError, OutOfPages, check
from outrider.foundation.tokens import TokenSequence
from outrider.interfaces.engine import PageCounts, SequenceStep

Copy = tuple[int, int]
"""The numbers of two pages: (from, to)."""


class _PagedSequence:
    def __init__(self, salt: str) -> None:
        self.tokens = TokenSequence()
        self.num_written = 0
        """The number of slots, from the first on, to which all layers have written. Only these
        slots may be shared."""
        self.num_queried = 0
        """The number of tokens that `attach` has looked up in the cache. 0 after the first step."""
        self.pages: list[int] = []
        """The page table, with exactly the pages that the slots of `tokens` need."""
        self.keys = [blake2b(salt.encode()).digest()]
        """`keys[i]` is the key (`_next_key`) of the first i pages, if they are full and written."""

    def branch(self) -> _PagedSequence:
        self.check_written()
        branch = _PagedSequence("")
        branch.tokens, branch.num_written = self.tokens.copy(), self.num_written
        branch.pages, branch.keys = self.pages.copy(), self.keys.copy()
        return branch

    def check_written(self) -> None:
        check(self.num_written == len(self.tokens), "the last slots of a sequence are not written")


def _next_key(key: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the key of a prefix: a hash of the `key` of all pages but the last, and of the tokens
    of the last page. Equal keys mean equal salts and tokens."""
    return blake2b(key + array("I", token_ids).tobytes()).digest()


class BlockPool:
    """The pages of one engine, and the sequences on these pages. The pool's state depends only on
    its calls, so all ranks of a model assign the same pages. A call takes time proportional to the
    number of pages that it reads or changes."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._sequences: dict[str, _PagedSequence] = {}
        self._holders = [0] * num_pages  # the number of sequences that hold each page
        self._page_of: dict[bytes, int] = {}  # the last page of each known prefix, by key
        self._key_of: dict[int, bytes] = {}  # the inverse of `_page_of`
        self._remembered: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._prefix_queries = 0
        self._prefix_hits = 0

    def tokens(self, sequence_id: str) -> TokenSequence:
        """See `Engine.tokens`."""
        return self._sequence(sequence_id).tokens

    def length(self, sequence_id: str) -> int:
        """See `Engine.length`."""
        return len(self._sequence(sequence_id).tokens)

    def pages(self, sequence_id: str) -> Sequence[int]:
        """The sequence's page table, empty for an unknown sequence. With page size P, slot i of the
        sequence is slot i % P of page `pages[i // P]`. Do not change this list, and do not read it
        after the next call of the pool."""
        return self._sequence(sequence_id).pages

    def _sequence(self, sequence_id: str) -> _PagedSequence:
        return self._sequences.get(sequence_id) or _PagedSequence("")

    def counts(self) -> PageCounts:
        """See `Engine.page_counts`."""
        return PageCounts(
            num_pages=self.num_pages,
            num_free=len(self._free),
            num_evictable=len(self._remembered),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            page_size=self.page_size,
        )

    def attach(self, sequence_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """See `Engine.attach`."""
        check(self.length(sequence_id) == 0, f"{sequence_id} already holds slots")
        self.release(sequence_id)
        sequence = self._sequences[sequence_id] = _PagedSequence(salt)
        size = self.page_size
        # Leaves out the last token, because a step must run the last token to get its logits.
        for end in range(size, len(token_ids), size):
            key = _next_key(sequence.keys[-1], token_ids[end - size : end])
            page = self._page_of.get(key)
            if page is None:
                break
            sequence.keys.append(key)
            sequence.pages.append(page)
            self._add_reference(page)
        sequence.num_written = len(sequence.pages) * size
        sequence.tokens.extend(token_ids[: sequence.num_written])
        sequence.num_queried = len(token_ids)
        return sequence.num_written

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """See `Engine.fork`."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvariantError(f"{sequence_id} is unknown and cannot be forked")
        check(branch_id not in self._sequences, f"{branch_id} already exists")
        branch = self._sequences[branch_id] = sequence.branch()
        for page in branch.pages:
            self._holders[page] += 1

    def can_hold(self, steps: Sequence[SequenceStep], without: Iterable[str] = ()) -> bool:
        """See `Engine.can_hold`."""
        return self._has_free_pages(steps) or self._num_missing(steps, without) <= 0

    def append(self, steps: Sequence[SequenceStep], whole: bool = True) -> list[Copy]:
        """Takes slots for the tokens of the steps. No sequence may have two steps. An unknown
        sequence begins with an empty salt. Returns the page copies to make before any slot is
        written. After the step, call `written`. If the step fails, call `keep` with the old length
        instead. If a page copy fails, then also call `release`, because the copy was not filled.

        Evicts remembered pages as needed, or raises `OutOfPages` and changes nothing. If `whole` is
        false, only a drafting head writes to the new slots. They must not be shared: do not call
        `written`, and drop them with `keep`. Else the next `whole` call raises `InvariantError`."""
        for step in steps if whole else ():
            self._sequence(step.sequence_id).check_written()
        if not self._has_free_pages(steps):
            self._make_room(self._num_needed(steps, Counter()))
        copies: list[Copy] = []
        for step in steps:
            sequence = self._sequences[step.sequence_id] = self._sequence(step.sequence_id)
            length, pages = len(sequence.tokens), sequence.pages
            if length % self.page_size:
                copies += self._make_writable(pages)
            for _ in range(-(-(length + len(step.token_ids)) // self.page_size) - len(pages)):
                pages.append(self._free.pop())
                self._add_reference(pages[-1])
            if sequence.num_queried:
                self._prefix_queries += sequence.num_queried
                self._prefix_hits += length
                sequence.num_queried = 0
            sequence.tokens.extend(step.token_ids)
        return copies

    def written(self, steps: Sequence[SequenceStep]) -> None:
        """Makes the prefix of each full page of the steps' sequences known."""
        size = self.page_size
        for step in steps:
            sequence = self._sequences[step.sequence_id]
            sequence.num_written = len(sequence.tokens)
            keys = sequence.keys
            while (end := len(keys) * size) <= sequence.num_written:
                keys.append(_next_key(keys[-1], sequence.tokens.since(end - size, end)))
                self._register(keys[-1], sequence.pages[len(keys) - 2])

    def keep(self, sequence_id: str, length: int) -> int:
        """See `Engine.keep`."""
        check(length >= 0, f"cannot keep {length} slots")
        sequence = self._sequence(sequence_id)
        if len(sequence.tokens) <= length:
            return len(sequence.tokens)
        num_pages = -(-length // self.page_size)
        for page in reversed(sequence.pages[num_pages:]):
            self._drop_reference(page)
        del sequence.pages[num_pages:]
        del sequence.keys[length // self.page_size + 1 :]
        sequence.tokens.truncate(length)
        sequence.num_written = min(sequence.num_written, length)
        return length

    def release(self, sequence_id: str) -> None:
        """Forgets a sequence. Its full pages stay remembered, and are evicted after all other
        remembered pages. Of its full pages, the last is evicted first, because no sequence can use
        a page without the pages before it."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        for index in range(len(sequence.pages) - 1, -1, -1):
            page = sequence.pages[index]
            if self._holders[page] > 1:
                self._holders[page] -= 1
                continue
            known = page
            if index + 1 < len(sequence.keys):
                known = self._register(sequence.keys[index + 1], page)
            self._drop_reference(page)
            if known in self._remembered:
                self._remembered.move_to_end(known)

    def _has_free_pages(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether there are enough free pages even if each step needs a copy of its sequence's last
        page. An exact count would take longer."""
        size = self.page_size
        return len(self._free) >= sum([len(step.token_ids) // size + 2 for step in steps])

    def _num_missing(self, steps: Sequence[SequenceStep], without: Iterable[str]) -> int:
        """The number of pages that the steps would lack after all remembered pages are evicted and
        the sequences in `without` are released; negative if pages would be left."""
        leaving = Counter(page for name in without for page in self.pages(name))
        freed = sum(self._holders[page] == num for page, num in leaving.items())
        needed = self._num_needed(steps, leaving)
        return needed - freed - len(self._free) - len(self._remembered)

    def _num_needed(self, steps: Sequence[SequenceStep], leaving: Counter[int]) -> int:
        """The largest number of pages that the steps may take. `leaving` has, for each page, the
        number of sequences that stop holding it before the steps."""
        size, num = self.page_size, 0
        for step in steps:
            sequence = self._sequence(step.sequence_id)
            length, pages = len(sequence.tokens), sequence.pages
            num += -(-(length + len(step.token_ids)) // size) - len(pages)
            if length % size:  # If another sequence holds the last page, the page is copied.
                num += self._holders[pages[-1]] - leaving[pages[-1]] > 1
        return num

    def _make_room(self, num_free: int) -> None:
        """Evicts remembered pages until `num_free` are free, or raises `OutOfPages`."""
        missing = num_free - len(self._free) - len(self._remembered)
        if missing > 0:
            raise OutOfPages(f"{missing} more pages are needed, but no more can be evicted")
        while len(self._free) < num_free:
            page, _ = self._remembered.popitem(last=False)
            self._forget(page)
            self._free.append(page)

    def _register(self, key: bytes, page: int) -> int:
        """Makes `page` the shared page for `key`, unless `key` already has a page. Returns the page
        of `key`. Until `_forget`, no sequence may write to this page."""
        known = self._page_of.setdefault(key, page)
        self._key_of[known] = key
        return known

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def _make_writable(self, pages: list[int]) -> list[Copy]:
        """Makes the last page of a page table writable. Returns the copies to make: none or one."""
        page = pages[-1]
        if self._holders[page] == 1:
            if page in self._key_of:
                self._forget(page)
            return []
        pages[-1] = copy = self._free.pop()
        self._drop_reference(page)
        self._add_reference(copy)
        return [(page, copy)]

    def _add_reference(self, page: int) -> None:
        if not self._holders[page]:
            self._remembered.pop(page, None)
        self._holders[page] += 1

    def _drop_reference(self, page: int) -> None:
        """A page without holders becomes remembered if its prefix is known, otherwise free."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._key_of:
            self._remembered[page] = None
        else:
            self._free.append(page)
