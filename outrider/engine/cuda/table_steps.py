"""Runs steps on a CUDA device. A Triton kernel (`triton_kernels.py`) computes attention directly on
the pages. Tables of 64-bit words describe a step to the kernel. They go to the device in one copy.

A *row* is a new token of the step. A sequence's rows are cut into *blocks* of consecutive rows, and
its context is cut into *splits*. Each program of the kernel computes one block for one key head and
one split."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outrider.engine.batch import HeldSequence, HeldStep, shipped
from outrider.engine.gathered_attention import Forward, Steps
from outrider.interfaces.engine import SequenceStep
from outrider.kv_cache.attention import LayerPages, running
from outrider.limits import PAGE_SIZE

KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
BLOCK_WORDS = 4
BLOCK_ROWS_MAX = 64
"""The most rows of a program's score matrix, unless its block has only one token. The matrix has a
row for each pair of a token of the block and a query head that shares the key head."""
_BLOCK_ROWS_MIN = 16  # a matrix product on tensor cores has at least this many rows
_WIDTH_MIN = 16
_BLOCK_SLOTS = 64
_WIDE = 128  # if heads are wider than this, only half of `_BLOCK_SLOTS` fit into shared memory
_SPLITS = (16, 4, 1)  # the possible numbers of splits; the kernel is compiled for each of them
_SPLIT_SLOTS_MIN = 256
"""The splits of a step's longest context have at least this many slots. Merging shorter splits
takes more time than the splits save."""
_WARPS = 4
_STAGES = 2  # pipeline stages; with three, wide heads in float32 do not fit into shared memory
_PROGRAMS_EACH = 2
"""Programs for each multiprocessor. While one program waits for memory, another program runs."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelForm:
    """The kernel's parameters for a step. The kernel is compiled for each combination of them."""

    block_tokens: int  # the maximum number of tokens of a block; a power of two
    num_splits: int


@dataclass(frozen=True, slots=True)
class TableStep:
    """The tables of a step of R rows, on the device."""

    form: KernelForm
    token_ids: Tensor  # [1, R]
    position_ids: Tensor  # [1, R]
    slots: Tensor  # [R]
    logit_rows: Tensor  # [L]
    blocks: Tensor  # [B, BLOCK_WORDS], see `_blocks`
    pages: Tensor  # the page tables of all sequences, one after another
    page_size: int

    @classmethod
    def of(cls, step: HeldStep, form: KernelForm, device: torch.device) -> TableStep:
        sequences = step.sequences
        page_tables = [np.array(held.pages, dtype=np.int64) for held in sequences]
        rows = accumulate([len(held.step.token_ids) for held in sequences], initial=0)
        places = accumulate([len(table) for table in page_tables], initial=0)
        blocks = [
            _blocks(held, row, place, form.block_tokens)
            for held, row, place in zip(sequences, rows, places, strict=False)
        ]
        ids, positions, slots, logit_rows, words, pages = shipped(
            [*step.rows, np.concatenate(blocks), np.concatenate(page_tables)], device
        )
        return cls(
            form,
            ids[None],
            positions[None],
            slots,
            logit_rows,
            words.view(-1, BLOCK_WORDS),
            pages,
            step.page_size,
        )


def _blocks(held: HeldSequence, row: int, table: int, block_tokens: int) -> npt.NDArray[np.int64]:
    """Returns the words of all blocks of a sequence. The sequence's first new token is row `row` of
    the step. Its page table begins at index `table` of `TableStep.pages`. The words of a block are
    its first row, its number of rows, `table`, and the number of slots that the block may see."""
    num = len(held.step.token_ids)
    starts = np.arange(0, num, block_tokens)
    sizes = np.minimum(block_tokens, num - starts)
    words = (row + starts, sizes, np.full_like(starts, table), held.length + starts + sizes)
    return np.stack(words, axis=1).reshape(-1)


def kernel_form(
    sequences: Sequence[HeldSequence], shared_heads: int, key_heads: int, num_programs: int
) -> KernelForm:
    """Chooses the form for a step. Each key head is shared by `shared_heads` query heads. Splits
    contexts only if the kernel then has at most `num_programs` programs."""
    counts = [len(held.step.token_ids) for held in sequences]
    block_tokens = min(_padded_power(max(counts)), _block_tokens_max(shared_heads))
    num_blocks = sum(-(-num // block_tokens) for num in counts)
    longest = max(held.length + num for held, num in zip(sequences, counts, strict=True))
    wanted = min(num_programs // (num_blocks * key_heads), longest // _SPLIT_SLOTS_MIN)
    return KernelForm(block_tokens, next((num for num in _SPLITS if num <= wanted), 1))


def _block_tokens_max(shared_heads: int) -> int:
    return max(1, BLOCK_ROWS_MAX // _padded_power(shared_heads))


def _padded_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def attend_tables(query: Tensor, layer: LayerPages, step: TableStep) -> Tensor:
    """Returns the attention output [1, R, query heads, value width] of queries [1, query heads, R,
    key width]. With Hq query heads and Hkv key heads, query head h reads key head h * Hkv // Hq."""
    from outrider.engine.cuda.triton_kernels import attend_blocks, merge_splits

    cache, softcap = layer.cache, layer.softcap
    queries = query[0] if query.stride(-1) == 1 else query[0].contiguous()
    num_heads, num_rows, key_width = queries.shape
    key_heads, num_slots, _ = cache.keys.shape
    value_width = cache.values.shape[2]
    shared = num_heads // key_heads
    shared_padded = _padded_power(shared)
    num_splits = step.form.num_splits
    outputs = (num_rows, num_heads)
    output = queries.new_empty((*outputs, value_width))
    parts = maxima = sums = output
    if num_splits > 1:
        parts = queries.new_empty((num_splits, *outputs, value_width), dtype=torch.float32)
        maxima, sums = queries.new_empty((2, num_splits, *outputs), dtype=torch.float32).unbind()
    padded = {
        "VALUE_WIDTH": value_width,
        "VALUE_PADDED": max(_WIDTH_MIN, _padded_power(value_width)),
        "NUM_SPLITS": num_splits,
    }
    attend_blocks[(len(step.blocks), key_heads, num_splits)](
        output,
        parts,
        maxima,
        sums,
        queries,
        queries.stride(0),
        queries.stride(1),
        cache.keys,
        cache.values,
        num_slots,
        step.position_ids,
        step.blocks,
        step.pages,
        num_rows,
        layer.scaling,
        softcap or 1.0,
        layer.window or 0,
        PAGE_SIZE=step.page_size,
        KEY_HEADS=key_heads,
        SHARED=shared,
        SHARED_PADDED=shared_padded,
        BLOCK_ROWS=max(_BLOCK_ROWS_MIN, step.form.block_tokens * shared_padded),
        BLOCK_SLOTS=_BLOCK_SLOTS if max(key_width, value_width) <= _WIDE else _BLOCK_SLOTS // 2,
        KEY_WIDTH=key_width,
        KEY_PADDED=max(_WIDTH_MIN, _padded_power(key_width)),
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=layer.window is not None,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=_WARPS,
        num_stages=_STAGES,
        **padded,
    )
    if num_splits > 1:
        merge_splits[(num_rows * num_heads,)](
            output, parts, maxima, sums, num_rows * num_heads, num_warps=1, **padded
        )
    return output[None]


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """A device's attention kernels, and the number of programs to run at the same time."""

    attend: Callable[..., Tensor]  # `attend_tables` or a substitute
    num_programs: int


def find_backend(device: torch.device, dtype: torch.dtype) -> DeviceBackend | None:
    """Returns the kernels for a model of this dtype on the device, or None if there are none."""
    if device.type != "cuda" or dtype not in KERNEL_DTYPES:
        return None
    if importlib.util.find_spec("triton") is None:
        _log.warning("triton is not installed, so attention uses slower kernels of torch")
        return None
    properties = torch.cuda.get_device_properties(device)
    return DeviceBackend(attend_tables, _PROGRAMS_EACH * int(properties.multi_processor_count))


@dataclass(frozen=True, slots=True)
class TableSteps(Steps):
    """Runs steps with a device's attention kernels."""

    backend: DeviceBackend
    forward: Forward
    layers: dict[nn.Module, LayerPages]
    shared_heads: int  # the largest number of query heads that share a key head, over all layers
    key_heads: int  # the number of key heads of the layer with `shared_heads`
    device: torch.device

    def run(self, step: HeldStep) -> Tensor:
        num_programs = self.backend.num_programs
        form = kernel_form(step.sequences, self.shared_heads, self.key_heads, num_programs)
        tables = TableStep.of(step, form, self.device)
        with running(self.layers, tables.slots, partial(self.backend.attend, step=tables)):
            return self.forward(tables.token_ids, tables.position_ids, tables.logit_rows)

    def try_kernel(self) -> None:
        """Runs every form of the kernel on every layer, so that no form is compiled while requests
        wait. Writes to page 0, so no sequence may hold pages yet. After an error, still runs all
        other layers, because other ranks of the model wait for this rank's part of each layer. Then
        raises the first error."""
        powers = range(_block_tokens_max(self.shared_heads).bit_length())
        forms = [KernelForm(1 << power, splits) for power in powers for splits in _SPLITS]
        held = HeldStep([HeldSequence(SequenceStep("", (0,), 1), 0, (0,))], PAGE_SIZE)
        steps = [TableStep.of(held, form, self.device) for form in forms]
        failures: list[Exception] = []

        def attend_layer(query: Tensor, layer: LayerPages) -> Tensor:
            try:
                for step in steps:
                    self.backend.attend(query, layer, step)
            except Exception as error:  # noqa: BLE001 (raised below)
                failures.append(error)
            return query.new_zeros((1, 1, query.shape[1], layer.cache.values.shape[2]))

        first = steps[0]
        with torch.inference_mode(), running(self.layers, first.slots, attend_layer):
            self.forward(first.token_ids, first.position_ids, first.logit_rows)
        if failures:
            raise failures[0]
