"""A decoder of the Llama family on fused kernels.

`outrider/models/module_replacement.py` has already replaced and probed the model's layers, so their
computation is known. Layers have two norms (Llama, Mistral, Qwen 2 and 3) or four (Gemma 3).

`FusedDecoder` runs the model once with placeholders instead of layers, to learn the input of the
first layer, the rotation of each layer, and how logits follow from the last layer's output. If any
of the three differs from a Llama's, the code of transformers runs the model.

`FusedSteps` cuts the new tokens of a step into *spans*, each of consecutive tokens of one sequence.
In spans up to the length that `find_span_tokens` returns, a token's attention has the same bits."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.gathered_attention import Steps
from outrider.errors import OutriderError
from outrider.interfaces.engine import SequenceStep
from outrider.kernels.cpu import Attention, LayerSizes, LayerWeights, PaceKernels
from outrider.kernels.threads import on_threads
from outrider.kv_cache.attention import AttentionLayer
from outrider.kv_cache.storage import BlockedKeysAndValues, KVCache, LayerShape
from outrider.limits import PAGE_SIZE
from outrider.models.linear_layers import FusedLinear
from outrider.models.module_replacement import (
    PROBE_ERRORS,
    DirectLayer,
    FusedAttention,
    FusedMLP,
    NativeRMSNorm,
)
from outrider.models.target_layers import layers_of

_POSITIONS_AT_ONCE = 4096
_OBSERVED_TOKENS = 4
_CHANGING_ROTATIONS = frozenset({"dynamic", "longrope"})  # they depend on a sequence's length
_Rotation = tuple[Tensor, Tensor]  # cosines and sines [positions, width / 2]

_ONE_STEP = Lock()
"""A step holds this lock, because the kernels' attention has only one working memory in a process,
and a process may run two engines."""
SPAN_TOKENS_MAX = 16
"""Longer spans are not faster. For the demo target on one thread, a prompt of 1,024 tokens takes
1,770 ms in spans of 8, and 2,170 ms in spans of 64."""


class CannotFuse(OutriderError):
    """A model cannot run on fused kernels. The message says why."""


class FusedDecoder:
    """Runs a model's decoder and LM head on fused kernels. Shares the model's weights."""

    def __init__(
        self, module: Any, layers: list[AttentionLayer], max_model_len: int, kernels: PaceKernels
    ) -> None:
        """The layers of `module` must already be replaced for these kernels. `layers` is the result
        of `find_layers`. Raises `CannotFuse`."""
        base = module.base_model
        blocks: list[Any] = list(getattr(base, "layers", ()))
        if not blocks or [layer.block for layer in layers] != [
            getattr(block, "self_attn", None) for block in blocks
        ]:
            raise CannotFuse("its layers are not those of a Llama")
        try:
            observed = _observe(module, blocks, max_model_len)
        except PROBE_ERRORS as error:
            raise CannotFuse(
                f"its decoder fails on the tokens of the self-check ({error})"
            ) from error
        self.kernels = kernels
        self.rotations: list[_Rotation] = []
        self.windows = list(dict.fromkeys(layer.window for layer in layers))
        epsilons = {norm.eps for norm in base.modules() if isinstance(norm, NativeRMSNorm)}
        sizes = {
            _sizes(block, layer, kernels, eps)
            for block, layer in zip(blocks, layers, strict=True)
            for eps in epsilons
        }
        if len(sizes) != 1:
            raise CannotFuse("its layers differ in their heads, activations or norms")
        [self.sizes] = sizes
        weights = map(self._weights, blocks, layers, observed)
        self.layers = kernels.layers(list(weights), self.sizes)
        self.embed = base.embed_tokens
        self._last_norm = _norm(base.norm, kernels)
        self._head = module.get_output_embeddings()

    def logits(self, rows: Tensor, residual: Tensor) -> Tensor:
        """Returns logits [1, L, V] for the last layer's output and its residual, each [1, L, D]."""
        logits: Tensor
        if rows.numel():  # The kernels accept no empty matrices.
            rows = self.layers.add_norm(rows, residual, self._last_norm)[0]
        logits = self._head(rows)
        return logits

    def _weights(self, block: Any, layer: AttentionLayer, rotation: _Rotation) -> LayerWeights:
        attention, mlp, kernels = block.self_attn, block.mlp, self.kernels
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
            rotation=_number(self.rotations, rotation),
            kind=self.windows.index(layer.window),
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            window=-1 if layer.window is None else layer.window - 1,
        )


def _sizes(block: Any, layer: AttentionLayer, kernels: PaceKernels, eps: float) -> LayerSizes:
    for module, kind, what in (
        (block, DirectLayer, "a layer"),
        (layer.block, FusedAttention, "attention"),
        (getattr(block, "mlp", None), FusedMLP, "an MLP"),
    ):
        if not isinstance(module, kind):
            raise CannotFuse(f"it has {what} of the class {type(module).__name__}")
    attention, mlp, shape = block.self_attn, block.mlp, layer.shape
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    wrong = [linear for linear in linears if not isinstance(linear, FusedLinear)]
    if wrong:
        raise CannotFuse(f"the kernels cannot run its linear layer {wrong[0]}")
    if shape.key_width != shape.value_width:
        raise CannotFuse("its keys and values have different widths")
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


def _norm(norm: Any, kernels: PaceKernels) -> Tensor:
    """Returns the factors of a norm, in the kernels' dtype unless this would round a factor."""
    if not isinstance(norm, NativeRMSNorm):
        raise CannotFuse(f"it has a norm of the class {type(norm).__name__}")
    weight = norm.factor.to(kernels.dtype)
    return weight if torch.equal(weight.to(norm.factor.dtype), norm.factor) else norm.factor


def _optional_norm(norm: Any, kernels: PaceKernels) -> Tensor | None:
    return None if norm is None else _norm(norm, kernels)


class _NotingLayer(nn.Module):
    """A placeholder for a layer. Records its input and rotation, and returns the input."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        own = vars(self)
        own |= {name: value for name, value in vars(layer).items() if name not in own}
        self.read = torch.empty(0)
        self.rotations: list[_Rotation] = []

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
        self.read = hidden_states
        self.rotations.append(position_embeddings)
        return hidden_states


@torch.inference_mode()
def _observe(module: Any, blocks: Sequence[Any], num_positions: int) -> list[_Rotation]:
    """Returns the rotation of each layer. Raises `CannotFuse` if the parts outside of the layers
    are not those of a Llama."""
    base = module.base_model
    parts = {name for name, _ in base.named_children()}
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        raise CannotFuse(f"its decoder's parts differ from a Llama's: {', '.join(sorted(parts))}")
    kinds = getattr(base.rotary_emb, "rope_type", "default")
    changing = _CHANGING_ROTATIONS & set(kinds.values() if isinstance(kinds, dict) else [kinds])
    if changing:
        raise CannotFuse(f"its rotations ({', '.join(changing)}) depend on the length of a text")
    noting = [_NotingLayer(block).eval() for block in blocks]
    layers = layers_of(module)
    try:
        for index, layer in enumerate(noting):
            layers[index] = layer
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            positions = torch.arange(start, min(start + _POSITIONS_AT_ONCE, num_positions))[None]
            base(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
        rotations = [_rotation(layer.rotations) for layer in noting]
        ids = torch.arange(_OBSERVED_TOKENS)[None] % len(base.embed_tokens.weight)
        output = module(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
        rows = base.embed_tokens(ids)
        if not torch.equal(noting[0].read, rows):
            raise CannotFuse("the input of its first layer is not the output of its embedding")
        if not torch.equal(output.logits, module.get_output_embeddings()(base.norm(rows))):
            raise CannotFuse("its logits are not computed by its last norm and its LM head alone")
    finally:
        for index, block in enumerate(blocks):
            layers[index] = block
    return rotations


def _rotation(parts: Sequence[_Rotation]) -> _Rotation:
    """Joins a layer's cosines and sines [1, positions, width] to tables [positions, width / 2]."""
    tables = []
    for table in (torch.cat([part[which][0] for part in parts]) for which in (0, 1)):
        half = table.shape[1] // 2
        if not torch.equal(table[:, :half], table[:, half:]):
            raise CannotFuse("the halves of a head are rotated by different angles")
        tables.append(table[:, :half].contiguous())
    return tables[0], tables[1]


def _number(tables: list[_Rotation], rotation: _Rotation) -> int:
    """Returns the index of a rotation in `tables`. Appends the rotation if it is missing."""
    for number, known in enumerate(tables):
        if all(torch.equal(*pair) for pair in zip(known, rotation, strict=True)):
            return number
    tables.append(rotation)
    return len(tables) - 1


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
