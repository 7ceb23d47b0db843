"""Assigns the pages of an engine's keys and values to sequences.

The pool holds no tensors. It returns the page copies that the engine must make before a step.

    state of a page    sequences that hold it    prefix known    evicted
    free               none                      no              -
    remembered         none                      yes             least recently used first
    held               at least one              yes or no       never

The *prefix* of a page is all tokens up to the end of the page. Once the prefix of a full page is
known, new sequences with this prefix share the page. If several sequences hold a page, a sequence
writes only to a copy of the page. Before a sequence writes to a page that no other sequence holds,
the pool forgets the page's prefix."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from outrider.engine.interface import PageCounts, SequenceStep
from outrider.errors import InvariantError, OutOfPages, check
from outrider.kv_cache.prefix_cache import PagedSequence, Prefix, PrefixIndex

Copy = tuple[int, int]
"""The numbers of two pages: (from, to)."""
_ID_TYPE = "I"
"""Array type of a token id: 0..2^32-1."""


class BlockPool:
    """The pages of one engine, and the sequences on these pages.

    The pool's state depends only on its calls. So all ranks of a model, which make the same calls,
    assign the same pages. The time of a call is proportional to the number of pages that the call
    reads or changes."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        """The free pages. The pool takes new pages from the end."""
        self._prefixes = PrefixIndex()
        self._sequences: dict[str, PagedSequence] = {}
        self._ids = array(_ID_TYPE, [0]) * (num_pages * page_size)
        """The token in each slot of each page."""
        self._holders = [0] * num_pages  # the number of sequences that hold each page
        self._remembered: OrderedDict[int, None] = OrderedDict()
        """The remembered pages, the least recently used page first."""
        self._prefix_queries = 0
        self._prefix_hits = 0

    def length(self, sequence_id: str) -> int:
        """See `Engine.length`."""
        sequence = self._sequences.get(sequence_id)
        return 0 if sequence is None else sequence.length

    def pages(self, sequence_id: str) -> Sequence[int]:
        """Returns the sequence's page table, which is empty for an unknown sequence. With page size
        P, slot i of the sequence is slot i % P of the page `pages[i // P]`. Do not change this
        list, and do not read it after the next call of the pool."""
        sequence = self._sequences.get(sequence_id)
        return () if sequence is None else sequence.pages

    def token_ids(self, sequence_id: str, start: int = 0) -> tuple[int, ...]:
        """Returns the tokens in the sequence's slots from slot `start` on."""
        ids, size = array(_ID_TYPE), self.page_size
        for page in self.pages(sequence_id)[start // size :]:
            ids.extend(self._ids[page * size : (page + 1) * size])
        return tuple(ids[start % size : self.length(sequence_id) - start // size * size])

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
        check(self.length(sequence_id) == 0, f"{sequence_id} is held already")
        self.release(sequence_id)
        sequence = self._sequences[sequence_id] = PagedSequence(salt)
        for prefix in self._known_prefixes(token_ids, salt):
            sequence.prefixes.append(prefix)
            sequence.pages.append(prefix.page)
            self._hold(prefix.page)
        sequence.length = sequence.num_written = len(sequence.pages) * self.page_size
        sequence.num_queried = len(token_ids)
        return sequence.length

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """See `Engine.fork`."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvariantError(f"{sequence_id} is unknown and cannot be forked")
        check(branch_id not in self._sequences, f"{branch_id} is held already")
        branch = self._sequences[branch_id] = sequence.branch()
        for page in branch.pages:
            self._holders[page] += 1

    def can_hold(self, steps: Sequence[SequenceStep], without: Iterable[str] = ()) -> bool:
        """See `Engine.can_hold`."""
        return self._is_roomy(steps) or self._num_missing(steps, without) <= 0

    def append(self, steps: Sequence[SequenceStep], whole: bool = True) -> list[Copy]:
        """Takes slots for the tokens of each step. The steps must be of different sequences. An
        unknown sequence begins with an empty salt. Returns the page copies to make before any slot
        is written. After the step, call `written`. If the step has failed, call `keep` with the old
        length instead. If the page copies have failed, then also `release` the sequences.

        Evicts remembered pages as needed. If there is still no room, raises `OutOfPages` and
        changes nothing. If not `whole`, only the draft layer writes to the new slots, so they are
        never shared, and `written` must not be called. Before a call with `whole`, drop such slots
        with `keep`, else the call raises `InvariantError`."""
        for step in steps if whole else ():
            sequence = self._sequences.get(step.sequence_id)
            is_written = sequence is None or sequence.is_written
            check(is_written, f"{step.sequence_id}: its last slots are not written")
        if not self._is_roomy(steps):
            self._make_room(self._num_needed(steps, Counter()))
        size = self.page_size
        copies: list[Copy] = []
        for step in steps:
            sequence = self._sequences.get(step.sequence_id)
            if sequence is None:
                sequence = self._sequences[step.sequence_id] = PagedSequence("")
            if sequence.length % size:
                copies += self._own(sequence, len(sequence.pages) - 1)
            self._write(sequence, step.token_ids)
            if sequence.num_queried:
                self._prefix_queries += sequence.num_queried
                self._prefix_hits += sequence.length
                sequence.num_queried = 0
            sequence.length += len(step.token_ids)
        return copies

    def written(self, steps: Sequence[SequenceStep]) -> None:
        """Makes the full pages of these steps known, so that new sequences share them. Call this
        once the slots that `append` took are written."""
        for step in steps:
            sequence = self._sequences[step.sequence_id]
            sequence.num_written = sequence.length
            if sequence.length // self.page_size > len(sequence.prefixes):
                self._remember(sequence)

    def keep(self, sequence_id: str, length: int) -> None:
        """See `Engine.keep`."""
        held = self.length(sequence_id)
        check(0 <= length <= held, f"cannot keep {length} of {held} slots")
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        num_pages = -(-length // self.page_size)
        for page in reversed(sequence.pages[num_pages:]):
            self._let_go(page)
        del sequence.pages[num_pages:]
        del sequence.prefixes[length // self.page_size :]
        sequence.length = length
        sequence.num_written = min(sequence.num_written, length)
        self._remember(sequence)

    def release(self, sequence_id: str) -> None:
        """See `Engine.release`. The sequence's full pages stay remembered."""
        if sequence_id in self._sequences:
            self._remember(self._sequences[sequence_id])
            self._drop(sequence_id)

    def _is_roomy(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether there are certainly enough free pages. The exact count takes longer, so this
        method assumes that each step needs a copy of its sequence's last page. If the result is
        False, there may still be enough pages."""
        size = self.page_size
        return len(self._free) >= sum([len(step.token_ids) // size + 2 for step in steps])

    def _num_missing(self, steps: Sequence[SequenceStep], without: Iterable[str]) -> int:
        """Returns the number of pages that the steps would lack after all remembered pages are
        evicted and the sequences in `without` are released. The number is negative if pages would
        be left."""
        leaving = Counter(page for name in without for page in self.pages(name))
        freed = sum(self._holders[page] == num for page, num in leaving.items())
        needed = self._num_needed(steps, leaving)
        return needed - freed - len(self._free) - len(self._remembered)

    def _num_needed(self, steps: Sequence[SequenceStep], leaving: Counter[int]) -> int:
        """Returns the largest number of pages that the steps may take. `leaving` has, for each
        page, the number of sequences that will let go of the page before the steps."""
        size, num = self.page_size, 0
        for step in steps:
            sequence = self._sequences.get(step.sequence_id)
            if sequence is None:
                num += -(-len(step.token_ids) // size)
                continue
            length, pages = sequence.length, sequence.pages
            num += -(-(length + len(step.token_ids)) // size) - len(pages)
            if length % size:  # If another sequence holds the last page, the page is copied.
                num += self._holders[pages[-1]] - leaving[pages[-1]] > 1
        return num

    def _make_room(self, num_free: int) -> None:
        """Evicts remembered pages until `num_free` pages are free. If there are too few pages,
        raises `OutOfPages` and evicts nothing."""
        missing = num_free - len(self._free) - len(self._remembered)
        if missing > 0:
            raise OutOfPages(f"{missing} more pages are needed, but sequences hold all others")
        while len(self._free) < num_free:
            self._forget(next(iter(self._remembered)))

    def _drop(self, sequence_id: str) -> None:
        """Forgets a sequence. Remembers the sequence's pages with a known prefix so that they are
        evicted after all other remembered pages, the last page first."""
        sequence = self._sequences.pop(sequence_id)
        prefixes = sequence.prefixes
        for index in range(len(sequence.pages) - 1, -1, -1):
            if self._holders[sequence.pages[index]] > 1:
                # Like `_let_go`, without the time of a call. A fork has many such pages.
                self._holders[sequence.pages[index]] -= 1
            else:
                self._let_go(sequence.pages[index])
            # The prefix may be known in another, remembered page. That page must be evicted after
            # the pages that continue the prefix.
            if index < len(prefixes) and prefixes[index].page in self._remembered:
                self._remembered.move_to_end(prefixes[index].page)
        sequence.pages.clear()

    def _known_prefixes(self, token_ids: Sequence[int], salt: str) -> Iterator[Prefix]:
        """Yields the known prefixes of these tokens, the shortest prefix first. A prefix never
        includes the last token, because a step must run the last token for its logits."""
        size, ids = self.page_size, array(_ID_TYPE, token_ids)
        parent: Prefix | str = salt
        for end in range(size, len(ids), size):
            prefix = self._prefixes.find(parent, ids[end - size : end].tobytes())
            if prefix is None:
                return
            yield prefix
            parent = prefix

    def _remember(self, sequence: PagedSequence) -> None:
        prefixes = sequence.prefixes
        while prefixes and prefixes[-1].page < 0:
            prefixes.pop()
        for page in sequence.pages[len(prefixes) : sequence.num_written // self.page_size]:
            parent = prefixes[-1] if prefixes else sequence.salt
            prefixes.append(self._prefixes.add(parent, self._packed_ids(page), page))

    def _forget(self, page: int) -> None:
        for forgotten in self._prefixes.forget(page):
            if not self._holders[forgotten]:
                del self._remembered[forgotten]
                self._free.append(forgotten)

    def _own(self, sequence: PagedSequence, index: int) -> list[Copy]:
        """Makes the sequence's page at `index` writable. Returns the page copy that this needs, or
        an empty list."""
        page = sequence.pages[index]
        if self._holders[page] == 1:
            if page in self._prefixes:
                self._forget(page)
            return []
        copy = self._free.pop()
        self._let_go(page)
        self._hold(copy)
        sequence.pages[index] = copy
        size = self.page_size
        self._ids[copy * size : (copy + 1) * size] = self._ids[page * size : (page + 1) * size]
        return [(page, copy)]

    def _write(self, sequence: PagedSequence, token_ids: Sequence[int]) -> None:
        size, pages, start = self.page_size, sequence.pages, sequence.length
        missing = -(-(start + len(token_ids)) // size) - len(pages)
        if missing:
            num_free = len(self._free)
            check(missing <= num_free, f"{missing} pages are needed; {num_free} are free")
            for _ in range(missing):
                pages.append(self._free.pop())
                self._hold(pages[-1])
        for place, token_id in enumerate(token_ids, start=start):
            self._ids[pages[place // size] * size + place % size] = token_id

    def _hold(self, page: int) -> None:
        if not self._holders[page]:
            self._remembered.pop(page, None)
        self._holders[page] += 1

    def _let_go(self, page: int) -> None:
        """If no holder of the page is left, the page becomes free, or remembered if its prefix is
        known. A page that has just become remembered is evicted last."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._prefixes:
            self._remembered[page] = None
        else:
            self._free.append(page)

    def _packed_ids(self, page: int) -> bytes:
        return self._ids[page * self.page_size : (page + 1) * self.page_size].tobytes()
