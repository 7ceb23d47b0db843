"""Runs steps from tables: recorded ones where a step has a usual shape, else as they come.

A recorded step has rows of one of few counts. What is missing to that count rests on a page of its
own, which no sequence holds. A prefix of many tokens, a tree, or a shape that is not recorded runs
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outrider.engine.attention import LayerPages, running
from outrider.engine.batch import HeldSequence, padded_rows
from outrider.engine.cuda.backend import DeviceBackend, Recordings
from outrider.engine.cuda.page_tables import (
    TableSize,
    TableStep,
    ancestors_of,
    at_depth,
    exact_size,
    multi_step_words,
    sizes_of_one_row,
    table_words,
)
from outrider.engine.gathered_attention import Forward, Steps
from outrider.engine.interface import Draws, SequenceStep

RECORDED_ROWS_MAX = 128
"""Of a step: a longer one takes its time in its kernels, not in starting them."""
_WORDS_MAX = 2**17
"""Of the tables of a recorded step, page tables included."""


recorded_rows = partial(padded_rows, smallest=1, step=16)
"""The count of rows that so many are padded to."""


class CudaRunner(Steps):
    """Not for more than one thread at a time."""

    def __init__(
        self,
        backend: DeviceBackend,
        forward: Forward,
        layers: dict[nn.Module, LayerPages],
        heads: tuple[int, int],
        page_size: int,
        spare_page: int,
        device: torch.device,
    ) -> None:
        """`heads`: of queries and of keys, in a layer where the most share one. `spare_page` is
        a page that no sequence has; read only where steps are recorded."""
        self._attend = backend.attend
        self._num_programs = backend.num_programs
        self._forward = forward
        self._layers = layers
        self._shared_heads, self._key_heads = heads[0] // heads[1], heads[1]
        self._page_size = page_size
        self._spare_page = spare_page
        self._device = device
        self._recordings: Recordings | None = None
        if backend.new_recorder is not None:
            self._recordings = Recordings(backend.new_recorder())
            self._words = torch.zeros(_WORDS_MAX, dtype=torch.int64, device=device)

    @property
    def records(self) -> bool:
        """Whether every step of a usual shape is recorded."""
        return self._recordings is not None and self._recordings.is_open

    def run(self, sequences: Sequence[HeldSequence]) -> Tensor:
        recorded = self._replayed(sequences)
        if recorded is not None:
            return recorded
        size = self._size(sequences)
        words = torch.from_numpy(np.concatenate(self._words_of(sequences, size))).to(self._device)
        return self._logits(*self._steps(words, [size], ancestors_of(sequences, self._device)))

    def try_kernel(self) -> None:
        """Runs every form of the kernel on every layer, whatever the steps of a trial need: in
        chains and trees, blocks of all lengths, splits of all numbers. On page 0, which no
        sequence may hold. Raises what the first form raised that does not run; by then the pass
        has ended, so that ranks which wait for each other within it are not left alone."""
        steps: list[TableStep] = []
        for parents in ((), (-1,)):
            row = HeldSequence(SequenceStep("", (0,), 1, parents), 0, (0,))
            ancestors = ancestors_of([row], self._device)
            for size in sizes_of_one_row(self._shared_heads):
                words = table_words([row], [0], size, self._page_size)
                given = torch.from_numpy(np.append(words, row.pages)).to(self._device)
                steps += self._steps(given, [size], ancestors)
        failures: list[Exception] = []

        def attend_layer(query: Tensor, layer: LayerPages) -> Tensor:
            try:
                for step in steps:
                    self._attend(query, layer, step)
            except Exception as error:  # noqa: BLE001 (raised below)
                failures.append(error)
            return query.new_zeros((1, 1, query.shape[1], layer.cache.values.shape[2]))

        first = steps[0]
        with torch.inference_mode(), running(self._layers, first.slots, attend_layer):
            self._forward(first.token_ids, first.position_ids, first.logit_rows)
        if failures:
            raise failures[0]

    def run_multi_step(
        self, sequences: Sequence[HeldSequence], counts: Sequence[int], draws: Draws
    ) -> Tensor | None:
        """Runs these steps, each of one row of logits, and draws `counts` tokens of each, of which
        all but the last are run: their slots are on its pages. What was drawn, [most tokens, at
        least S, any], valid until the next step; None for what is not recorded."""
        num_rows = sum(len(held.step.token_ids) for held in sequences)
        if self._recordings is None or num_rows > RECORDED_ROWS_MAX:
            return None
        if not draws.can_draw_on(self._device):
            return None
        width, depths = recorded_rows(len(sequences)), max(counts)
        rows = max(width, recorded_rows(num_rows))
        first = replace(self._size(sequences), num_rows=rows, num_logits=width, num_blocks=rows)
        last = self._size(at_depth(sequences, counts, depths - 1, self._spare_page))
        later = replace(last, num_rows=width, num_logits=width, num_blocks=width)
        sizes = (first, *[later] * (depths - 1))
        tables, pages = multi_step_words(
            sequences, counts, sizes, self._page_size, self._spare_page
        )
        parameters = draws.words(width)
        if not self._fill([parameters, *tables, pages]):
            return None
        given, rest = self._words.tensor_split([len(parameters)])
        return self._recordings.replay(
            (sizes, draws.key), lambda: self._drawn(self._steps(rest, sizes), given, draws)
        )

    def _drawn(self, steps: Sequence[TableStep], words: Tensor, draws: Draws) -> Tensor:
        """One step after another, whose tokens are put where the next one reads them."""
        drawn: list[Tensor] = []
        for depth, step in enumerate(steps):
            if drawn:
                step.token_ids[0].copy_(drawn[-1][:, 0])
            drawn.append(draws.draw(self._logits(step), words, depth))
        return torch.stack(drawn)

    def _replayed(self, sequences: Sequence[HeldSequence]) -> Tensor | None:
        num_rows = sum(len(held.step.token_ids) for held in sequences)
        if self._recordings is None or num_rows > RECORDED_ROWS_MAX:
            return None
        if any(held.step.parents for held in sequences):
            return None
        rows = recorded_rows(num_rows)
        # Resting rows are not counted where the kernel's splits are chosen: they are soon done.
        size = replace(self._size(sequences), num_rows=rows, num_logits=rows, num_blocks=rows)
        if not self._fill(self._words_of(sequences, size)):
            return None
        return self._recordings.replay(
            size, lambda: self._logits(*self._steps(self._words, [size]))
        )

    def _words_of(
        self, sequences: Sequence[HeldSequence], size: TableSize
    ) -> list[npt.NDArray[np.int64]]:
        """The tables of a step, with resting rows up to its size, and its pages."""
        counts = [1] * len(sequences)
        tables, pages = multi_step_words(
            sequences, counts, [size], self._page_size, self._spare_page
        )
        return [*tables, pages]

    def _size(self, sequences: Sequence[HeldSequence]) -> TableSize:
        return exact_size(sequences, self._shared_heads, self._key_heads, self._num_programs)

    def _fill(self, parts: Sequence[npt.NDArray[np.int64]]) -> bool:
        """Puts the words where recorded steps read them; False where there is no room."""
        words = np.concatenate(parts)
        if len(words) > _WORDS_MAX:
            return False
        self._words[: len(words)].copy_(torch.from_numpy(words))
        return True

    def _steps(
        self,
        words: Tensor,
        sizes: Sequence[TableSize],
        ancestors: Tensor | None = None,
    ) -> list[TableStep]:
        """Steps of these sizes, one behind another, and their pages behind them."""
        *tables, pages = words.tensor_split([*accumulate(size.num_words for size in sizes)])
        return [
            TableStep.of(own, pages, size, self._page_size, ancestors)
            for own, size in zip(tables, sizes, strict=True)
        ]

    def _logits(self, step: TableStep) -> Tensor:
        with running(self._layers, step.slots, lambda q, layer: self._attend(q, layer, step)):
            return self._forward(step.token_ids, step.position_ids, step.logit_rows)
