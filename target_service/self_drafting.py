"""The next round's proposal, drafted where the verdict is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from outrider.drafters.autoregressive_draft import GrowingRound, RoundDraws, RoundWanted
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.models.medusa import LoadedHeads
from outrider.speculation.draft_vocabulary import DraftVocabulary
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
