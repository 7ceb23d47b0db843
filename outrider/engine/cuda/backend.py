"""What a device has to offer to steps: chosen once for each engine, by whoever makes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch

from outrider.engine.cuda.cuda_graphs import RECORDED_BYTES_MAX, GraphRecorder, Recorder
from outrider.engine.cuda.page_tables import TableStep
from outrider.engine.cuda.triton_attention import KERNEL_DTYPES, attend_tables, has_kernel
from outrider.kv_cache.storage import KeysAndValues

_PROGRAMS_EACH: Final = 2
"""Programs that a multiprocessor runs side by side; with fewer it waits for memory."""
_log = logging.getLogger(__name__)


class TableAttention(Protocol):
    """Attention that reads a step's tables; see `attend_tables`."""

    def __call__(
        self,
        query: torch.Tensor,
        cache: KeysAndValues,
        step: TableStep,
        window: int | None,
        scaling: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """[1, R, query heads, value width] of queries [1, query heads, R, key width]."""
        ...


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


def find_acceleration(
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
