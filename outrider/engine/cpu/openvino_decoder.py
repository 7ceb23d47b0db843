"""A decoder of the Llama family on OpenVINO's runtime.

`OpenVinoDecoder` builds a graph from the parts of a model, with OpenVINO's operator for attention
on pages, and compiles it. The pages belong to the engine. The graph is built here, because
OpenVINO's own conversion reads only whole models of `transformers`, and offers no access to the
inputs of layers or to chosen rows.

A weight whose values times a power of two fit into float16, as most weights in bfloat16 do, or that
was rounded to few bits, is stored so. The runtime widens it while it multiplies, so results are
those of float32, but a step reads less memory.

A sequence with one new token takes other kernels for attention than a sequence with several. And
with narrow weights, a product of many rows takes other kernels than one of few rows. So that logits
depend on neither the other tokens nor the other sequences of a step, a lone token can be followed
by a spare one, and all weights can be stored in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.engine.batch import HeldStep
from outrider.engine.gathered_attention import Steps
from outrider.kernels.openvino import OpenVino
from outrider.kv_cache.storage import BlockedKeysAndValues
from outrider.models.decoder_parts import CannotFuse, DecoderParts, LayerParts
from outrider.models.few_bits import IntegerWeight, integers_of
from outrider.models.module_replacement import NativeRMSNorm

_SMALL_WEIGHTS = 2**22
"""A model with at most so many weights runs on one thread. Its steps take less than a millisecond,
and those of several threads would wait for cores that other processes use."""
_Ints = npt.NDArray[np.int64]
_ONE_STEP = Lock()
"""A step holds this lock. Two graphs of a process would share the runtime's threads."""


class OpenVinoDecoder:
    """Runs a model's layers and LM head on OpenVINO."""

    rows_are_equal = False  # unless tried with lone tokens padded
    numerics = None
    note = "logits of the last bits may depend on a step's other tokens"

    def __init__(
        self,
        parts: DecoderParts,
        kernels: OpenVino,
        *,
        taps: Sequence[int] = (),
        pads_lone_tokens: bool = False,
    ) -> None:
        """`taps`: layers whose inputs a step keeps; the number of layers means the input of the
        last norm. `pads_lone_tokens`: see above; weights are then in float32. Raises
        `CannotFuse`."""
        self.kernels, self.kernels_name, self.page_size = kernels, kernels.name, kernels.page_size
        self.num_spare_pages = int(pads_lone_tokens)
        self.taps, self.pads_lone_tokens = sorted(taps), pads_lone_tokens
        self.embed = parts.embed
        self.rotations = [
            [torch.cat((table, table), -1) for table in rotation] for rotation in parts.rotations
        ]
        linears = [linear for layer in parts.layers for linear in layer.linears] + [parts.head]
        num_weights = sum(linear.weight.numel() for linear in linears)
        num_threads = 1 if num_weights <= _SMALL_WEIGHTS else torch.get_num_threads()
        try:
            graph = _Graph(parts, kernels, self.taps, narrows=not pads_lone_tokens)
            self.graph = kernels.compile(graph.model(), num_threads)
        except (RuntimeError, ValueError) as error:
            raise CannotFuse(f"OpenVINO cannot compile it: {_first_line(error)}") from error
        is_tied = parts.head.weight is getattr(parts.embed, "weight", None)
        # An embedding, or a head that drafts, may use the LM head's weight.
        self._sources = linears[:-1] if is_tied or taps else linears

    def new_steps(self, caches: Sequence[BlockedKeysAndValues]) -> OpenVinoSteps:
        """See `CpuDecoder.new_steps`."""
        return OpenVinoSteps(self, caches)

    def drop_sources(self) -> None:
        """See `CpuDecoder.drop_sources`."""
        for linear in self._sources:
            linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Exception")]
    return lines[0] if lines else str(error)


class OpenVinoSteps(Steps):
    """Runs steps on a decoder's graph."""

    def __init__(self, decoder: OpenVinoDecoder, caches: Sequence[BlockedKeysAndValues]) -> None:
        """The last page of `caches` must belong to no sequence, because spare tokens use it."""
        self._decoder = decoder
        self._spare_page = len(caches[0].keys) - 1 if decoder.pads_lone_tokens else None
        self.tapped: dict[int, Tensor] = {}  # the input [T, D] of each layer in the decoder's taps
        self._request = decoder.graph.create_infer_request()
        self._given: dict[str, Tensor] = {}
        """The request's inputs, whose memory it shares."""
        for index, cache in enumerate(caches):
            self._give(f"keys.{index}", cache.keys)
            self._give(f"values.{index}", cache.values)

    def run(self, step: HeldStep) -> Tensor:
        decoder, rows = self._decoder, _rows(step, self._spare_page)
        positions = torch.from_numpy(rows.positions)
        self._give("rows", decoder.embed(torch.from_numpy(rows.token_ids))[:, None])
        for index, tables in enumerate(decoder.rotations):
            for name, table in zip(("cos", "sin"), tables, strict=True):
                self._give(f"{name}.{index}", table.index_select(0, positions)[:, None, None])
        for name, values in rows.tables.items():
            self._give(name, torch.from_numpy(values))
        with _ONE_STEP:
            self._request.infer(share_outputs=True)  # Otherwise it would copy all outputs.
        own = slice(None) if rows.own is None else rows.own
        self.tapped = {layer: self._output(f"tap.{layer}")[own] for layer in decoder.taps}
        return self._output("logits")

    def _give(self, name: str, values: Tensor) -> None:
        self._given[name] = values = values.contiguous()
        self._request.set_tensor(name, self._decoder.kernels.tensor(values))

    def _output(self, name: str) -> Tensor:
        """Returns an output [n, 1, any] as [n, any]. The next step overwrites it."""
        return torch.from_numpy(self._request.get_tensor(name).data)[:, 0]


class _Rows(NamedTuple):
    """The T rows of a step, including spare ones."""

    token_ids: _Ints
    positions: _Ints
    own: _Ints | None  # the rows that are not spare; None = all
    tables: dict[str, npt.NDArray[Any]]  # further inputs of the graph, by name


def _rows(step: HeldStep, spare_page: int | None) -> _Rows:
    """If there is a spare page, a spare token follows each token that is alone in its sequence. It
    takes the next slot, or the spare page's first one."""
    ids, positions, _, wanted = step.rows
    pages = [held.pages for held in step.sequences]
    counts, lengths = np.array(
        [(len(held.step.token_ids), held.length) for held in step.sequences]
    ).T
    own, is_lone = None, counts == 1
    if spare_page is not None and is_lone.any():
        copies = (1 + is_lone).repeat(counts)
        own = copies.cumsum() - copies
        ids, positions, wanted = ids.repeat(copies), positions.repeat(copies), own[wanted]
        counts = counts + is_lone
        pages = [[*held, spare_page] for held in pages]
    tables = {
        "past_lens": lengths,
        "subsequence_begins": np.append(0, counts.cumsum()),
        "block_indices": np.array([*chain.from_iterable(pages)]),
        "block_indices_begins": np.append(0, np.cumsum([*map(len, pages)])),
        "max_context_len": (lengths + counts).max(),
        "wanted": wanted,
    }
    return _Rows(ids, positions, own, {name: np.asarray(v, np.int32) for name, v in tables.items()})


def _exponent_of(weight: Tensor) -> int:
    """The largest n with which weight * 2^n has no overflow in float16."""
    return (
        int(torch.finfo(torch.float16).max // weight.abs().max().clamp(min=1e-30)).bit_length() - 1
    )


_STAYS_NARROW = "decompression_0"
"""A mark of OpenVINO's converter. Without it, compilation would widen the constant for good."""
_TABLES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "wanted")


class _Graph:
    """Builds the graph of a decoder. Rows are [T, 1, D], because OpenVINO recognises rotations and
    norms only in tensors with these dimensions.

    Inputs in float32: `rows` [T, 1, D]; for each rotation `cos.i` and `sin.i` [T, 1, 1, width]; for
    each layer `keys.i` and `values.i` [pages, heads, page size, width]. Inputs in int32: `_TABLES`
    and `max_context_len`. Outputs: `logits` [R, 1, V] of the R rows that `wanted` lists, and for
    each tap `tap.i` [T, 1, D]."""

    def __init__(
        self, parts: DecoderParts, kernels: OpenVino, taps: Sequence[int], narrows: bool
    ) -> None:
        """`narrows`: whether weights may be stored in fewer bits than float32."""
        self._parts, self._kernels, self._taps, self._narrows = parts, kernels, taps, narrows
        self._op, self._types = kernels.operators, kernels.module.Type
        self._inputs: dict[str, Any] = {}
        self._outputs: list[Any] = []

    def model(self) -> Any:
        op, parts = self._op, self._parts
        rows = self._input("rows", [-1, 1, parts.norm.factor.numel()])
        for name in _TABLES:
            self._input(name, [-1], self._types.i32)
        self._input("max_context_len", [], self._types.i32)
        for index, (cos, _) in enumerate(parts.rotations):
            for name in ("cos", "sin"):
                self._input(f"{name}.{index}", [-1, 1, 1, 2 * cos.shape[1]])
        for index, layer in enumerate(parts.layers):
            self._tap(index, rows)
            rows = self._layer(index, layer, rows)
        self._tap(len(parts.layers), rows)
        wanted = op.gather(rows, self._inputs["wanted"], self._ints(0))
        self._show("logits", self._linear(parts.head, self._norm(parts.norm, wanted)))
        return self._kernels.module.Model(self._outputs, [*self._inputs.values()], "decoder")

    def _layer(self, index: int, layer: LayerParts, rows: Any) -> Any:
        op, block = self._op, layer.block
        normed = self._norm(block.input_layernorm, rows)
        attended = self._linear(block.self_attn.o_proj, self._attention(index, layer, normed))
        rows = op.add(rows, self._norm(block.attention_norm, attended))
        mlp = block.mlp
        gate_up = self._linear(mlp.gate_up_proj, self._norm(block.mlp_input_norm, rows))
        gate, up = self._split(gate_up, [mlp.down_proj.in_features] * 2)
        down = self._linear(mlp.down_proj, op.multiply(self._activated(mlp.act_fn, gate), up))
        return op.add(rows, self._norm(block.mlp_output_norm, down))

    def _attention(self, index: int, layer: LayerParts, normed: Any) -> Any:
        """Writes keys and values to pages. Returns the attention's output [T, 1, heads * width]."""
        attention, own = layer.attention, layer.block.self_attn
        if attention.softcap is not None:
            raise CannotFuse("OpenVINO's attention has no softcap")
        heads, shape = attention.query_heads, attention.shape
        key_heads, width = shape.num_heads, shape.key_width
        projected = self._linear(own.qkv_proj, normed)
        query, key, value = self._split(
            projected, [heads * width, key_heads * width, key_heads * width]
        )
        pages = [-1, key_heads, self._kernels.page_size, width]
        output = self._paged_attention(
            layer,
            self._rotated(query, heads, own.q_norm, layer),
            self._rotated(key, key_heads, own.k_norm, layer),
            self._reshaped(value, [0, -1]),
            self._input(f"keys.{index}", pages),
            self._input(f"values.{index}", pages),
        )
        return self._reshaped(output, [0, 1, heads * width])

    def _paged_attention(self, layer: LayerParts, *states: Any) -> Any:
        """`states`: queries, keys and values [T, any], and the pages of keys and values."""
        types, attention, given = self._types, layer.attention, self._inputs
        integers, numbers = self._none(types.i32), self._none(types.f32)
        node = self._kernels.paged_attention(
            *states,
            given["past_lens"],
            given["subsequence_begins"],
            given["block_indices"],
            given["block_indices_begins"],
            self._op.constant(attention.scaling, types.f32),
            self._ints(attention.window or 0, types.i32),  # 0 = no window
            numbers,  # slopes of ALiBi
            given["max_context_len"],
            integers,  # for how many rows to return scores
            *(integers, integers, numbers),  # rotations of keys in pages
            *(numbers, self._ints(0, types.i32), self._ints(0, types.i32)),  # sparse attention
            self._none(types.f32, (0, 0, 0, 0)),  # sinks
            *(self._ints(0, types.i32), integers, integers, integers),  # choice of evicted pages
            integers,  # kinds of tokens
            *(self._none(types.u8), integers),  # mask of a tree
        )
        sizes = {"num": attention.shape.num_heads, "size": attention.shape.key_width}
        facts = node.get_rt_info()
        for which in "kv":
            facts[f"num_{which}_heads"] = sizes["num"]
            facts[f"{which}_head_size"] = sizes["size"]
        return node.output(0)

    def _rotated(self, rows: Any, heads: int, norm: NativeRMSNorm | None, layer: LayerParts) -> Any:
        """Norms and rotates each head: [T, 1, heads * width] -> [T, heads * width]. (a, b) ->
        (a, b) * cos + (-b, a) * sin, where a and b are the halves of a head."""
        op, width = self._op, layer.attention.shape.key_width
        swapped_axes = self._ints([0, 2, 1, 3])
        by_head = op.transpose(self._reshaped(rows, [0, 0, heads, width]), swapped_axes)
        normed = self._norm(norm, by_head)
        first, second = self._split(normed, [width // 2] * 2, axis=3)
        minus = op.multiply(second, op.constant(-1.0, self._types.f32))
        cos, sin = (self._inputs[f"{name}.{layer.rotation}"] for name in ("cos", "sin"))
        rotated = op.add(op.multiply(normed, cos), op.multiply(op.concat([minus, first], -1), sin))
        return self._reshaped(op.transpose(rotated, swapped_axes), [0, -1])

    def _norm(self, norm: NativeRMSNorm | None, rows: Any) -> Any:
        if norm is None:
            return rows
        op, f32 = self._op, self._types.f32
        squares = op.power(rows, op.constant(2.0, f32))
        mean = op.reduce_mean(squares, self._ints([-1]), keep_dims=True)
        root = op.sqrt(op.add(mean, op.constant(norm.eps, f32)))
        scaled = op.multiply(rows, op.divide(op.constant(1.0, f32), root))
        return op.multiply(scaled, op.constant(norm.factor.float().numpy(), f32))

    def _linear(self, linear: Any, rows: Any) -> Any:
        op, f32 = self._op, self._types.f32
        weight, exponent = self._weight(linear.weight.detach())
        product = op.matmul(rows, weight, False, True)
        if exponent:
            product = op.multiply(product, op.constant(2.0**-exponent, f32))
        if linear.bias is None:
            return product
        return op.add(product, op.constant(linear.bias.detach().numpy(), f32))

    def _weight(self, weight: Tensor) -> tuple[Any, int]:
        """Returns a node with the value weight * 2^n, and n."""
        constant, tensor = self._kernels.module.op.Constant, self._kernels.tensor
        for exponent in (0, _exponent_of(weight)) if self._narrows else ():
            scaled = torch.ldexp(weight, torch.tensor(exponent))
            narrow = scaled.to(torch.float16)
            if torch.equal(narrow.to(weight.dtype), scaled):
                widened = self._op.convert(constant(tensor(narrow), False), self._types.f32)
                widened.get_rt_info()[_STAYS_NARROW] = ""
                return widened, exponent
        whole = integers_of(weight) if self._narrows else None
        if whole is not None:
            return self._integers(whole), 0
        return constant(tensor(weight.contiguous()), False), 0

    def _integers(self, weight: IntegerWeight) -> Any:
        op, types = self._op, self._types
        values = weight.integers.numpy()
        if weight.bits == 4:
            low, high = values[..., ::2] & 15, values[..., 1::2] & 15
            packed = self._kernels.module.Tensor(
                np.ascontiguousarray(low | high << 4), values.shape, types.i4
            )
            constant = self._kernels.module.op.Constant(packed, False)
        else:
            constant = op.constant(values, types.i8)
        wide = op.multiply(
            op.convert(constant, types.f32), op.constant(weight.scales.numpy(), types.f32)
        )
        return self._reshaped(wide, [0, -1])

    def _activated(self, function: Callable[[Tensor], Tensor], rows: Any) -> Any:
        tried = torch.linspace(-8, 8, 1025)
        expected = function(tried)
        for known, operator in _ACTIVATIONS:
            if torch.allclose(known(tried), expected, rtol=1e-6, atol=1e-6):
                return operator(self._op, rows)
        raise CannotFuse(f"its MLP has an unsupported activation ({function})")

    def _input(self, name: str, shape: Sequence[int], kind: Any = None) -> Any:
        shape = self._kernels.module.PartialShape([*shape])
        parameter = self._op.parameter(shape, kind or self._types.f32)
        parameter.output(0).get_tensor().set_names({name})
        self._inputs[name] = parameter
        return parameter

    def _tap(self, index: int, rows: Any) -> None:
        if index in self._taps:
            # Without an operator, an output could be an input.
            self._show(f"tap.{index}", self._reshaped(rows, [0, 0, -1]))

    def _show(self, name: str, rows: Any) -> None:
        rows.output(0).get_tensor().set_names({name})
        self._outputs.append(self._op.result(rows))

    def _split(self, rows: Any, sizes: Sequence[int], axis: int = -1) -> Any:
        return self._op.variadic_split(rows, self._ints(axis), self._ints([*sizes])).outputs()

    def _reshaped(self, rows: Any, shape: Sequence[int]) -> Any:
        """0 in `shape`: unchanged; -1: the rest."""
        return self._op.reshape(rows, self._ints([*shape]), True)

    def _ints(self, values: int | list[int], kind: Any = None) -> Any:
        return self._op.constant(values, kind or self._types.i64)

    def _none(self, kind: Any, shape: Sequence[int] = (0,)) -> Any:
        return self._op.constant(np.zeros(shape), kind)


_ACTIVATIONS: tuple[tuple[Callable[[Tensor], Tensor], Callable[[Any, Any], Any]], ...] = (
    (functional.silu, lambda op, rows: op.swish(rows)),
    (partial(functional.gelu, approximate="tanh"), lambda op, rows: op.gelu(rows, "tanh")),
    (functional.gelu, lambda op, rows: op.gelu(rows, "erf")),
    (functional.relu, lambda op, rows: op.relu(rows)),
)
"""Activations of MLPs, and the operators that compute them."""
