"""Substitutes for a CUDA device's kernels: attention by the step's tables, and draws."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.cuda.table_steps import DeviceBackend, TableStep, find_backend
from outrider.kv_cache.attention import LayerPages
from outrider.speculation import draft_sampling
from outrider.speculation.cuda_verdicts import Transforms, send_rows
from outrider.speculation.gumbel_max import race
from outrider.speculation.logits_processing import adjusted_logits, write_weights
from outrider.speculation.sampling_params import NO_HISTORY, SamplingParams


def attend_by_tables(query: torch.Tensor, layer: LayerPages, step: TableStep) -> torch.Tensor:
    """Implements `DeviceBackend.attend` row by row. Rows that belong to no block get no numbers."""
    cache, window, softcap = layer.cache, layer.window, layer.softcap
    shared = query.shape[1] // cache.keys.shape[0]
    output = query.new_full((query.shape[2], query.shape[1], cache.values.shape[2]), torch.nan)
    positions = step.position_ids[0].tolist()
    for words in step.blocks.tolist():
        first, num_rows, table, end = words
        places = torch.arange(end)
        pages = step.pages[table + places // step.page_size]
        slots = pages * step.page_size + places % step.page_size
        keys = cache.keys[:, slots].repeat_interleave(shared, 0)
        values = cache.values[:, slots].repeat_interleave(shared, 0)
        for row in range(first, first + num_rows):
            seen = places <= positions[row]
            if window is not None:
                seen &= places > positions[row] - window
            scores = (keys @ query[0, :, row, :, None])[..., 0] * layer.scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            output[row] = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return output[None]


def backend_on(device: str, dtype: torch.dtype) -> DeviceBackend:
    """The device's own attention, or its substitute on a CPU."""
    return find_backend(torch.device(device), dtype) or DeviceBackend(attend_by_tables, 8)


def _weigh(
    weights: torch.Tensor, found: torch.Tensor, logits: torch.Tensor, words: torch.Tensor
) -> None:
    for row, own, (*reals, top_k) in zip(weights, logits, words[:, :4].numpy(), strict=True):
        temperature, min_p, top_p = np.array(reals).view(np.float64).tolist()
        params = SamplingParams(temperature, top_p=top_p, top_k=int(top_k), min_p=min_p)
        write_weights(own[None], params, row[None])


def _settle(
    weights: torch.Tensor, found: torch.Tensor, words: torch.Tensor, sent: torch.Tensor
) -> None:
    """Computes what `settle_rows` computes if it judges no draft token."""
    judged = sent.numpy()
    assert (judged[:, 5] == -1).all()
    found[-1] = torch.from_numpy(race(weights, judged[:, :5].view(np.uint64)))


def _send_rows(logits: torch.Tensor, transforms: Sequence[Transforms], *rest: Any) -> Any:
    """Computes what `change_rows` computes, and sends the other words."""
    rows = zip(torch.split(logits, 1), transforms, strict=True)
    changed = torch.cat(
        [adjusted_logits(row, params, history, rest[-1]) for row, (params, history, _) in rows]
    )
    others = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    kept = [replace(params, logit_bias=(), **others) for params, _, _ in transforms]
    return send_rows(changed, [(params, NO_HISTORY, ()) for params in kept], *rest)


def draw_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no CUDA device, runs draws on the substitute kernels."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(draft_sampling, "send_rows", _send_rows)
        monkeypatch.setattr(draft_sampling, "weigh", _weigh)
        monkeypatch.setattr(draft_sampling, "settle", _settle)
        monkeypatch.setattr(draft_sampling, "has_kernels", lambda device: True)
