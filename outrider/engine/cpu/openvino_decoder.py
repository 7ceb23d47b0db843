"""A decoder of the Llama family on OpenVINO's runtime.

`OpenVinoDecoder` builds a graph from the parts of a model, with OpenVINO's operator for attention
on pages, and compiles it. The pages belong to the engine. The graph is built here, because
OpenVINO's own conversion reads only whole models of `transformers`, and offers no access to the
inputs of layers or to chosen rows.

A sequence with one new token takes other kernels for attention than a sequence with several. And
with narrow weights, a product of many rows takes other kernels than one of few rows. So that logits
depend on neither the other tokens nor the other sequences of a step, a lone token can be followed
by a spare one, and all weights can be stored in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.cpu.openvino_weights import WeightConstants
from outrider.engine.gathered_attention import Steps
from outrider.interfaces.engine import SequenceStep
from outrider.kernels.openvino import OpenVino
from outrider.kv_cache.storage import BlockedKeysAndValues
from outrider.models.decoder_parts import CannotFuse, DecoderParts, LayerParts
from outrider.models.module_replacement import NativeRMSNorm

_SMALL_WEIGHTS = 2**22
"""A model with at most so many weights runs on one thread. Its steps take less than a millisecond,
and those of several threads would wait for cores that other processes use."""
_ROWS_OF_A_PASS = 64
"""With narrow weights, a step of many rows runs in passes of about so many, because products of
more rows widen the weights several times. With the demo target on two cores with AVX2, prompts of
112 to 430 tokens then take 0.95 of the time."""
_Ints = npt.NDArray[np.int64]
_TRIED_IDS = 16
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
        linears = [linear for layer in parts.layers for linear in layer.linears]
        num_weights = sum(linear.weight.numel() for linear in [*linears, parts.head])
        num_threads = 1 if num_weights <= _SMALL_WEIGHTS else torch.get_num_threads()
        # A head that drafts may use the embedding and the LM head.
        self._sources = linears if taps else [parts.embed, *linears, parts.head]
        self._constants = WeightConstants(kernels, narrows=not pads_lone_tokens)
        try:
            graph = _Graph(parts, kernels, self.taps, self._constants)
            self.graph = kernels.compile(graph.model(), num_threads)
            self.cuts_steps = self._constants.are_narrow
        except (RuntimeError, ValueError) as error:
            self.restore_sources()
            raise CannotFuse(f"OpenVINO cannot compile it: {_first_line(error)}") from error
        except CannotFuse:
            self.restore_sources()
            raise

    def new_steps(self, caches: Sequence[BlockedKeysAndValues]) -> OpenVinoSteps:
        """See `CpuDecoder.new_steps`."""
        return OpenVinoSteps(self, caches)

    def drop_sources(self) -> None:
        """See `CpuDecoder.drop_sources`."""
        for source in self._sources:
            source.weight = nn.Parameter(source.weight.to("meta"), requires_grad=False)
        del self._constants

    def restore_sources(self) -> None:
        """See `CpuDecoder.restore_sources`."""
        self._constants.restore()


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
        self._caches = caches  # The request shares their memory, and that of `_given`.
        self._given: dict[str, _Ints] = {}
        for index, cache in enumerate(caches):
            for name, pages in (("keys", cache.keys), ("values", cache.values)):
                self._request.set_tensor(f"{name}.{index}", decoder.kernels.tensor(pages.numpy()))

    def run(self, step: HeldStep) -> Tensor:
        passes = _passes(step) if self._decoder.cuts_steps else [step.sequences]
        if len(passes) == 1:
            return self._run(step.sequences)
        logits, tapped = [], []
        for sequences in passes:
            logits.append(self._run(sequences).clone())
            tapped.append(self.tapped)
        self.tapped = {
            layer: torch.cat([each[layer] for each in tapped]) for layer in self._decoder.taps
        }
        return torch.cat(logits)

    def _run(self, sequences: Sequence[HeldSequence]) -> Tensor:
        rows = _rows(sequences, self._spare_page)
        for name, values in rows.inputs.items():
            self._give(name, np.array(values, np.int32))
        with _ONE_STEP:
            self._request.infer(share_outputs=True)  # Otherwise it would copy all outputs.
        taps = self._decoder.taps
        self.tapped = {layer: self._output(f"tap.{layer}")[rows.own] for layer in taps}
        return self._output("logits")

    def _give(self, name: str, values: _Ints) -> None:
        """Sets an input. Setting a tensor takes ten times as long as a copy to the last one."""
        given = self._given.get(name)
        if given is not None and given.shape == values.shape:
            given[...] = values
        else:
            self._given[name] = values
            self._request.set_tensor(name, self._decoder.kernels.tensor(values))

    def _output(self, name: str) -> Tensor:
        """Returns an output [n, 1, any] as [n, any]. The next step overwrites it."""
        return torch.from_numpy(self._request.get_tensor(name).data[:, 0])


def _passes(step: HeldStep) -> list[list[HeldSequence]]:
    """Cuts the rows of a step into passes of equal size."""
    num_rows = sum(len(held.step.token_ids) for held in step.sequences)
    num_passes = max(1, round(num_rows / _ROWS_OF_A_PASS))
    bounds = [num_rows * index // num_passes for index in range(num_passes + 1)]
    return [_between(step, low, high) for low, high in pairwise(bounds)]


def _between(step: HeldStep, low: int, high: int) -> list[HeldSequence]:
    """The parts of a step's sequences that are its rows from `low` to before `high`."""
    parts, first = [], 0  # the sequence's first row
    for (name, token_ids, num_logits), length, pages in step.sequences:
        num = len(token_ids)
        start, stop = max(0, low - first), min(num, high - first)
        first += num
        if start < stop:
            num_wanted = max(0, stop - max(start, num - num_logits))
            part = SequenceStep(name, token_ids[start:stop], num_wanted)
            num_pages = -(-(length + stop) // step.page_size)
            parts.append(HeldSequence(part, length + start, pages[:num_pages]))
    return parts


class _Rows(NamedTuple):
    """The rows of a pass, including spare ones."""

    inputs: dict[str, list[int] | int]  # inputs of the graph, by name
    own: list[int]  # the rows that are not spare


def _rows(sequences: Sequence[HeldSequence], spare_page: int | None) -> _Rows:
    """If there is a spare page, a spare token follows each token that is alone in its sequence. It
    takes the next slot, or the spare page's first one."""
    token_ids: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    own: list[int] = []
    wanted: list[int] = []
    begins, page_begins = [0], [0]
    longest = 0
    for held, length, own_pages in sequences:
        new_ids, first = held.token_ids, len(token_ids)
        num = len(new_ids)
        token_ids += new_ids
        positions += range(length, length + num)
        pages += own_pages
        own += range(first, first + num)
        wanted += range(first + num - held.num_logits, first + num)
        if spare_page is not None and num == 1:
            token_ids += new_ids
            positions.append(length)
            pages.append(spare_page)
        begins.append(len(token_ids))
        page_begins.append(len(pages))
        longest = max(longest, length + begins[-1] - first)
    return _Rows(
        {
            "token_ids": token_ids,
            "positions": positions,
            "past_lens": [each.length for each in sequences],
            "subsequence_begins": begins,
            "block_indices": pages,
            "block_indices_begins": page_begins,
            "max_context_len": longest,
            "wanted": wanted,
        },
        own,
    )


_TABLES = (
    "token_ids",
    "positions",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "wanted",
)


class _Graph:
    """Builds the graph of a decoder. Rows are [T, 1, D], because OpenVINO recognises rotations and
    norms only in tensors with these dimensions.

    Inputs in float32: for each layer `keys.i` and `values.i` [pages, heads, page size, width].
    Inputs in int32: `_TABLES` and `max_context_len`. Outputs: `logits` [R, 1, V] of the R rows that
    `wanted` lists, and for each tap `tap.i` [T, 1, D]."""

    def __init__(
        self,
        parts: DecoderParts,
        kernels: OpenVino,
        taps: Sequence[int],
        constants: WeightConstants,
    ) -> None:
        self._parts, self._kernels, self._taps, self._constants = parts, kernels, taps, constants
        self._op, self._types = kernels.operators, kernels.module.Type
        self._inputs: dict[str, Any] = {}
        self._rotations: list[list[Any]] = []  # cosines and sines [T, 1, 1, width] of the rows
        self._outputs: list[Any] = []

    def model(self) -> Any:
        op, parts = self._op, self._parts
        for name in _TABLES:
            self._input(name, [-1], self._types.i32)
        self._input("max_context_len", [], self._types.i32)
        rows = self._embedded(parts.embed)
        for tables in parts.rotations:
            self._rotations.append([self._rotation(table) for table in tables])
        for index, layer in enumerate(parts.layers):
            self._tap(index, rows)
            rows = self._layer(index, layer, rows)
            for linear in layer.linears:
                self._constants.free(linear.weight)
        self._tap(len(parts.layers), rows)
        wanted = op.gather(rows, self._inputs["wanted"], self._ints(0))
        self._show("logits", self._linear(parts.head, self._norm(parts.norm, wanted)))
        for weight in () if self._taps else {parts.embed.weight, parts.head.weight}:
            self._constants.free(weight)
        return self._kernels.module.Model(self._outputs, [*self._inputs.values()], "decoder")

    def _embedded(self, embed: Any) -> Any:
        """The input [T, 1, D] of the first layer."""
        factor = _factor_of(embed)
        table, exponent = self._constants.table(embed.weight)
        rows = self._op.gather(table, self._inputs["token_ids"], self._ints(0))
        rows = self._times(rows, factor * 2.0**-exponent)
        return self._op.unsqueeze(rows, self._ints(1))

    def _rotation(self, table: Tensor) -> Any:
        whole = self._op.constant(torch.cat((table, table), -1).numpy(), self._types.f32)
        rows = self._op.gather(whole, self._inputs["positions"], self._ints(0))
        return self._op.unsqueeze(rows, self._ints([1, 2]))

    def _times(self, rows: Any, factor: float) -> Any:
        if factor == 1:
            return rows
        return self._op.multiply(rows, self._op.constant(factor, self._types.f32))

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
        cos, sin = self._rotations[layer.rotation]
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
        weight, exponent = self._constants.matrix(linear.weight)
        product = self._times(op.matmul(rows, weight, False, True), 2.0**-exponent)
        if linear.bias is None:
            return product
        return op.add(product, op.constant(linear.bias.detach().numpy(), f32))

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


@torch.inference_mode()
def _factor_of(embed: Any) -> float:
    """The number with which an embedding multiplies its table. Raises `CannotFuse`."""
    ids = torch.arange(min(_TRIED_IDS, len(embed.weight)))
    rows, found = embed.weight[ids], embed(ids)
    # Each quotient may be off by a rounding.
    for factor in (found / rows)[rows != 0].unique().tolist():
        if torch.equal(rows * factor, found):
            return float(factor)
    raise CannotFuse("its embedding is not a table times a number")


_ACTIVATIONS: tuple[tuple[Callable[[Tensor], Tensor], Callable[[Any, Any], Any]], ...] = (
    (functional.silu, lambda op, rows: op.swish(rows)),
    (partial(functional.gelu, approximate="tanh"), lambda op, rows: op.gelu(rows, "tanh")),
    (functional.gelu, lambda op, rows: op.gelu(rows, "erf")),
    (functional.relu, lambda op, rows: op.relu(rows)),
)
"""Activations of MLPs, and the operators that compute them."""
