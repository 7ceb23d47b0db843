"""What looking ahead asks of a drafter: proposals that grow a token a pass, many side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from draft_service.model_drafter import Branch
from outrider.drafting.drafter import DraftRequest
from outrider.engine.interface import SequenceStep
from outrider.speculation.proposal import Proposal
from outrider.speculation.reduced import ReducedVocabulary


@runtime_checkable
class GrowingDrafter(Protocol):
    """A drafter with an engine, whose proposals can be drafted beside each other. What it proposes
    after some tokens is the same whichever way it is asked."""

    @property
    def vocabulary(self) -> ReducedVocabulary | None:
        """The tokens that its engine's logits are of; None = all of them."""
        ...

    def copied(self, request: DraftRequest, assumed: Sequence[int] = ()) -> Proposal | None:
        """What it proposes to a session, were the `assumed` tokens committed behind those of the
        request, if it takes no pass of the engine; else None. Nothing is kept of assumptions."""
        ...

    def begin(self, request: DraftRequest) -> Branch | None:
        """Else: a proposal without tokens yet, on the sequence of the request's session; None where
        the model cannot go on after the prefix."""
        ...

    def advance(
        self, branches: Sequence[Branch], beside: Sequence[SequenceStep] = ()
    ) -> list[torch.Tensor]:
        """One pass for proposals that are not whole, of any length so far: each has a token more
        then, or all of them, or an error. Returns the logits of other sequences' steps, which run
        beside them. Raises what the engine's pass raises."""
        ...

    def end(self, branch: Branch, error: Exception) -> None:
        """The branch draws no more, for its pass has failed."""
        ...
