"""What a CUDA device offers to steps: an attention kernel that reads pages in place, and graphs
that are captured once and replayed.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.attention import LayerPages
from outrider.engine.cuda.page_tables import TableStep, padded_power

KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_BLOCK_ROWS_MIN = 16
"""Of a product on the device's matrix units."""
_WIDTH_MIN = 16
_BLOCK_SLOTS = 64
_WIDE = 128
"""Above this width of a head a block of slots is half as long: it must fit beside the others."""
_WARPS = 4
_STAGES = 2
"""Blocks of slots that are on their way at a time; with three, wide heads in float32 do not fit."""


def has_kernel() -> bool:
    """Whether the kernel's compiler is here; it comes with torch for CUDA."""
    return importlib.util.find_spec("triton") is not None


def attend_tables(query: Tensor, layer: LayerPages, step: TableStep) -> Tensor:
    """Attention output [1, R, query heads, value width] of queries [1, query heads, R, key width],
    whose keys and values are in the cache. Query head h reads key head h * Hkv // Hq. Rows that are
    in no block are undefined."""
    from outrider.engine.cuda.triton_kernels import attend_blocks, merge_splits

    cache, softcap = layer.cache, layer.softcap
    queries = query[0] if query.stride(-1) == 1 else query[0].contiguous()
    num_heads, num_rows, key_width = queries.shape
    key_heads, num_slots, _ = cache.keys.shape
    value_width = cache.values.shape[2]
    shared = num_heads // key_heads
    shared_padded = padded_power(shared)
    num_splits = step.size.num_splits
    outputs = (num_rows, num_heads)
    output = queries.new_empty((*outputs, value_width))
    parts = maxima = sums = output
    if num_splits > 1:
        parts = queries.new_empty((num_splits, *outputs, value_width), dtype=torch.float32)
        maxima, sums = queries.new_empty((2, num_splits, *outputs), dtype=torch.float32).unbind()
    ancestors = step.ancestors
    padded = {
        "VALUE_WIDTH": value_width,
        "VALUE_PADDED": max(_WIDTH_MIN, padded_power(value_width)),
        "NUM_SPLITS": num_splits,
    }
    attend_blocks[(step.size.num_blocks, key_heads, num_splits)](
        output, parts, maxima, sums, queries, queries.stride(0), queries.stride(1),
        cache.keys, cache.values, num_slots, step.position_ids, step.blocks, step.pages,
        step.blocks if ancestors is None else ancestors,
        0 if ancestors is None else ancestors.shape[1],
        num_rows, layer.scaling, softcap or 1.0, layer.window or 0,
        PAGE_SIZE=step.page_size,
        KEY_HEADS=key_heads,
        SHARED=shared,
        SHARED_PADDED=shared_padded,
        BLOCK_ROWS=max(_BLOCK_ROWS_MIN, step.size.block_tokens * shared_padded),
        BLOCK_SLOTS=_BLOCK_SLOTS if max(key_width, value_width) <= _WIDE else _BLOCK_SLOTS // 2,
        KEY_WIDTH=key_width,
        KEY_PADDED=max(_WIDTH_MIN, padded_power(key_width)),
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=layer.window is not None,
        HAS_TREES=ancestors is not None,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=_WARPS,
        num_stages=_STAGES,
        **padded,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits[(num_rows * num_heads,)](
            output, parts, maxima, sums, num_rows * num_heads, num_warps=1, **padded
        )
    return output[None]


RECORDINGS_MAX = 64
RECORDED_BYTES_MAX = 2**30
"""Of a device's memory that recordings take beside the model; what they compute on is shared."""
_log = logging.getLogger(__name__)

StepRequest = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Recording:
    """Work that can be done again."""

    output: Tensor
    """Where each replay leaves its result; valid until the next one."""
    replay: Callable[[], None]


class Recorder(Protocol):
    """How work is recorded."""

    def record(self, work: StepRequest) -> Recording:
        """Does the work, and records it. Raises what it raises, and where it cannot be recorded."""
        ...

    def num_bytes(self) -> int:
        """Memory that recordings have taken so far."""
        ...


class GraphRecorder(Recorder):
    """Captures CUDA graphs, all in one pool of memory: one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._num_bytes = 0

    def record(self, work: StepRequest) -> Recording:
        """See `Recorder.record`. The first time the work is done in plain steps, so that whatever
        is set up on first use is there when it is captured."""
        # A capture begins with this too: what it gives back would hide what is taken.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            recording = self._capture(work)
        self._num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return recording

    def _capture(self, work: StepRequest) -> Recording:
        """Raises what the work raises, rather than what the end of its capture makes of it."""
        graph = torch.cuda.CUDAGraph()
        failures: list[Exception] = []
        try:
            # A capture that fails leaves its stream the current one; the outer context does not.
            # Other threads may use the device meanwhile.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                try:
                    output = work()
                except Exception as error:
                    failures.append(error)
                    raise
        except Exception:
            if failures:
                raise failures[0] from None
            raise
        return Recording(output, graph.replay)

    def num_bytes(self) -> int:
        return self._num_bytes


class Recordings:
    """The recordings of one engine, by what they depend on; bounded in number and memory. Of too
    many the one that was not replayed for longest is dropped."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[Hashable, Recording | None] = {}
        """The last one that was asked for is last; None for what could not be recorded."""
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether all that was asked for could be recorded."""
        return not self._closed and None not in self._known.values()

    def replay(self, key: Hashable, work: StepRequest) -> Tensor | None:
        """The result of `work`, which depends on nothing but `key` and what it reads; valid until
        the next replay. None where it is not recorded and cannot be."""
        found = self._known.pop(key) if key in self._known else self._record(work)
        if not self._closed or found is not None:
            self._known[key] = found
        if found is None:
            return None
        found.replay()
        return found.output

    def _record(self, work: StepRequest) -> Recording | None:
        """None where it cannot be recorded. Where the first one cannot, none is tried any more,
        unless memory was short: then others may need less."""
        if self._closed:
            return None
        if self._recorder.num_bytes() >= RECORDED_BYTES_MAX:
            self._close(f"{len(self._known)} recordings have taken all their memory")
            return None
        if len(self._known) >= RECORDINGS_MAX:
            del self._known[next(iter(self._known))]
        try:
            return self._recorder.record(work)
        except torch.OutOfMemoryError as error:
            _log.warning("for a step there is no memory to record it: %r", error)
        except Exception as error:  # noqa: BLE001 (whatever it is, plain steps show it again)
            if any(self._known.values()):
                _log.warning("a step cannot be recorded: %r", error)
            else:
                self._close(f"a step cannot be recorded: {error!r}")
        return None

    def _close(self, reason: str) -> None:
        self._closed = True
        _log.warning("%s; other steps are run one operator after another", reason)


_PROGRAMS_EACH = 2
"""Programs that a multiprocessor runs side by side; with fewer it waits for memory."""


TableAttention = Callable[[Tensor, LayerPages, TableStep], Tensor]
"""`attend_tables`, or what tests put in its place."""


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """How an engine runs its steps, if not by gathering slots, one operator after another."""

    attend: TableAttention
    num_programs: int
    """Programs of a kernel that the device runs side by side."""
    new_recorder: Callable[[], Recorder] | None
    """Makes one for each run of pages, which gives its memory back with it; None where no step may
    be recorded."""

    @property
    def recorded_bytes_max(self) -> int:
        """Memory that recordings may take beside the model and its pages."""
        return 0 if self.new_recorder is None else RECORDED_BYTES_MAX


def find_backend(
    device: torch.device, dtype: torch.dtype, graphs: bool = True
) -> DeviceBackend | None:
    """What the device offers to a model of this dtype; None for nothing. `graphs`: whether steps
    may be recorded."""
    if device.type != "cuda" or dtype not in KERNEL_DTYPES:
        return None
    if not has_kernel():
        _log.warning(
            "triton is not installed: attention gathers its slots, and no step is recorded"
        )
        return None
    properties = torch.cuda.get_device_properties(device)
    num_programs = _PROGRAMS_EACH * int(properties.multi_processor_count)
    new_recorder = partial(GraphRecorder, device) if graphs else None
    return DeviceBackend(attend_tables, num_programs, new_recorder)
