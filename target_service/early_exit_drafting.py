"""A target that drafts with its own first layers, and a head behind them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from outrider.drafters.autoregressive_draft import GrowingRound, RoundDraws
from outrider.engine.interface import Engine, SequenceStep, ShallowEngine
from outrider.errors import InvariantError
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.models.early_exit import LoadedExit
from outrider.speculation.draft_vocabulary import DraftVocabulary
from outrider.speculation.proposal import Proposal
from target_service.self_drafting import NextRound

logger = logging.getLogger(__name__)


class ExitDrafter:
    """Drafts with the target's first layers: a token of every round at a time, each with a shallow
    step of the engine behind the slots of what is committed."""

    reads_features: Final = False

    def __init__(
        self, exit_head: LoadedExit, engine: Engine, entries_max: int = DRAFT_SUPPORT_ENTRIES
    ) -> None:
        """`engine` is the target's; `entries_max` bounds the support of each draft distribution."""
        if not isinstance(engine, ShallowEngine):
            raise InvariantError("a target that drafts with its first layers runs them alone")
        self._head = exit_head.module
        self._engine = engine
        self._draws = RoundDraws(DraftVocabulary.of(exit_head.token_ids), entries_max)

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """See `SelfDrafter.propose`. A round has what was drawn so far where its logits cannot be
        drawn from, where pages are missing, and where the engine fails."""
        growing = {entry.sequence_id: GrowingRound(entry.wanted) for entry in rounds}
        with self._given_back(growing):
            try:
                self._grow(growing)
            except Exception:
                logger.exception("drafts of %d sessions end early", len(growing))
        return [growing[entry.sequence_id].result() for entry in rounds]

    def _grow(self, growing: dict[str, GrowingRound]) -> None:
        for name, entry in growing.items():  # Elsewhere it would go on from what is not committed.
            entry.ended = self._engine.length(name) != entry.wanted.noise.committed_length - 1
        depth = 0
        while steps := self._that_fit(growing):
            active = [growing[step.sequence_id] for step in steps]
            hidden = torch.cat(self._engine.forward_shallow(steps))
            self._draws.draw(active, self._head.logits(hidden), depth)
            depth += 1

    def _that_fit(self, growing: dict[str, GrowingRound]) -> list[SequenceStep]:
        """The next token of each round that wants more; one that there is no page for ends."""
        steps = [
            SequenceStep(name, (entry.newest,), num_logits=1)
            for name, entry in growing.items()
            if entry.goes_on()
        ]
        if not steps or self._engine.can_hold(steps):
            return steps
        fitting: list[SequenceStep] = []
        for step in steps:
            if self._engine.can_hold([*fitting, step]):
                fitting.append(step)
            else:
                growing[step.sequence_id].ended = True
        return fitting

    @contextmanager
    def _given_back(self, sequence_ids: Iterable[str]) -> Iterator[None]:
        """Afterwards the sequences hold what they held before, but for those that are gone."""
        lengths = {name: self._engine.length(name) for name in sequence_ids}
        try:
            yield
        finally:
            for name, length in lengths.items():
                if self._engine.length(name) > length:
                    self._engine.keep(name, length)
