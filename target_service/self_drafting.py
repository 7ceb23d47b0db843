"""The next round's proposal, drafted where the verdict is made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from outrider.drafters.autoregressive_draft import GrowingRound, RoundDraws, RoundWanted
from outrider.engine.interface import Engine, SequenceStep, ShallowEngine
from outrider.errors import InvariantError
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.models.early_exit import LoadedExit
from outrider.models.medusa import LoadedHeads
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import Proposal

logger = logging.getLogger(__name__)

NO_FEATURES: Final = torch.empty(0)


@dataclass(frozen=True, slots=True)
class NextRound:
    """What is known of a round that has not begun."""

    features: torch.Tensor
    """[D]: what the target's head read at the token before the newest one; `NO_FEATURES` for a
    drafter that does not look at it."""
    wanted: RoundWanted
    sequence_id: str
    """The target's, which holds the committed tokens but the newest one."""


class SelfDrafter(Protocol):
    """Proposes for rounds of the target that it is a part of. As of any drafter, a proposal depends
    on nothing that was drafted and not committed, and on no numbers but its own round's."""

    @property
    def reads_features(self) -> bool:
        """Whether it looks at `NextRound.features`; constant."""
        ...

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """One proposal for each, in order; of what is wanted or less. The target's sequences are
        then as they were."""
        ...


class HeadDrafter:
    """Drafts with heads: a token of every round at a time."""

    reads_features: Final = True

    def __init__(self, heads: LoadedHeads, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        """`entries_max` bounds the support of each draft distribution."""
        self._heads = heads.module
        self._draws = RoundDraws(DraftVocabulary.of(heads.token_ids), entries_max)

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """See `SelfDrafter.propose`. A round has what was drawn so far where its logits cannot be
        drawn from, and where a head fails: a token that is dropped for what it is would bias the
        output."""
        growing = [GrowingRound(entry.wanted) for entry in rounds]
        try:
            self._grow(growing, [entry.features for entry in rounds])
        except Exception:
            logger.exception("drafts of %d sessions end early", len(growing))
        return [entry.result() for entry in growing]

    def _grow(self, growing: Sequence[GrowingRound], features: list[torch.Tensor]) -> None:
        for depth in range(len(self._heads.heads)):
            active = [index for index, entry in enumerate(growing) if entry.goes_on()]
            if not active:
                break
            given = torch.stack([features[index] for index in active])
            newest = torch.tensor([growing[index].newest for index in active], device=given.device)
            found = self._heads.advance(depth, given, newest)
            for index, row in zip(active, found, strict=True):
                features[index] = row
            logits = self._heads.logits(found)
            self._draws.draw([growing[index] for index in active], logits, depth)


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
