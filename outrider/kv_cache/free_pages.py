"""Which pages are free, as runs of neighbours.

Keys and values on pages a, a+1, a+2, ... can be read without being gathered first. So a sequence is
given the page after its last one where that is free, and a place to begin with room behind it.
"""

from __future__ import annotations

from outrider.errors import OutOfPages, check


def require_pages(num_missing: int) -> None:
    """Raises `OutOfPages` where so many are missing even with all that is idle evicted."""
    if num_missing > 0:
        raise OutOfPages(f"the sequences in use leave {num_missing} pages too few")


class FreePages:
    """The free ones of pages 0..num_pages-1, at first all; every change of a run costs O(1).

    table     at                     holds
    _ends     a run's first page     the page after its last one; 0 elsewhere
    _starts   a run's last page      its first page; -1 elsewhere
    _runs     [length's bits]        the first pages of the runs of such lengths
    """

    def __init__(self, num_pages: int) -> None:
        check(num_pages > 0, f"{num_pages} pages; at least one is needed")
        self._num_free = 0
        self._ends = [0] * (num_pages + 1)  # the last place is no page: it begins no run
        self._starts = [-1] * (num_pages + 1)  # nor does it end one, before page 0
        self._runs: list[dict[int, None]] = [{} for _ in range(num_pages.bit_length() + 1)]
        self._add(0, num_pages)

    def __len__(self) -> int:
        return self._num_free

    def take(self, num: int, after: int = -1) -> list[int]:
        """Takes `num` pages, at most as many as are free: those that follow page `after` (-1 =
        none, else a taken one), then such as follow one another as far as can be."""
        check(num <= self._num_free, f"{num} pages are wanted, {self._num_free} are free")
        taken: list[int] = []
        if after >= 0 and self._ends[after + 1]:
            taken.extend(self._cut(after + 1, after + 1, num))
        while len(taken) < num:
            start = self._a_long_run()
            length, missing = self._ends[start] - start, num - len(taken)
            # Whoever holds the page before the run may grow into its first half.
            spared = max(0, min(length // 2, length - missing)) if start else 0
            taken.extend(self._cut(start, start + spared, missing))
        return taken

    def put(self, page: int) -> None:
        """Gives back a page that was taken."""
        start = self._starts[page - 1]
        start = page if start < 0 else start
        end = self._ends[page + 1] or page + 1
        if start < page:
            self._remove(start)
        if end > page + 1:
            self._remove(page + 1)
        self._add(start, end)

    def pages(self) -> list[int]:
        """All free pages, ascending."""
        starts = sorted(start for runs in self._runs for start in runs)
        return [page for start in starts for page in range(start, self._ends[start])]

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless the runs are maximal and counted."""
        starts = sorted(start for runs in self._runs for start in runs)
        ends = [self._ends[start] for start in starts]
        check(
            all(end < start for end, start in zip(ends, starts[1:], strict=False)),
            "free runs touch or overlap",
        )
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        check(min(lengths, default=1) > 0, "a free run is empty")
        check(sum(lengths) == self._num_free, "the free pages are miscounted")
        for start, end, length in zip(starts, ends, lengths, strict=True):
            check(self._starts[end - 1] == start, f"the free run at {start} has lost its start")
            check(start in self._runs[length.bit_length()], f"the free run at {start} is misfiled")
        check(sum(map(bool, self._ends)) == len(starts), "an end of a free run is left over")
        check(sum(start >= 0 for start in self._starts) == len(starts), "a start is left over")

    def _a_long_run(self) -> int:
        """The first page of a run more than half as long as the longest."""
        runs = next(runs for runs in reversed(self._runs) if runs)
        return next(reversed(runs))

    def _cut(self, start: int, first: int, num: int) -> range:
        """Takes up to `num` pages from `first` on out of the run that begins at `start`."""
        end = self._ends[start]
        stop = min(end, first + num)
        self._remove(start)
        if start < first:
            self._add(start, first)
        if stop < end:
            self._add(stop, end)
        return range(first, stop)

    def _add(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end - 1] = end, start
        self._runs[(end - start).bit_length()][start] = None
        self._num_free += end - start

    def _remove(self, start: int) -> None:
        end = self._ends[start]
        self._ends[start], self._starts[end - 1] = 0, -1
        del self._runs[(end - start).bit_length()][start]
        self._num_free -= end - start
