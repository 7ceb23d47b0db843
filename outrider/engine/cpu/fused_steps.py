"""Runs steps on a fused decoder.

The new tokens of a step are cut into *spans*: consecutive tokens of one sequence, each of which
sees its sequence's slots up to itself. How many tokens a span may have depends on where it ends, so
that a token's attention is bit-equal in spans of any length (`fused_steps.py`).

The kernels' attention is causal, and a tree has several paths. So the pages of a sequence with a
tree are copied to a cache that serves one layer after another; there each path is a sequence of its
own, and the attention of its tokens is what it would be in a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.batch import HeldSequence, slots_of, tree_of
from outrider.engine.cpu.decoder import FusedDecoder, FusedLayer, Layers
from outrider.engine.cpu.kernels import Spans
from outrider.engine.gathered_attention import Steps
from outrider.engine.threads import on_threads
from outrider.kv_cache.storage import BlockedKeysAndValues, LayerShape

_Ints = npt.NDArray[np.int64]
_ONE_STEP: Final = Lock()
"""Held during a step: attention of the kernels has one working memory for the whole process, and
two engines may run in it."""


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """The most tokens of a span, by the length of its sequence up to and with its last token."""

    ends: tuple[int, ...]
    """Ascending lengths; a longer sequence has spans of one token."""
    sizes: tuple[int, ...]
    """For each of `ends`: the most tokens of a span that ends there or before. They descend."""

    def size(self, begin: int, num: int) -> int:
        """Of the first span of `num` tokens that follow `begin` others."""
        fitting = (
            min(num, size, end - begin) for end, size in zip(self.ends, self.sizes, strict=True)
        )
        return max(1, max(fitting, default=1))


NO_LIMITS: Final = SpanLimits((2**30,), (2**30,))


@dataclass(frozen=True, slots=True)
class _Attention:
    """The attention of some rows of a step to slots of one cache."""

    rows: torch.Tensor | None
    """[Q]: the rows, in the order of the spans; None = all of them."""
    spans: Spans
    schedules: list[torch.Tensor]
    """Of the spans, by kind of layer."""


@dataclass(frozen=True, slots=True)
class _Copies:
    """What the cache of a step's paths holds."""

    pages: torch.Tensor
    """[P]: the page of the layer's cache that each of its pages is a copy of."""
    rows: torch.Tensor
    """[W]: rows of the step whose keys and values are written to it ..."""
    slots: torch.Tensor
    """... and their slots, [W]."""


@dataclass(frozen=True, slots=True)
class _Plan:
    token_ids: torch.Tensor
    """[T]."""
    positions: torch.Tensor
    """[T]."""
    slots: torch.Tensor
    """[T]: where keys and values go."""
    wanted_rows: torch.Tensor
    """[L]."""
    chains: _Attention | None
    paths: tuple[_Copies, _Attention] | None
    path_caches: dict[torch.Size, BlockedKeysAndValues] = field(default_factory=dict)
    """By key heads and width: the cache of the paths of one layer after another."""


class FusedSteps(Steps):
    """On a fused decoder."""

    def __init__(
        self,
        decoder: FusedDecoder,
        caches: Sequence[BlockedKeysAndValues],
        page_size: int,
        limits: SpanLimits = NO_LIMITS,
        num_layers: int | None = None,
    ) -> None:
        """With `num_layers` the first layers alone are run, and rows are what they put out."""
        self._decoder = decoder
        self._kernels = decoder.kernels
        self._caches = caches
        self._page_size = page_size
        self._limits = limits
        self._num_layers = num_layers
        layers = decoder.layers[:num_layers]
        kinds = [_kind(layer) for layer in layers]
        self._kinds = list(dict.fromkeys(kinds))
        self._kind_of = [self._kinds.index(kind) for kind in kinds]
        self._at_once = None if num_layers else self._kernels.at_once(layers, caches, self._kind_of)

    def run(self, sequences: Sequence[HeldSequence]) -> torch.Tensor:
        plan = self._plan(sequences)

        given = (plan.token_ids, plan.positions, plan.wanted_rows, self._layers(plan))
        with _ONE_STEP:
            if self._num_layers is None:
                return self._decoder.logits(*given)
            return self._decoder.hidden(*given)

    def _layers(self, plan: _Plan) -> Layers:
        """In one call where that is possible and no attention goes to copies of pages."""
        at_once, chains = self._at_once, plan.chains
        if at_once is None or chains is None or plan.paths is not None:
            return self._decoder.one_by_one(partial(self._attend, plan), self._num_layers)
        spans = chains.spans
        return lambda rows, cos, sin: at_once(
            rows, cos, sin, plan.slots, spans.starts, spans.ends, spans.pages, chains.schedules
        )

    def _attend(
        self, plan: _Plan, index: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        cache = self._caches[index]
        self._kernels.write(cache, plan.slots, keys, values)
        if plan.paths is None and plan.chains is not None:
            return self._attend_to(cache, plan.chains, index, query)
        output = torch.empty_like(query)
        if plan.chains is not None:
            self._attend_to(cache, plan.chains, index, query, output)
        if plan.paths is not None:
            copies, attention = plan.paths
            shape = keys.shape[1:]
            own = plan.path_caches.get(shape) or cache.with_pages(len(copies.pages))
            plan.path_caches[shape] = own
            own.copy_from(cache, copies.pages)
            rows = copies.rows
            self._kernels.write(
                own, copies.slots, keys.index_select(0, rows), values.index_select(0, rows)
            )
            self._attend_to(own, attention, index, query, output)
        return output

    def _attend_to(
        self,
        cache: BlockedKeysAndValues,
        attention: _Attention,
        index: int,
        query: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layer, rows = self._decoder.layers[index], attention.rows
        attended = self._kernels.attend(
            query if rows is None else query.index_select(0, rows),
            cache, attention.spans, attention.schedules[self._kind_of[index]], layer.scaling,
            layer.window, layer.softcap,
        )  # fmt: skip
        if output is None or rows is None:
            return attended
        return output.index_copy_(0, rows, attended)

    def _plan(self, sequences: Sequence[HeldSequence]) -> _Plan:
        ids: list[int] = []
        positions: list[_Ints] = []
        slots: list[_Ints] = []
        wanted: list[_Ints] = []
        chains, paths = _Spans(self._limits), _Paths(self._limits, self._page_size)
        for held in sequences:
            step, row, num = held.step, len(ids), len(held.step.token_ids)
            ids.extend(step.token_ids)
            slots.append(slots_of(held, self._page_size)[held.length : held.length + num])
            wanted.append(np.arange(row + num - step.num_logits, row + num))
            if step.parents:
                positions.append(held.length + tree_of(step.parents).depths)
                paths.add(held, row)
            else:
                positions.append(np.arange(held.length, held.length + num))
                chains.add(held.length, range(row, row + num), held.pages)
        return _Plan(
            token_ids=torch.tensor(ids),
            positions=_joined(positions),
            slots=_joined(slots),
            wanted_rows=_joined(wanted),
            chains=chains.made(self._schedules, is_all=not paths.pages),
            paths=paths.made(self._schedules),
        )

    def _schedules(self, spans: Spans) -> list[torch.Tensor]:
        return [self._kernels.schedule(spans, *kind) for kind in self._kinds]


def _kind(layer: FusedLayer) -> tuple[int, int, int, int | None]:
    """What its schedule depends on: query heads, key heads, width, window."""
    return layer.heads[0], layer.heads[1], layer.width, layer.window


class _Spans:
    """The spans of a step as they are found."""

    def __init__(self, limits: SpanLimits) -> None:
        self._limits = limits
        self._rows: list[int] = []
        self._starts = [0]
        self._ends: list[int] = []
        self._pages: list[Sequence[int]] = []

    def add(self, length: int, rows: Sequence[int], pages: Sequence[int]) -> None:
        """Consecutive tokens, which stand in these rows of the step and follow `length` others."""
        done = 0
        while done < len(rows):
            size = self._limits.size(length + done, len(rows) - done)
            done += size
            self._starts.append(self._starts[-1] + size)
            self._ends.append(length + done)
            self._pages.append(pages)
        self._rows.extend(rows)

    def made(
        self, schedules: Callable[[Spans], list[torch.Tensor]], *, is_all: bool
    ) -> _Attention | None:
        """None where there are none. `is_all`: they are all rows of the step, in its order."""
        if not self._ends:
            return None
        table = np.zeros((len(self._pages), max(map(len, self._pages))), dtype=np.int32)
        for row, pages in zip(table, self._pages, strict=True):
            row[: len(pages)] = pages
        spans = Spans(
            torch.tensor(self._starts, dtype=torch.int32),
            torch.tensor(self._ends, dtype=torch.int32),
            torch.from_numpy(table),
        )
        rows = None if is_all else torch.tensor(self._rows)
        return _Attention(rows, spans, schedules(spans))


class _Paths:
    """The paths of a step's trees as they are found, and the cache in which they are sequences."""

    def __init__(self, limits: SpanLimits, page_size: int) -> None:
        self.pages: list[int] = []
        """See `_Copies.pages`."""
        self._spans = _Spans(limits)
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

    def made(
        self, schedules: Callable[[Spans], list[torch.Tensor]]
    ) -> tuple[_Copies, _Attention] | None:
        """None where there are none."""
        attention = self._spans.made(schedules, is_all=False)
        if attention is None:
            return None
        copies = _Copies(*(torch.tensor(ids) for ids in (self.pages, self._rows, self._slots)))
        return copies, attention


def _joined(arrays: Sequence[_Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


_ROW_COUNTS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96)
_NUM_ROWS: Final = 96
_SPAN_SIZES: Final = (64, 32, 16, 8, 4, 2)
_FIRST_LENGTH: Final = 128
_NUM_PAGES: Final = 257
"""Of the cache that is tried; longer contexts repeat them."""


@torch.inference_mode()
def find_span_limits(
    decoder: FusedDecoder, page_size: int, max_model_len: int, thread_counts: Sequence[int]
) -> SpanLimits | None:
    """The spans with which rows are bit-equal on any of these numbers of threads; None where they
    are not even with spans of one token."""
    kinds = {(layer.heads, layer.width, layer.window): layer for layer in decoder.layers}
    found = []
    for layer in kinds.values():
        if not _has_equal_rows(decoder, layer, thread_counts):
            return None
        limits = _attention_limits(decoder, layer, page_size, max_model_len, thread_counts)
        if limits is None:
            return None
        found.append(limits)
    ends = max((limits.ends for limits in found), key=len)
    sizes = [
        min(limits.sizes[place] if place < len(limits.sizes) else 1 for limits in found)
        for place in range(len(ends))
    ]
    return SpanLimits(ends, tuple(sizes))


def _has_equal_rows(decoder: FusedDecoder, layer: FusedLayer, thread_counts: Sequence[int]) -> bool:
    """Whether the operators that see single rows give each the same, however many there are."""
    generator = torch.Generator().manual_seed(1)

    def drawn(width: int) -> torch.Tensor:
        rows = torch.randn(1, _NUM_ROWS, width, generator=generator)
        return rows.to(decoder.kernels.dtype)

    num_heads, num_keys, _ = layer.heads
    hidden = drawn(decoder.width)
    others = drawn(decoder.width)
    heads = drawn((num_heads + num_keys) * layer.width).view(1, _NUM_ROWS, -1, layer.width)
    cos, sin = (table[:_NUM_ROWS] for table in decoder.rotations[layer.rotation])
    places = torch.arange(_NUM_ROWS) % len(cos)
    cos, sin = cos[places][None], sin[places][None]

    def results(rows: slice) -> Iterator[torch.Tensor]:
        part, other = hidden[:, rows], others[:, rows]
        yield layer.first_norm(part)
        yield from layer.second_norm.add(part, other)
        yield layer.qkv(part)
        yield layer.mlp(part)
        yield decoder.logits_of(part, other)
        query, key = heads[:, rows].split_with_sizes((num_heads, num_keys), 2)
        for norm, states in ((layer.query_norm, query), (layer.key_norm, key)):
            if norm is not None:
                yield norm(states)
        yield from decoder.kernels.rotate(query, key, cos[:, rows], sin[:, rows])
        yield layer.output(query.flatten(2).contiguous())

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


def _attention_limits(
    decoder: FusedDecoder,
    layer: FusedLayer,
    page_size: int,
    max_model_len: int,
    thread_counts: Sequence[int],
) -> SpanLimits | None:
    """The spans of a layer's attention; None where even single tokens depend on others."""
    generator = torch.Generator().manual_seed(2)
    dtype = decoder.kernels.dtype
    num_heads, num_keys, _ = layer.heads
    shape = LayerShape(num_keys, layer.width, layer.width, dtype, torch.device("cpu"))
    cache = BlockedKeysAndValues(shape, _NUM_PAGES, page_size)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    queries = torch.randn(_SPAN_SIZES[0], num_heads, layer.width, generator=generator).to(dtype)

    def attended(length: int, sizes: Sequence[int]) -> torch.Tensor:
        """Of the last tokens of a sequence of this length, in spans of these sizes."""
        num = sum(sizes)
        first = length - num
        starts = torch.tensor([0, *sizes]).cumsum(0)
        pages = torch.arange(-(-length // page_size), dtype=torch.int32) % _NUM_PAGES
        table = pages.expand(len(sizes), -1).contiguous()
        spans = Spans(starts.int(), (first + starts[1:]).int(), table)
        kernels = decoder.kernels
        schedule = kernels.schedule(spans, num_heads, num_keys, layer.width, layer.window)
        return kernels.attend(
            queries[-num:].contiguous(), cache, spans, schedule, layer.scaling, layer.window,
            layer.softcap,
        )  # fmt: skip

    def alone(length: int, num: int) -> torch.Tensor:
        rows = []
        for behind in reversed(range(num)):
            kept = queries[len(queries) - 1 - behind].clone()
            saved, queries[-1] = queries[-1].clone(), kept
            rows.append(attended(length - behind, [1]))
            queries[-1] = saved
        return torch.cat(rows)

    ends: list[int] = []
    sizes: list[int] = []
    length, size = min(_FIRST_LENGTH, max_model_len), _SPAN_SIZES[0]
    while True:
        num = min(_SPAN_SIZES[0], length)
        expected = alone(length, num)
        for num_threads in thread_counts:
            with on_threads(num_threads):
                if not torch.equal(attended(length, [1] * num), expected):
                    return None
                while size > 1 and not all(
                    torch.equal(attended(length, _parts(num, part)), expected)
                    for part in (size, size - 1, size // 2)
                    if part > 0
                ):
                    size //= 2
        if size == 1:
            break
        ends.append(length)
        sizes.append(size)
        if length == max_model_len:
            break
        length = min(2 * length, max_model_len)
    return SpanLimits(tuple(ends), tuple(sizes))


def _parts(num: int, size: int) -> list[int]:
    rest = num % size
    return [size] * (num // size) + ([rest] if rest else [])
