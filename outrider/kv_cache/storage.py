"""The tensors of a paged cache: the keys and values of all slots for every attention layer.

    keys     [heads, slots, key width]
    values   [heads, slots, value width]

Slot p * page_size + i is place i of page p. Heads are the first dimension, so that the keys of
gathered slots are a batch of matrices. In bfloat16 on a CPU, matrix products then take a third of
the time that they take with [slots, heads, width]. Fused CPU kernels read another layout,
`BlockedKeysAndValues`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import SettingError
from outrider.kernels.threads import on_threads
from outrider.kv_cache.block_pool import Copy
from outrider.limits import KV_CACHE_BYTES_DEFAULT


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of the key and value that one attention layer keeps for a token."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        return self.num_heads * (self.key_width + self.value_width) * self.dtype.itemsize


def page_bytes_of(shapes: Sequence[LayerShape], page_size: int) -> int:
    """The number of bytes of one page, over all layers."""
    return page_size * sum(shape.slot_bytes for shape in shapes)


def pages_in(num_bytes: int, page_bytes: int) -> int:
    """The number of pages that fit into `num_bytes`. Raises `SettingError` if no page fits."""
    if num_bytes < page_bytes:
        raise SettingError(
            "kv_cache_memory_bytes",
            f"{num_bytes} bytes hold no page of keys and values; one page takes {page_bytes}",
        )
    return num_bytes // page_bytes


def memory_budget(
    device: torch.device, gpu_memory_utilization: float, num_gpus: float | None
) -> int:
    """The number of bytes for keys and values. Call this after the model is loaded. On a CPU,
    the number is fixed. On a GPU, the process may use `gpu_memory_utilization` times `num_gpus`
    (None = 1) of the GPU's memory. The result is the part of this memory that the process does not
    use yet, at most the GPU's free memory."""
    if device.type != "cuda":
        return KV_CACHE_BYTES_DEFAULT
    torch.cuda.empty_cache()  # Otherwise `memory_reserved` counts memory that is not used any more.
    free, total = torch.cuda.mem_get_info(device)
    share = min(1.0, num_gpus or 1.0)
    taken = torch.cuda.memory_reserved(device)
    return max(0, min(free, int(total * share * gpu_memory_utilization) - taken))


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """The cache of one layer."""

    keys: Tensor  # [heads, slots, key width]
    values: Tensor  # [heads, slots, value width]

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, n, width] of slots [n]."""
        return self.keys.index_select(1, slots), self.values.index_select(1, slots)

    def gather_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Like `gather`, but `rows` [heads * n] are indices into [heads * slots, width]. PyTorch
        runs this on several threads, but `gather` on only one."""
        shape = (self.keys.shape[0], len(rows) // self.keys.shape[0], -1)
        keys, values = (
            tensor.view(-1, tensor.shape[2]).index_select(0, rows).view(shape)
            for tensor in (self.keys, self.values)
        )
        return keys, values

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values [heads, n, width] to slots [n]."""
        self.keys.index_copy_(1, slots, keys)
        self.values.index_copy_(1, slots, values)


class BlockedKeysAndValues(NamedTuple):
    """The cache of one layer in the layout of vLLM's CPU attention. Keys and values must have the
    same width."""

    keys: Tensor
    """[pages, heads, page size, width]. In memory, the keys of one page and head are a matrix
    [width, page size], with the key of one slot in each column."""
    values: Tensor  # [pages, heads, page size, width]


class KVCache:
    """The caches of all attention layers."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_pages: int, page_size: int, is_blocked: bool = False
    ) -> None:
        """If `is_blocked`, the `layers` are `BlockedKeysAndValues`, otherwise `KeysAndValues`."""
        self._num_pages, self._page_size, self._is_blocked = num_pages, page_size, is_blocked
        self._stacks: list[Tensor] = []
        """Each stack [any, pages, any] has the keys, or the values, of all layers of one shape, so
        that one call copies a page in all of these layers."""
        layers: dict[LayerShape, Iterator[Any]] = {}
        for shape, num_layers in Counter(shapes).items():
            keys = self._new_stack(shape, shape.key_width, num_layers)
            values = self._new_stack(shape, shape.value_width, num_layers)
            layers[shape] = map(BlockedKeysAndValues if is_blocked else KeysAndValues, keys, values)
        self.layers = [next(layers[shape]) for shape in shapes]

    def _new_stack(self, shape: LayerShape, width: int, num_layers: int) -> tuple[Tensor, ...]:
        num_heads, num_pages, size = shape.num_heads, self._num_pages, self._page_size
        sizes = [num_layers * num_heads, num_pages, size * width]
        layer_sizes = [num_heads, num_pages * size, width]
        if self._is_blocked:
            sizes = [num_layers, num_pages, num_heads * size * width]
            layer_sizes = [num_pages, num_heads, size, width]
        self._stacks.append(torch.zeros(sizes, dtype=shape.dtype, device=shape.device))
        return self._stacks[-1].view(num_layers, *layer_sizes).unbind()

    @property
    def num_bytes(self) -> int:
        return sum(stack.nbytes for stack in self._stacks)

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copies pages (from, to) in every layer. Reads a layer's sources before it writes."""
        if not copies or not self._stacks:
            return
        sources, targets = torch.tensor(copies, device=self._stacks[0].device).unbind(1)
        with on_threads(1):  # A short copy on several threads might wait for a busy core.
            for stack in self._stacks:
                # `index_select` makes a copy, so sources and targets may overlap.
                stack.index_copy_(1, targets, stack.index_select(1, sources))
