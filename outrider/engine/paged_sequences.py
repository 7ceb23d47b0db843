"""The base class of engines with a paged cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import HeldSequence, HeldStep
from outrider.engine.draft_layer import DraftLayer, PairLayer
from outrider.errors import InvariantError, StepUndone, check
from outrider.interfaces.engine import ModelInfo, SequenceStep, check_steps
from outrider.kv_cache.block_pool import BlockPool, Copy
from outrider.models.draft_head import LoadedDraftHead


class PageStore(Protocol):
    """The tensors that store an engine's pages."""

    @property
    def num_bytes(self) -> int: ...

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copies pages (from, to) in every layer. No copy may read what another copy wrote."""


class PagedSequences:
    """All methods of a `DraftingEngine` except `forward`, which subclasses add. Those that add it
    also set `_device`."""

    info: ModelInfo
    forward: Callable[[Sequence[SequenceStep]], list[Tensor]]
    _device: torch.device
    stated_seconds = 0.0
    draft_layer: LoadedDraftHead | None = None
    _draft: DraftLayer | None = None  # runs `draft_layer` on the pages
    _pairs: PairLayer | None = None  # the part of `_draft` that `forward_draft` runs
    _features: Sequence[Tensor] = ()

    def _use_pool(self, pool: BlockPool, stores: Sequence[PageStore], max_num_seqs: int) -> None:
        """Forgets all sequences, and uses the pages of `pool` from now on. The pool must be empty.
        Each of `stores` has tensors of these pages."""
        self._pool, self._stores, self._max_num_seqs = pool, stores, max_num_seqs
        self._page_size = pool.page_size
        self.can_hold, self.attach, self.fork = pool.can_hold, pool.attach, pool.fork
        self.keep, self.release, self.page_counts = pool.keep, pool.release, pool.counts
        self.tokens, self.length = pool.tokens, pool.length

    @property
    def kv_cache_bytes(self) -> int:
        return sum(store.num_bytes for store in self._stores)

    def launch(self, steps: Sequence[SequenceStep]) -> Callable[[], list[Tensor]]:
        """See `Engine.launch`. PyTorch queues the kernels of a GPU. A CPU computes while the caller
        waits, so that what the caller does in between is not late by a whole pass."""
        if self._device.type == "cpu":
            return partial(self.forward, steps)
        logits = self.forward(steps)
        return lambda: logits

    def _run(
        self, run: Callable[[HeldStep], Tensor], steps: Sequence[SequenceStep], whole: bool = True
    ) -> tuple[Tensor, list[int]]:
        """Runs the steps with `run`. Returns `run`'s rows without padding, and the number of rows
        of each step. `whole` states whether `run` runs the whole model, or only the draft layer."""
        check_steps(steps, self.info, self._max_num_seqs, self.length)
        with self._appended(steps, whole) as step, torch.inference_mode():
            rows = run(step)
        if whole:
            self._pool.written(steps)
        sizes = [step.num_logits for step in steps]
        return rows[: sum(sizes)], sizes

    def features(self) -> Sequence[Tensor]:
        """See `DraftingEngine.features`."""
        return self._features

    def forward_draft(self, steps: Sequence[SequenceStep], features: Sequence[Tensor]) -> Tensor:
        """See `DraftingEngine.forward_draft`. Raises `InvariantError` without a draft layer."""
        if (pairs := self._pairs) is None:
            raise InvariantError("an engine without a draft layer runs no draft steps")
        check(len(steps) == len(features), f"{len(features)} features for {len(steps)} draft steps")
        for step in steps:
            is_single = len(step.token_ids) == step.num_logits == 1
            check(is_single, f"{step.sequence_id}: a draft step must have one token and one row")
            check(self.length(step.sequence_id) > 0, f"{step.sequence_id} holds no slots yet")

        def run(step: HeldStep) -> Tensor:
            try:
                return pairs.draft(step, features)
            except Exception as error:
                raise StepUndone(f"a draft step failed: {error}") from error

        return self._run(run, steps, whole=False)[0]

    def take_slots(self, steps: Sequence[SequenceStep]) -> None:
        """Takes slots for these steps without computing anything. All ranks but rank 0 call this
        for a draft step, which only rank 0 runs."""
        self._run(lambda _: torch.empty(0), steps, whole=False)

    @contextmanager
    def _appended(self, steps: Sequence[SequenceStep], whole: bool = True) -> Iterator[HeldStep]:
        """Takes slots for these steps. If the body fails, frees these slots. If a page cannot be
        copied, forgets the sequences."""
        lengths = [self.length(step.sequence_id) for step in steps]
        copies = self._pool.append(steps, whole)
        held = [
            HeldSequence(step, length, self._pool.pages(step.sequence_id))
            for step, length in zip(steps, lengths, strict=True)
        ]
        is_copied = False
        try:
            for store in self._stores:
                store.copy_pages(copies)
            is_copied = True
            yield HeldStep(held, self._page_size)
        except BaseException:
            for sequence in held:
                self._pool.keep(sequence.step.sequence_id, sequence.length)
                if not is_copied:
                    self._pool.release(sequence.step.sequence_id)
            raise


def newest_rows(rows: Tensor, step: HeldStep) -> list[Tensor]:
    """Selects the last `num_logits` rows of each sequence from the rows [T, ..] of a step."""
    steps = [held.step for held in step.sequences]
    parts = torch.split(rows, [len(own.token_ids) for own in steps])
    return [part[len(part) - own.num_logits :] for part, own in zip(parts, steps, strict=True)]
