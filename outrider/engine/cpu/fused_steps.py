"""Runs steps on a fused decoder.

The new tokens of a step are cut into *spans*: consecutive tokens of one sequence, each of which
sees its sequence's slots up to itself, few enough that a token's attention is bit-equal in spans of
any length.

The kernels' attention is causal, and a tree has several paths. So the pages of a sequence with a
tree are copied, one layer after another; there each path is a sequence of its own, and the
attention of its tokens is what it would be in a chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import HeldSequence, rows_of
from outrider.engine.cpu.decoder import FusedDecoder
from outrider.engine.cpu.kernels import Attention, Copies, LayerWeights
from outrider.engine.gathered_attention import Steps
from outrider.engine.threads import on_threads
from outrider.kv_cache.storage import BlockedKeysAndValues, LayerShape

_ONE_STEP: Final = Lock()
"""Held during a step: attention of the kernels has one working memory for the whole process, and
two engines may run in it."""


_SPAN_SIZES: Final = (16, 8, 4, 2, 1)
SPAN_TOKENS_MAX: Final = _SPAN_SIZES[0]
"""Longer ones are no quicker: 512 tokens of a prompt of the demo target take 823 ms on one thread
in spans of 8 as of 64, 1,024 take 1,770 and 2,170."""


class FusedSteps(Steps):
    """On a fused decoder."""

    def __init__(
        self,
        decoder: FusedDecoder,
        caches: Sequence[BlockedKeysAndValues],
        page_size: int,
        span_tokens: int = SPAN_TOKENS_MAX,
        is_whole: bool = True,
    ) -> None:
        """Runs as many of the first layers as there are caches. If those are not the `whole` model,
        rows are what they put out."""
        self._decoder = decoder
        self._page_size = page_size
        self._span_tokens = span_tokens
        self._is_whole = is_whole
        self._keys = [cache.keys for cache in caches]
        self._values = [cache.values for cache in caches]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Of TorchScript.
            self._layers: Any = torch.jit.script(decoder.layers.eval())

    def run(self, sequences: Sequence[HeldSequence]) -> Tensor:
        decoder = self._decoder
        ids, positions, slots, wanted = map(torch.from_numpy, rows_of(sequences, self._page_size))
        chains, paths = (_Spans(decoder, self._span_tokens) for _ in range(2))
        copies = _Paths(paths, self._page_size)
        row = 0
        for held in sequences:
            rows = range(row, row + len(held.step.token_ids))
            if held.step.parents:
                copies.add(held, row)
            else:
                chains.add(held.length, rows, held.pages)
            row = rows.stop
        cos, sin = (
            [table.index_select(0, positions)[None] for table in tables]
            for tables in zip(*decoder.rotations, strict=True)
        )
        has_trees = bool(copies.pages)
        # Without "optimized" the first steps of each shape need not wait for a compiler that gains
        # nothing here.
        with _ONE_STEP, torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            found, residual = self._layers(
                decoder.embed(ids[None]), cos, sin, slots, self._keys, self._values,
                chains.made(is_all=not has_trees), paths.made(),
                copies.made() if has_trees else None,
            )  # fmt: skip
            found, residual = found.index_select(1, wanted), residual.index_select(1, wanted)
            whole = self._is_whole
            output: Tensor = decoder.logits(found, residual) if whole else found + residual
            return output[0]


class _Spans:
    """The spans of a step as they are found."""

    def __init__(self, decoder: FusedDecoder, span_tokens: int) -> None:
        self._decoder = decoder
        self._size = span_tokens
        self._rows: list[int] = []
        self._starts = [0]
        self._ends: list[int] = []
        self._pages: list[Sequence[int]] = []

    def add(self, length: int, rows: Sequence[int], pages: Sequence[int]) -> None:
        """Consecutive tokens, which stand in these rows of the step and follow `length` others."""
        for done in (*range(self._size, len(rows), self._size), len(rows)):
            self._starts.append(len(self._rows) + done)
            self._ends.append(length + done)
            self._pages.append(pages)
        self._rows.extend(rows)

    def made(self, *, is_all: bool = False) -> Attention | None:
        """None where there are none. `is_all`: they are all rows of the step, in its order."""
        if not self._ends:
            return None
        table = np.zeros((len(self._pages), max(map(len, self._pages))), dtype=np.int32)
        for row, pages in zip(table, self._pages, strict=True):
            row[: len(pages)] = pages
        rows = None if is_all else torch.tensor(self._rows)
        return attention(self._decoder, rows, self._starts, self._ends, torch.from_numpy(table))


def attention(
    decoder: FusedDecoder,
    rows: Tensor | None,
    starts: Sequence[int],
    ends: Sequence[int],
    pages: Tensor,
) -> Attention:
    """See `Attention`; with a schedule for each kind of layer."""
    starts_, ends_ = (torch.tensor(values, dtype=torch.int32) for values in (starts, ends))
    schedules = [
        decoder.kernels.schedule(starts_, ends_, decoder.sizes, window)
        for window in decoder.windows
    ]
    return Attention(rows, starts_, ends_, pages, schedules)


class _Paths:
    """The paths of a step's trees as they are found, and the copies on which they are sequences."""

    def __init__(self, spans: _Spans, page_size: int) -> None:
        self.pages: list[int] = []
        """See `Copies.pages`."""
        self._spans = spans
        self._page_size = page_size
        self._rows: list[int] = []
        self._slots: list[int] = []

    def add(self, held: HeldSequence, first_row: int) -> None:
        """A sequence with a tree, whose tokens stand in the rows from `first_row` on."""
        parents, size = held.step.parents, self._page_size
        num_whole, num_loose = divmod(held.length, size)
        whole = [self._copy(page) for page in held.pages[:num_whole]]
        seen: set[int] = set()
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            path.reverse()
            num_own = -(-(num_loose + len(path)) // size)
            own = [self._copy(held.pages[num_whole + i]) for i in range(num_own)]
            for depth, token in enumerate(path):
                page, place = divmod(num_loose + depth, size)
                self._rows.append(first_row + token)
                self._slots.append(own[page] * size + place)
            new = [token for token in path if token not in seen]
            seen.update(new)
            begin = held.length + len(path) - len(new)
            self._spans.add(begin, [first_row + token for token in new], whole + own)

    def _copy(self, page: int) -> int:
        self.pages.append(page)
        return len(self.pages) - 1

    def made(self) -> Copies:
        return Copies(*(torch.tensor(ids) for ids in (self.pages, self._rows, self._slots)))


_ROW_COUNTS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96)
_NUM_ROWS: Final = 96
_FIRST_LENGTH: Final = 128
_NUM_PAGES: Final = 257
"""Of the cache that is tried; longer contexts repeat them."""


@torch.inference_mode()
def find_span_tokens(
    decoder: FusedDecoder, page_size: int, max_model_len: int, thread_counts: Sequence[int]
) -> int | None:
    """The most tokens of a span with which rows are bit-equal on any of these numbers of threads;
    None where they are not even with spans of one token."""
    found = []
    for kind in range(len(decoder.windows)):
        layer = next(layer for layer in decoder.layers.weights if layer.kind == kind)
        if not _has_equal_rows(decoder, layer, thread_counts):
            return None
        equal = _equal_attention(decoder, layer, page_size, max_model_len, thread_counts)
        found.append(next((size for size in _SPAN_SIZES if equal(size)), None))
    return None if None in found else min(size for size in found if size)


def _has_equal_rows(
    decoder: FusedDecoder, layer: LayerWeights, thread_counts: Sequence[int]
) -> bool:
    """Whether what is done with single rows in a layer, and behind the last one, gives each the
    same, however many there are."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(decoder.kernels.dtype)

    layers, sizes = decoder.layers, decoder.sizes
    hidden, others = drawn(2, 1, _NUM_ROWS, decoder.width).unbind()
    attended = drawn(_NUM_ROWS, sizes.query_heads, sizes.width)
    places = torch.arange(_NUM_ROWS) % len(decoder.rotations[0][0])

    def results(rows: slice) -> Iterator[Tensor]:
        part, other = hidden[:, rows], others[:, rows]
        tables = zip(*decoder.rotations, strict=True)
        cos, sin = ([table[places[rows]][None] for table in both] for both in tables)
        normed, _ = layers.add_norm(part, other, layer.first_norm)
        for states in layers.before(layer, normed, cos, sin):
            yield states[None]
        yield from layers.after(layer, attended[rows], part)
        yield decoder.logits(part, other)

    whole = list(results(slice(0, _NUM_ROWS)))
    for num_threads in thread_counts:
        with on_threads(num_threads):
            for place, num in enumerate(_ROW_COUNTS):
                first = (7 * place) % (_NUM_ROWS - num + 1)
                rows = slice(first, first + num)
                for expected, part in zip(whole, results(rows), strict=True):
                    if not torch.equal(expected[:, rows], part):
                        return False
    return True


def _equal_attention(
    decoder: FusedDecoder,
    layer: LayerWeights,
    page_size: int,
    max_model_len: int,
    thread_counts: Sequence[int],
) -> Callable[[int], bool]:
    """Whether a token's attention in a layer is what it is alone in spans of so many tokens, of
    less, and in a shorter last one, at the end of sequences of all lengths."""
    generator = torch.Generator().manual_seed(2)
    dtype, sizes = decoder.kernels.dtype, decoder.sizes
    shape = LayerShape(sizes.key_heads, sizes.width, sizes.width, dtype, torch.device("cpu"))
    cache = BlockedKeysAndValues(shape, _NUM_PAGES, page_size)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    queries = torch.randn(SPAN_TOKENS_MAX, sizes.query_heads, sizes.width, generator=generator)
    queries = queries.to(dtype)
    lengths = [_FIRST_LENGTH]
    while lengths[-1] < max_model_len:
        lengths.append(2 * lengths[-1])
    lengths = [min(length, max_model_len) for length in lengths]

    def attended(length: int, tokens: range, size: int) -> Tensor:
        """Of some of the last tokens of a sequence, in spans of this size."""
        cuts = [*range(tokens.start, tokens.stop, size), tokens.stop]
        before = length - min(length, SPAN_TOKENS_MAX)
        pages = torch.arange(-(-length // page_size), dtype=torch.int32) % _NUM_PAGES
        table = pages.expand(len(cuts) - 1, -1).contiguous()
        starts = [cut - tokens.start for cut in cuts]
        spans = attention(decoder, None, starts, [before + cut for cut in cuts[1:]], table)
        own = queries[tokens.start : tokens.stop].contiguous()
        output = torch.empty_like(own)
        decoder.layers.attend(layer, own, cache.keys, cache.values, output, spans)
        return output

    def alone(length: int) -> Tensor:
        num = min(length, SPAN_TOKENS_MAX)
        return torch.cat([attended(length, range(i, i + 1), 1) for i in range(num)])

    expected = {length: alone(length) for length in lengths}

    def equal(size: int) -> bool:
        for num_threads in thread_counts:
            with on_threads(num_threads):
                for length, rows in expected.items():
                    for part in {1, size, max(1, size - 1), max(1, size // 2)}:
                        if not torch.equal(attended(length, range(len(rows)), part), rows):
                            return False
        return True

    return equal
