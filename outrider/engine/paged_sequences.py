"""What engines have in common whose keys and values lie in pages: sequences, forks, cuts, and what
is undone where a step fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.batch import HeldSequence
from outrider.engine.draft_layer import DraftLayer
from outrider.engine.interface import ModelInfo, SequenceStep, check_steps
from outrider.errors import InvariantError, StepUndone, check
from outrider.kv_cache.block_pool import BlockPool, Copy
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.medusa import LoadedHeads


class PageStore(Protocol):
    """What an engine's pages hold."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        ...

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Copies pages (from, to) in every layer, all at once."""
        ...

    def move_slots(self, moves: Sequence[Copy]) -> None:
        """Copies slots (from, to) in every layer, all at once."""
        ...


class PagedSequences:
    """The part of an `Engine` that runs no model."""

    info: ModelInfo
    stated_seconds = 0.0
    draft_heads: LoadedHeads | None = None
    """Heads that draft for the model ..."""
    draft_layer: LoadedDraftHead | None = None
    """... or a head that does so on its pages ..."""
    _draft: DraftLayer | None = None
    """... and its part of these."""

    def _use_pool(self, pool: BlockPool, cache: PageStore, max_num_seqs: int) -> None:
        """Begins anew with the empty pages of a pool."""
        self._pool, self._cache, self._max_num_seqs = pool, cache, max_num_seqs
        self._copies: dict[int, int] = {}
        """Pages that are copied before the next step, for all sequences at once: to, from ..."""
        self._moves: dict[int, int] = {}
        """... or slots; pages are copied first where there would be both."""
        self.can_hold, self.find, self.attach = pool.can_hold, pool.find, pool.attach
        self.mark_idle, self.release, self.length = pool.mark_idle, pool.release, pool.length
        self.page_counts = pool.counts

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that are held for keys and values; constant."""
        return self._cache.num_bytes

    def _run(
        self,
        run: Callable[[Sequence[HeldSequence]], Tensor],
        steps: Sequence[SequenceStep],
        whole: bool = True,
    ) -> tuple[Tensor, list[int]]:
        """A row [any] for each that is wanted, and how many each step wants. `whole` is false for
        steps of the first layers alone."""
        check_steps(steps, self.info, self._max_num_seqs, self.length)
        with self._appended(steps, whole) as sequences, torch.inference_mode():
            rows = run(sequences)
        if whole:
            self._pool.written(steps)
        sizes = [step.num_logits for step in steps]
        return rows[: sum(sizes)], sizes

    def forward_draft(
        self, steps: Sequence[SequenceStep], features: Sequence[Tensor]
    ) -> list[Tensor]:
        """See `DraftingEngine.forward_draft`; for an engine with a draft layer."""
        if self._draft is None:
            raise InvariantError("an engine without a draft layer runs no draft steps")
        check(len(steps) == len(features), "a draft step has one feature")
        for step in steps:
            is_single = len(step.token_ids) == step.num_logits == 1 and not step.parents
            check(is_single, f"{step.sequence_id}: a draft step has one token")
            check(self.length(step.sequence_id) > 0, f"{step.sequence_id}: no pair has been run")
        draft = self._draft.draft

        def run(sequences: Sequence[HeldSequence]) -> Tensor:
            try:
                return draft(sequences, features)
            except Exception as error:
                raise StepUndone(f"a draft step failed: {error}") from error

        return self._run_part(run, steps)

    def take_slots(self, steps: Sequence[SequenceStep]) -> None:
        """What a rank does that has no draft layer while the leader's draws: as `forward_draft`,
        but for what it computes."""
        self._run(lambda _: torch.empty(0), steps, whole=False)

    def _run_part(
        self, run: Callable[[Sequence[HeldSequence]], Tensor], steps: Sequence[SequenceStep]
    ) -> list[Tensor]:
        """What each step puts out of a pass through less than the whole model."""
        run = self._contending(run, steps, False)
        return list(torch.split(*self._run(run, steps, whole=False))) if steps else []

    def _contending(
        self,
        run: Callable[[Sequence[HeldSequence]], Tensor],
        steps: Sequence[SequenceStep],
        is_whole: bool,
    ) -> Callable[[Sequence[HeldSequence]], Tensor]:
        """How a step is run beside other processes."""
        return run

    def fork(self, sequence_id: str, branch_id: str) -> None:
        """See `Engine.fork`."""
        if self._moves:
            self._settle()
        _add(self._copies, self._pool.fork(sequence_id, branch_id))

    def keep(self, sequence_id: str, length: int, path: Sequence[int] = ()) -> None:
        """See `Engine.keep`. Keys stay rotated for the position they were run at, so a slot of
        `path` must have been run at the position it gets."""
        if path and self._copies:
            self._settle()
        _add(self._moves, self._pool.keep(sequence_id, length, path))

    def _slots(self, ranges: Sequence[tuple[str, int, int]]) -> npt.NDArray[np.int64]:
        """[n]: those of the places from a first up to an end of sequences that hold them."""
        if self._copies or self._moves:
            self._settle()
        size = self._pool.counts().page_size
        found = []
        for name, first, end in ranges:
            check(0 <= first <= end <= self.length(name), f"{name} does not hold {first}..{end}")
            places = np.arange(first, end)
            found.append(np.array(self._pool.pages(name))[places // size] * size + places % size)
        return np.concatenate(found)

    def _settle(self) -> None:
        """Makes the copies that wait; where that fails, what the pool believes to be written is
        forgotten."""
        copies, moves = self._copies, self._moves
        self._copies, self._moves = {}, {}
        try:
            self._cache.copy_pages([(source, target) for target, source in copies.items()])
            self._cache.move_slots([(source, target) for target, source in moves.items()])
        except BaseException:
            size = self.page_counts().page_size
            self._pool.forget({*copies, *(target // size for target in moves)})
            raise

    def take_step_seconds(self) -> float:
        """0: these steps take their own time."""
        return self.stated_seconds

    @contextmanager
    def _appended(
        self, steps: Sequence[SequenceStep], whole: bool = True
    ) -> Iterator[list[HeldSequence]]:
        """The sequences of a step, which have its slots within. Where it fails they have them no
        more."""
        if self._moves:
            self._settle()
        lengths = [self.length(step.sequence_id) for step in steps]
        _add(self._copies, self._pool.append(steps, whole))
        held = [
            HeldSequence(step, length, self._pool.pages(step.sequence_id))
            for step, length in zip(steps, lengths, strict=True)
        ]
        try:
            self._settle()
            yield held
        except BaseException:
            # Before others can share what was not written.
            for one in held:
                if self.length(one.step.sequence_id):
                    self._pool.keep(one.step.sequence_id, one.length)
            raise


def newest_rows(rows: Tensor, steps: Sequence[SequenceStep]) -> list[Tensor]:
    """Of rows [T, ..] of all new tokens of these steps, each step's last `num_logits`."""
    parts = torch.split(rows, [len(step.token_ids) for step in steps])
    return [part[len(part) - step.num_logits :] for part, step in zip(parts, steps, strict=True)]


def _add(pending: dict[int, int], copies: Sequence[Copy]) -> None:
    """All of them may be made at once: from what waits to be written nothing is copied."""
    for source, target in copies:
        pending[target] = pending.get(source, source)
