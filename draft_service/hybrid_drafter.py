"""A look-up where it is confident, else a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draft_service.model_drafter import Branch, ModelDrafter, Unended
from outrider.drafting.drafter import DraftRequest
from outrider.drafting.lookup import LookupDrafter
from outrider.engine.interface import SequenceStep
from outrider.errors import OutriderError
from outrider.speculation.proposal import Proposal
from outrider.speculation.reduced import ReducedVocabulary


class HybridDrafter:
    """Asks the look-up first, session by session and round by round. Where that expects
    `min_score` of its tokens to be accepted, the model does not run: it reads the tokens that it
    missed when it is asked next. The choice is made before the model draws anything, by the
    committed tokens and what else a proposal may depend on, so it is as exact as either of them.
    """

    def __init__(
        self, lookup: LookupDrafter, model: ModelDrafter, min_score: float, model_tokens: int
    ) -> None:
        """`min_score` > 0, in tokens. The model draws `model_tokens` of a proposal at most: each
        takes it a step, while those of a look-up cost next to nothing."""
        self._lookup = lookup
        self._model = model
        self._min_score = min_score
        self._model_tokens = model_tokens

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | OutriderError | Unended]:
        """See `ModelDrafter.propose`. A request for no tokens is the model's: it runs a prefix; so
        is one that the model goes on with."""
        guesses = [self._lookup.guess(request).within(request) for request in requests]
        confident = [
            guess.score >= self._min_score and not request.goes_on
            for request, guess in zip(requests, guesses, strict=True)
        ]
        left = [
            self._models_part(request)
            for request, sure in zip(requests, confident, strict=True)
            if not sure
        ]
        drafted = iter(self._model.propose(left) if left else ())
        return [
            guess.proposal(request) if sure else next(drafted)
            for request, guess, sure in zip(requests, guesses, confident, strict=True)
        ]

    def release(self, session_id: str) -> None:
        """See `Drafter.release`."""
        self._lookup.release(session_id)
        self._model.release(session_id)

    @property
    def vocabulary(self) -> ReducedVocabulary | None:
        """See `GrowingDrafter.vocabulary`."""
        return self._model.vocabulary

    def copied(self, request: DraftRequest, assumed: Sequence[int] = ()) -> Proposal | None:
        """See `GrowingDrafter.copied`: what a confident look-up proposes."""
        guess = self._lookup.guess(request, assumed)
        return guess.proposal(request) if guess.score >= self._min_score else None

    def begin(self, request: DraftRequest) -> Branch | None:
        """See `GrowingDrafter.begin`: the model's proposal."""
        return self._model.begin(self._models_part(request))

    def advance(
        self, branches: Sequence[Branch], beside: Sequence[SequenceStep] = ()
    ) -> list[torch.Tensor]:
        """See `GrowingDrafter.advance`."""
        return self._model.advance(branches, beside)

    def end(self, branch: Branch, error: Exception) -> None:
        """See `GrowingDrafter.end`."""
        self._model.end(branch, error)

    def _models_part(self, request: DraftRequest) -> DraftRequest:
        return replace(request, num_draft_tokens=min(request.num_draft_tokens, self._model_tokens))
