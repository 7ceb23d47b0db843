"""The numbers of whole rows of tokens (`philox.py`), as tensors, on a CPU or a device."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.speculation.philox import FEW, WORD_SCALE, RowKeys, rounds, rounds_of_rows

_BLOCK: Final = 16_384
"""Counters worked on at a time on a CPU: the ten or so arrays of a block then stay in its cache."""


def row_uniforms(keys: RowKeys, num_tokens: int, device: torch.device | str) -> torch.Tensor:
    """Numbers of the tokens 0..num_tokens-1 in every row: [R, num_tokens], float64."""
    if torch.device(device).type != "cpu":
        return all_uniforms_on_device(_to_torch(keys, device), num_tokens)
    num_counters = (num_tokens + 3) // 4
    if len(keys) * num_counters <= FEW:
        words = [rounds(n, *row) for row in keys.counters() for n in range(num_counters)]
        few = np.array(words, dtype=np.uint32).reshape(len(keys), num_counters * 4)
        return _as_uniforms(few[:, :num_tokens])
    drawn = np.empty((len(keys), num_counters, 4), dtype=np.uint32)
    all_columns = keys.columns()
    block_rows = max(1, _BLOCK // max(1, num_counters))
    for row in range(0, len(keys), block_rows):
        block = tuple(column[row : row + block_rows] for column in all_columns)
        for first in range(0, num_counters, _BLOCK):
            last = min(first + _BLOCK, num_counters)
            counter = np.arange(first, last, dtype=np.uint64)[None]
            for word, values in enumerate(rounds_of_rows(counter, block)):
                drawn[row : row + block_rows, first:last, word] = values
    return _as_uniforms(drawn.reshape(len(keys), num_counters * 4)[:, :num_tokens])


def row_uniforms_at(keys: RowKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Numbers of the listed tokens, [R, M] (int64, >= 0): [R, M], float64, on the same device.

    Equal to picking them out of `row_uniforms`; worth it where few tokens are listed."""
    if token_ids.device.type != "cpu":
        return uniforms_on_device(_to_torch(keys, token_ids.device), token_ids)
    ids = token_ids.numpy().astype(np.uint64)
    four = rounds_of_rows(ids >> 2, keys.columns())
    chosen = np.choose((ids & 3).astype(np.intp), four)
    return _as_uniforms(chosen.astype(np.uint32))


def uniforms_on_device(columns: tuple[torch.Tensor, ...], token_ids: torch.Tensor) -> torch.Tensor:
    """As `row_uniforms_at`, of keys that are on the device: `columns` are those of
    `RowKeys.columns`, int64. Waits for nothing."""
    words = torch.stack(rounds_of_rows(token_ids >> 2, columns), dim=-1)
    drawn = words.gather(-1, (token_ids & 3)[..., None])[..., 0].double()
    return drawn.add_(0.5).mul_(WORD_SCALE)


def all_uniforms_on_device(columns: tuple[torch.Tensor, ...], num_tokens: int) -> torch.Tensor:
    """As `row_uniforms`, of keys that are on the device. Waits for nothing."""
    counters = torch.arange((num_tokens + 3) // 4, device=columns[0].device)[None]
    words = torch.stack(rounds_of_rows(counters, columns), dim=-1)
    drawn = words.view(len(columns[0]), -1)[:, :num_tokens].double()
    return drawn.add_(0.5).mul_(WORD_SCALE)


def _as_uniforms(words: npt.NDArray[np.uint32]) -> torch.Tensor:
    numbers = np.add(words, 0.5, dtype=np.float64)
    numbers *= WORD_SCALE
    return torch.from_numpy(numbers)


def _to_torch(keys: RowKeys, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """`keys.columns()` as int64 on `device`; a word fits into the positive half."""
    stacked = np.stack(keys.columns()).astype(np.int64)
    return tuple(torch.from_numpy(stacked).to(device))
