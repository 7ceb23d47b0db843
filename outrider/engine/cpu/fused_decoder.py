"""A decoder of the Llama family on fused kernels.

`FusedSteps` cuts the new tokens of a step into *spans*, each of consecutive tokens of one sequence.
In spans up to the length that `find_span_tokens` returns, a token's attention has the same bits."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.gathered_attention import Steps
from outrider.interfaces.engine import SequenceStep
from outrider.kernels.cpu import Attention, LayerSizes, LayerWeights, PaceKernels
from outrider.kernels.threads import on_threads
from outrider.kv_cache.storage import BlockedKeysAndValues, KVCache, LayerShape
from outrider.limits import PAGE_SIZE
from outrider.models.decoder_parts import CannotFuse, DecoderParts, LayerParts
from outrider.models.linear_layers import FusedLinear
from outrider.models.module_replacement import NativeRMSNorm

_ONE_STEP = Lock()
"""A step holds this lock, because the kernels' attention has only one working memory in a process,
and a process may run two engines."""
SPAN_TOKENS_MAX = 16
"""Longer spans are not faster. For the demo target on one thread, a prompt of 1,024 tokens takes
1,770 ms in spans of 8, and 2,170 ms in spans of 64."""


class FusedDecoder:
    """Runs a model's decoder and LM head on fused kernels. Shares the model's weights."""

    page_size, num_spare_pages = PAGE_SIZE, 0

    def __init__(
        self,
        parts: DecoderParts,
        kernels: PaceKernels,
        max_model_len: int,
        thread_counts: Sequence[int],
        *,
        taps: Sequence[int] = (),
    ) -> None:
        """The linear layers of `parts` must already be replaced for these kernels. `thread_counts`:
        all numbers of threads that steps may have. `taps`: layers whose inputs a step keeps. Raises
        `CannotFuse`."""
        self.kernels = kernels
        self.rotations = parts.rotations
        self.windows = list(dict.fromkeys(layer.attention.window for layer in parts.layers))
        epsilons = {norm.eps for norm in parts.norms}
        sizes = {_sizes(layer, kernels, eps) for layer in parts.layers for eps in epsilons}
        if len(sizes) != 1:
            raise CannotFuse("its layers differ in their heads, activations or norms")
        [self.sizes] = sizes
        self.layers = kernels.layers([*map(self._weights, parts.layers)], self.sizes)
        self.embed = parts.embed
        self._last_norm = _norm(parts.norm, kernels)
        self._head = parts.head
        self._taps = taps
        found = find_span_tokens(self, max_model_len, thread_counts)
        self.rows_are_equal = found is not None
        self.numerics = self._span_tokens = found or SPAN_TOKENS_MAX
        self.kernels_name = kernels.name

    @property
    def note(self) -> str:
        if not self.rows_are_equal:
            return "a token's logits depend on the other tokens of its step"
        return (
            "logits do not depend on a step's other tokens; "
            f"attention takes {self._span_tokens} tokens at once"
        )

    def new_steps(self, caches: Sequence[BlockedKeysAndValues]) -> "FusedSteps":
        """See `CpuDecoder.new_steps`."""
        return FusedSteps(self, caches, self._span_tokens, taps=self._taps)

    def drop_sources(self) -> None:
        """Does nothing, because the decoder shares all weights."""

    def restore_sources(self) -> None:
        """See `CpuDecoder.restore_sources`. The module has kept its weights."""

    def logits(self, rows: Tensor, residual: Tensor) -> Tensor:
        """Returns logits [1, L, V] for the last layer's output and its residual, each [1, L, D]."""
        logits: Tensor
        if rows.numel():  # The kernels accept no empty matrices.
            rows = self.layers.add_norm(rows, residual, self._last_norm)[0]
        logits = self._head(rows)
        return logits

    def _weights(self, parts: LayerParts) -> LayerWeights:
        block, layer, kernels = parts.block, parts.attention, self.kernels
        attention, mlp = block.self_attn, block.mlp
        gate, up = mlp.gate_up_proj.packed.chunk(2)
        return LayerWeights(
            first_norm=_norm(block.input_layernorm, kernels),
            qkv=attention.qkv_proj.packed,
            qkv_bias=attention.qkv_proj.bias,
            query_norm=_optional_norm(attention.q_norm, kernels),
            key_norm=_optional_norm(attention.k_norm, kernels),
            output=attention.o_proj.packed,
            output_bias=attention.o_proj.bias,
            attention_norm=_optional_norm(block.attention_norm, kernels),
            second_norm=_norm(block.mlp_input_norm, kernels),
            gate=gate,
            up=up,
            down=mlp.down_proj.packed,
            mlp_norm=_optional_norm(block.mlp_output_norm, kernels),
            rotation=parts.rotation,
            kind=self.windows.index(layer.window),
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            window=-1 if layer.window is None else layer.window - 1,
        )


def _sizes(parts: LayerParts, kernels: PaceKernels, eps: float) -> LayerSizes:
    mlp, layer, shape = parts.block.mlp, parts.attention, parts.attention.shape
    wrong = [linear for linear in parts.linears if not isinstance(linear, FusedLinear)]
    if wrong:
        raise CannotFuse(f"the kernels cannot run its linear layer {wrong[0]}")
    activation = _activation(mlp.act_fn, kernels)
    if activation is None or mlp.gate_up_proj.bias is not None or mlp.down_proj.bias is not None:
        raise CannotFuse(f"its MLP has a bias, or an unsupported activation ({mlp.act_fn})")
    return LayerSizes(layer.query_heads, shape.num_heads, shape.key_width, eps, activation)


def _activation(function: Any, kernels: PaceKernels) -> str | None:
    """Returns the kernels' name for an activation function, or None if they lack it. Allows small
    differences, so that the tanh approximation of GELU counts as GELU."""
    rows = torch.linspace(-8, 8, 1025, dtype=kernels.dtype)
    for name in kernels.activations:
        expected = getattr(functional, name)(rows)
        tolerance = torch.finfo(rows.dtype).eps * expected.abs().clamp(min=1)
        if bool(((function(rows) - expected).abs() <= tolerance).all()):
            return name
    return None


def _norm(norm: NativeRMSNorm, kernels: PaceKernels) -> Tensor:
    """Returns the factors of a norm, in the kernels' dtype unless this would round a factor."""
    weight = norm.factor.to(kernels.dtype)
    return weight if torch.equal(weight.to(norm.factor.dtype), norm.factor) else norm.factor


def _optional_norm(norm: NativeRMSNorm | None, kernels: PaceKernels) -> Tensor | None:
    return None if norm is None else _norm(norm, kernels)


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
        """Runs the first `len(caches)` layers. If `has_logits` is false, `run` returns the output
        of the last of these layers instead of logits. `taps`: layers whose inputs are kept."""
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
            # A layer makes a dozen calls. Inlining saves 0.3 us for each call.
            torch._C._jit_pass_inline(self._layers.graph)

    def run(self, step: HeldStep) -> Tensor:
        decoder = self._decoder
        ids, positions, slots, wanted = map(torch.from_numpy, step.rows)
        cos, sin = (
            [table.index_select(0, positions)[None] for table in tables]
            for tables in zip(*decoder.rotations, strict=True)
        )
        # Optimized execution would compile in the first steps of each shape, and is no faster.
        with _ONE_STEP, torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            hidden, residual, tapped = self._layers(
                decoder.embed(ids[None]),
                cos,
                sin,
                slots,
                self._keys,
                self._values,
                self._attention(step.sequences),
                self._taps,
            )
            hidden, residual = hidden.index_select(1, wanted), residual.index_select(1, wanted)
            output: Tensor = (
                decoder.logits(hidden, residual) if self._has_logits else hidden + residual
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
        counts = np.array([*map(len, spans)])[:, None]
        is_held = np.arange(counts.max()) < counts
        table = np.zeros(is_held.shape, dtype=np.int32)
        table[is_held] = [*chain.from_iterable(spans)]
        first, last = (torch.tensor(values, dtype=torch.int32) for values in (starts, ends))
        kernels, sizes = self._decoder.kernels, self._decoder.sizes
        windows = self._decoder.windows
        schedules = [kernels.schedule(first, last, sizes, window) for window in windows]
        return Attention(first, last, torch.from_numpy(table), schedules)


_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96)
_NUM_ROWS = 96
_FIRST_LENGTH = 128
_NUM_PAGES = 257  # pages of the cache in `find_span_tokens`; longer sequences repeat some pages


@torch.inference_mode()
def find_span_tokens(
    decoder: FusedDecoder, max_model_len: int, thread_counts: Sequence[int]
) -> int | None:
    """Returns the greatest length of spans with which a token's output has the same bits in steps
    of any size. Returns None if even spans of one token fail. Tries the last tokens of short and of
    long sequences, with each of the `thread_counts`. Layers with the same attention window (`kind`)
    compute alike. So runs only the first layers, until each kind is included."""
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
        """Returns the output rows of `num` tokens that follow `begin` other tokens, in a sequence
        with pages for `length` tokens."""
        before = torch.arange(-(-length // PAGE_SIZE)) % (_NUM_PAGES - num_own)
        pages = [*before.tolist()[:-num_own], *range(_NUM_PAGES - num_own, _NUM_PAGES)]
        ids = tuple(7919 * place % vocabulary for place in range(begin, begin + num))
        held = HeldSequence(SequenceStep("", ids, num), begin, pages)
        has_logits = length <= _NUM_ROWS  # The LM head need not be tried for every length.
        steps = FusedSteps(decoder, caches, span, has_logits, is_scripted=False)
        return steps.run(HeldStep([held], PAGE_SIZE))

    def equal(num_threads: int, span: int, length: int, num: int, counts: Iterable[int]) -> bool:
        """Whether steps of sizes `counts`, with spans of `span` on `num_threads` threads, give the
        last `num` of `length` tokens the rows of one step with spans of 1 on `thread_counts[0]`."""
        first = length - num
        with on_threads(thread_counts[0]):
            expected = rows(1, first, num, length)
        with on_threads(num_threads):
            for count in counts:
                start = (7 * count) % (num - count + 1)
                actual = rows(span, first + start, count, length)
                if not torch.equal(actual, expected[start : start + count]):
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
