"""The next round's proposal, drafted where the verdict is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.drafting.growing_rounds import GrowingRound, RoundDraws, RoundWanted
from outrider.engine.trained_heads import LoadedHeads
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.proposal import Proposal
from outrider.speculation.reduced import ReducedVocabulary


@dataclass(frozen=True, slots=True)
class NextRound:
    """What is known of a round that has not begun."""

    features: torch.Tensor
    """[D]: what the target's head read at the token before the newest one."""
    wanted: RoundWanted


class SelfDrafter(Protocol):
    """Proposes for rounds of the target that it is a part of. As of any drafter, a proposal depends
    on nothing that was drafted and not committed, and on no numbers but its own round's."""

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """One proposal for each, in order; of what is wanted or less."""
        ...


class HeadDrafter:
    """Drafts with heads: a token of every round at a time."""

    def __init__(self, heads: LoadedHeads, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        """`entries_max` bounds the support of each draft distribution."""
        self._heads = heads.module
        self._draws = RoundDraws(ReducedVocabulary.of(heads.token_ids), entries_max)

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """See `SelfDrafter.propose`. A round whose logits cannot be drawn from has what was drawn
        so far."""
        growing = [GrowingRound(entry.wanted, entry.features) for entry in rounds]
        for depth in range(len(self._heads.heads)):
            active = [entry for entry in growing if entry.wants_more]
            if not active:
                break
            features = torch.stack([entry.features for entry in active])
            newest = torch.tensor([entry.newest for entry in active], device=features.device)
            features = self._heads.advance(depth, features, newest)
            logits = self._heads.logits(features)
            for entry, row in zip(active, features, strict=True):
                entry.features = row
            self._draws.draw(active, logits, depth)
        return [entry.result() for entry in growing]
