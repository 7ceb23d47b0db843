"""What stands in for a CUDA device where there is none: work that is replayed by doing it again,
and attention that reads a step's tables by their definition."""

from __future__ import annotations

import torch

from outrider.engine.attention import LayerPages
from outrider.engine.cuda.backend import DeviceBackend, Recording, StepRequest, find_backend
from outrider.engine.cuda.page_tables import BLOCK_WORDS, TableStep


class CountingRecorder:
    """As a graph does, a replay knows nothing but what the work was when it
    was recorded, and leaves its result where the first one was."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, work: StepRequest) -> Recording:
        output = work()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            output.copy_(work())

        return Recording(output, replay)

    def num_bytes(self) -> int:
        return 0


def attend_by_tables(query: torch.Tensor, layer: LayerPages, step: TableStep) -> torch.Tensor:
    """Implements `TableAttention`, a row at a time; rows in no block get no number."""
    cache, window, softcap = layer.cache, layer.window, layer.softcap
    shared = query.shape[1] // cache.keys.shape[0]
    output = query.new_full((query.shape[2], query.shape[1], cache.values.shape[2]), torch.nan)
    positions = step.position_ids[0].tolist()
    for words in step.blocks.view(-1, BLOCK_WORDS).tolist():
        first, num_rows, table, end, before, tree_row = words
        places = torch.arange(end)
        pages = step.pages[table + places // step.page_size]
        slots = pages * step.page_size + places % step.page_size
        keys = cache.keys[:, slots].repeat_interleave(shared, 0)
        values = cache.values[:, slots].repeat_interleave(shared, 0)
        seen_at = [*range(before), *positions[tree_row : tree_row + end - before]]
        for row in range(first, first + num_rows):
            seen = places <= positions[row]
            if step.ancestors is not None and end > before:
                seen[before:] = step.ancestors[row, : end - before] > 0
            if window is not None:
                seen &= torch.tensor(seen_at) > positions[row] - window
            scores = (keys @ query[0, :, row, :, None])[..., 0] * layer.scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            output[row] = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return output[None]


def backend_on(device: str, dtype: torch.dtype) -> DeviceBackend:
    """The device's own; for a CPU its stand-in."""
    found = find_backend(torch.device(device), dtype)
    return found or DeviceBackend(attend_by_tables, 8, CountingRecorder)
