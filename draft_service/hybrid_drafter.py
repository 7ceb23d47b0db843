"""A look-up where it is confident, else a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draft_service.model_drafter import ModelDrafter
from outrider.drafting.drafter import DraftRequest
from outrider.drafting.lookup import LookupDrafter
from outrider.errors import OutriderError
from outrider.speculation.proposal import Proposal


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

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | OutriderError]:
        """See `ModelDrafter.propose`. A request for no tokens is the model's: it runs a prefix."""
        guesses = [self._lookup.guess(request) for request in requests]
        confident = [guess.score >= self._min_score for guess in guesses]
        left = [
            replace(request, num_draft_tokens=min(request.num_draft_tokens, self._model_tokens))
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
