"""The tensors of a paged cache: the keys and values of all slots for every attention layer.

    keys     [heads, slots, key width]
    values   [heads, slots, value width]

Slot p * PAGE_SIZE + i is place i of page p. Heads are the first dimension, so that the keys of
gathered slots are a batch of matrices that need no transposing. In bfloat16 on a CPU, matrix
products with this layout take a third of the time that they take with [slots, heads, width]. Fused
CPU kernels read `BlockedKeysAndValues`, which has another layout.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.threads import on_threads
from outrider.errors import SettingError, check
from outrider.kv_cache.block_pool import Copy
from outrider.limits import KV_CACHE_BYTES_DEFAULT, PAGE_SIZE


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
        """The bytes of one token's key and value."""
        return self.num_heads * (self.key_width + self.value_width) * self.dtype.itemsize


def pages_in(num_bytes: int, shapes: Sequence[LayerShape]) -> int:
    """Returns the number of pages that fit into `num_bytes`. Raises `SettingError` if no page
    fits."""
    page_bytes = PAGE_SIZE * sum(shape.slot_bytes for shape in shapes)
    if num_bytes < page_bytes:
        raise SettingError(
            "kv_cache_memory_bytes",
            f"{num_bytes} bytes hold no page of keys and values; one page takes {page_bytes}",
        )
    return num_bytes // page_bytes


def memory_budget(
    device: torch.device, gpu_memory_utilization: float, num_gpus: float | None, num_others: int = 0
) -> int:
    """Returns the number of bytes for keys and values. Call this after the model is loaded. On a
    GPU, the process may use `gpu_memory_utilization` times `num_gpus` (None = 1) of the GPU's
    memory. The result is the part of this memory that the process does not use yet, at most the
    GPU's free memory. Of this part, `num_others` bytes are left for other uses. On a CPU, the
    result is fixed."""
    if device.type != "cuda":
        return KV_CACHE_BYTES_DEFAULT
    # `memory_reserved` would count memory that PyTorch keeps after weights were copied and freed.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    share = min(1.0, num_gpus or 1.0)
    taken = torch.cuda.memory_reserved(device)
    unused = min(free, int(total * share * gpu_memory_utilization) - taken)
    return max(0, unused - num_others)


class KeysAndValues:
    """The cache of one layer, or of several layers with the same shape. The heads of several layers
    are concatenated."""

    def __init__(self, shape: LayerShape, num_slots: int, num_layers: int = 1) -> None:
        def tensor(width: int) -> Tensor:
            size = (num_layers * shape.num_heads, num_slots, width)
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)

        self.keys = tensor(shape.key_width)  # [heads, slots, key width]
        self.values = tensor(shape.value_width)  # [heads, slots, value width]

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [heads, n, width] of slots [n]."""
        return self.keys.index_select(1, slots), self.values.index_select(1, slots)

    def gather_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Like `gather`, for row numbers [heads * n] of the tensors in the shape [heads * slots,
        width]. PyTorch runs `gather_rows` on several threads, but `gather` on one thread."""
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

    def copy(self, sources: Tensor, targets: Tensor, page_size: int = PAGE_SIZE) -> None:
        """Copies the pages `sources` to the pages `targets`, all at once."""
        for tensor in (self.keys, self.values):
            num_pages = tensor.shape[1] // page_size
            pages = tensor.view(len(tensor), num_pages, page_size, tensor.shape[2])
            # `index_select` makes a copy, so sources and targets may overlap.
            pages.index_copy_(1, targets, pages.index_select(1, sources))


class BlockedKeysAndValues:
    """The cache of one layer, or of several layers with the same shape, in the layout of vLLM's CPU
    attention. The pages of several layers are concatenated. Keys and values must have the same
    width."""

    def __init__(self, shape: LayerShape, num_pages: int, num_layers: int = 1) -> None:
        check(shape.key_width == shape.value_width, "keys and values have the same width")
        size = (num_layers * num_pages, shape.num_heads, PAGE_SIZE, shape.key_width)
        self._first_pages = num_pages * torch.arange(num_layers)[:, None]
        self.keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        """[pages, heads, page size, width], but the memory of each page and head holds a matrix
        [width, page size], whose columns are the keys of the slots."""
        self.values = torch.zeros_like(self.keys)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Like `KeysAndValues.copy`."""
        sources, targets = ((self._first_pages + pages).flatten() for pages in (sources, targets))
        for tensor in (self.keys, self.values):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))


class KVCache:
    """The caches of all layers."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        is_blocked: bool = False,
        plain_shapes: Sequence[LayerShape] = (),
    ) -> None:
        """If `is_blocked`, the `layers` are `BlockedKeysAndValues`, otherwise `KeysAndValues`. The
        `plain_layers` are always `KeysAndValues`."""
        self._stacks: list[Any] = []
        """Has one cache for each shape, which holds all layers with this shape, so that one call
        copies a page in all these layers."""
        self.layers = self._new_layers(shapes, num_pages, is_blocked)
        self.plain_layers = self._new_layers(plain_shapes, num_pages, False)

    def _new_layers(
        self, shapes: Sequence[LayerShape], num_pages: int, is_blocked: bool
    ) -> list[Any]:
        layers: dict[LayerShape, Iterator[Any]] = {}
        for shape, num in Counter(shapes).items():
            if is_blocked:
                self._stacks.append(BlockedKeysAndValues(shape, num_pages, num))
            else:
                self._stacks.append(KeysAndValues(shape, num_pages * PAGE_SIZE, num))
            layers[shape] = _layers_of(self._stacks[-1], num)
        return [next(layers[shape]) for shape in shapes]

    @property
    def num_bytes(self) -> int:
        return sum(stack.keys.nbytes + stack.values.nbytes for stack in self._stacks)

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copies pages (from, to) in every layer, all at once."""
        if not copies:
            return
        pages = torch.tensor(copies)
        with on_threads(1):  # A short copy on several threads might wait for a busy core.
            for stack in self._stacks:
                stack.copy(*pages.to(stack.keys.device).unbind(1))


def _layers_of(stack: Any, num_layers: int) -> Iterator[Any]:
    """Yields the cache of each layer, as a view of the `stack` of all layers."""
    tensors = (tensor.tensor_split(num_layers) for tensor in (stack.keys, stack.values))
    for keys, values in zip(*tensors, strict=True):
        layer = copy(stack)
        layer.keys, layer.values = keys, values
        yield layer
