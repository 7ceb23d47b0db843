"""Runs steps on a fused decoder.

The new tokens of a step are cut into *spans*, each of consecutive tokens of one sequence. Up to the
maximum length of spans, a token's attention is bit-equal in spans of any length."""

import warnings
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.cpu.decoder import FusedDecoder
from outrider.engine.cpu.kernels import Attention
from outrider.engine.gathered_attention import Steps
from outrider.engine.interface import SequenceStep
from outrider.engine.threads import on_threads
from outrider.kv_cache.storage import BlockedKeysAndValues, KVCache, LayerShape
from outrider.limits import PAGE_SIZE

_ONE_STEP = Lock()
"""A step holds this lock, because the kernels' attention has only one working memory in a process,
and a process may run two engines."""
SPAN_TOKENS_MAX = 16
"""Longer spans are not faster. For the demo target on one thread, a prompt of 1,024 tokens takes
1,770 ms in spans of 8, and 2,170 ms in spans of 64."""


class FusedSteps(Steps):
    """Runs steps on a fused decoder."""

    def __init__(
        self,
        decoder: FusedDecoder,
        caches: Sequence[BlockedKeysAndValues],
        span_tokens: int = SPAN_TOKENS_MAX,
        has_logits: bool = True,
        is_scripted: bool = True,
        taps: Sequence[int] = (),
    ) -> None:
        """Runs the first layers, one for each of the `caches`. If `has_logits` is false, `run`
        returns the last layer's output instead of logits. `taps` are indices of layers."""
        self._decoder, self._span_tokens, self._has_logits = decoder, span_tokens, has_logits
        self._taps = sorted(taps)
        self.tapped: dict[int, Tensor] = {}  # the input [T, D] of each layer in `taps`
        self._keys = [cache.keys for cache in caches]
        self._values = [cache.values for cache in caches]
        self._layers: Any = decoder.layers.eval()
        if is_scripted:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated.
                self._layers = torch.jit.script(self._layers)
            # A layer makes a dozen calls. A call that is not inlined costs 0.3 us.
            torch._C._jit_pass_inline(self._layers.graph)

    def run(self, step: HeldStep) -> Tensor:
        decoder = self._decoder
        ids, positions, slots, wanted = map(torch.from_numpy, step.rows)
        cos, sin = (
            [table.index_select(0, positions)[None] for table in tables]
            for tables in zip(*decoder.rotations, strict=True)
        )
        # Optimized execution compiles during the first steps of each shape, but is no faster.
        with _ONE_STEP, torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            found, residual, tapped = self._layers(
                decoder.embed(ids[None]), cos, sin, slots, self._keys, self._values,
                self._attention(step.sequences), self._taps,
            )  # fmt: skip
            found, residual = found.index_select(1, wanted), residual.index_select(1, wanted)
            output: Tensor = (
                decoder.logits(found, residual) if self._has_logits else found + residual
            )
            self.tapped = {layer: rows[0] for layer, rows in zip(self._taps, tapped, strict=True)}
            return output[0]

    def _attention(self, sequences: Sequence[HeldSequence]) -> Attention:
        """Cuts the new tokens of the sequences into spans."""
        starts, ends, spans = [0], [], []
        for held in sequences:
            num, row = len(held.step.token_ids), starts[-1]
            for done in (*range(self._span_tokens, num, self._span_tokens), num):
                starts.append(row + done)
                ends.append(held.length + done)
                spans.append(held.pages)
        table = np.zeros((len(spans), max(map(len, spans))), dtype=np.int32)
        for entry, pages in zip(table, spans, strict=True):
            entry[: len(pages)] = pages
        first, last = (torch.tensor(values, dtype=torch.int32) for values in (starts, ends))
        kernels, sizes = self._decoder.kernels, self._decoder.sizes
        schedules = [
            kernels.schedule(first, last, sizes, window) for window in self._decoder.windows
        ]
        return Attention(first, last, torch.from_numpy(table), schedules)


_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96)
_NUM_ROWS = 96
_FIRST_LENGTH = 128
_NUM_PAGES = 257  # of the trial's cache; longer contexts use them several times


@torch.inference_mode()
def find_span_tokens(
    decoder: FusedDecoder, max_model_len: int, thread_counts: Sequence[int]
) -> int | None:
    """Returns the greatest `span_tokens` of `FusedSteps` with which rows are bit-equal in steps of
    any number of rows; None if they differ even in spans of one token. The trial runs the last
    tokens of short and of long sequences, with each of the `thread_counts`. It runs the first
    layers, as many as include every kind, because layers of one kind compute alike."""
    kinds = [layer.kind for layer in decoder.layers.weights]
    sizes, kernels = decoder.sizes, decoder.kernels
    shape = LayerShape(
        sizes.key_heads, sizes.width, sizes.width, kernels.dtype, torch.device("cpu")
    )
    num_layers = 1 + max(map(kinds.index, kinds))
    caches = KVCache([shape] * num_layers, _NUM_PAGES, PAGE_SIZE, is_blocked=True).layers
    generator = torch.Generator().manual_seed(1)
    for cache in caches:
        for tensor in (cache.keys, cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    vocabulary = len(decoder.embed.weight)
    num_own = -(-_NUM_ROWS // PAGE_SIZE) + 1

    def rows(span: int, begin: int, num: int, length: int) -> Tensor:
        """Returns the rows of `num` tokens after `begin` other tokens of a sequence with pages for
        `length` tokens."""
        before = torch.arange(-(-length // PAGE_SIZE)) % (_NUM_PAGES - num_own)
        pages = [*before.tolist()[:-num_own], *range(_NUM_PAGES - num_own, _NUM_PAGES)]
        ids = tuple(7919 * place % vocabulary for place in range(begin, begin + num))
        held = HeldSequence(SequenceStep("", ids, num), begin, pages)
        has_logits = length <= _NUM_ROWS  # The LM head need not be tried for every length.
        steps = FusedSteps(decoder, caches, span, has_logits, is_scripted=False)
        return steps.run(HeldStep([held], PAGE_SIZE))

    def equal(num_threads: int, span: int, length: int, num: int, counts: Iterable[int]) -> bool:
        """Whether the rows of some of the last `num` tokens, in steps of `counts` tokens, equal
        their rows in one step, in spans of one token on `thread_counts[0]` threads."""
        first = length - num
        with on_threads(thread_counts[0]):
            expected = rows(1, first, num, length)
        with on_threads(num_threads):
            for count in counts:
                start = (7 * count) % (num - count + 1)
                found = rows(span, first + start, count, length)
                if not torch.equal(found, expected[start : start + count]):
                    return False
        return True

    length = num = min(_NUM_ROWS, max_model_len)
    counts, span = {count for count in _ROW_COUNTS if count <= num}, SPAN_TOKENS_MAX
    while True:
        for num_threads in thread_counts:
            while span and not equal(num_threads, span, length, num, counts):
                span //= 2
        if span == 0 or length == max_model_len:
            return span or None
        length = min(max(_FIRST_LENGTH, 2 * length), max_model_len)
        num, counts = SPAN_TOKENS_MAX, {span, max(1, span - 1), 1}
