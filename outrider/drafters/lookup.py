"""What drafters have in common that look up what was written before: a guess, how far it is
trusted, and the text of each session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.drafters.drafter import DraftRequest
from outrider.errors import check
from outrider.speculation.proposal import EMPTY_PROPOSAL, Proposal
from outrider.tokens import TokenSequence


@dataclass(frozen=True, slots=True)
class Guess:
    """A continuation, each of whose tokens was followed by the next where it was looked up."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    """Tokens of it that are expected to be accepted."""

    def within(self, request: DraftRequest) -> Guess:
        """As much of it as the session's grammar lets follow: all that stands behind would be
        refused. What is cut depends on the committed tokens alone, as the guess does."""
        if request.allowed is None or not self.token_ids:
            return self
        token_ids = self.token_ids[: request.allowed.num_legal(self.token_ids)]
        return Guess(token_ids, min(self.score, float(len(token_ids))))

    def proposal(self, request: DraftRequest) -> Proposal:
        """The one-hot proposal that answers `request`."""
        if not self.token_ids:
            return EMPTY_PROPOSAL
        return Proposal(self.token_ids, (None,) * len(self.token_ids) * request.rule.needs_q)


NO_GUESS = Guess()


def share_of(num: int, num_all: int, match_length: int) -> float:
    """The share of `num` out of `num_all` occurrences of a match: as though beside them 1 / length
    of an occurrence had gone on otherwise, since a short match that was seen once says little."""
    return num / (num_all + 1 / match_length)


class LookupDrafter(ABC):
    """A `Drafter` without a model; its proposals are one-hot."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """See `Drafter.propose`."""
        return [self.guess(request).within(request).proposal(request) for request in requests]

    @abstractmethod
    def guess(self, request: DraftRequest) -> Guess:
        """What would be proposed, and how far it is trusted; nothing where nothing was asked for.
        Both depend on what a proposal may depend on, and on nothing else."""

    @abstractmethod
    def release(self, session_id: str) -> None:
        """See `Drafter.release`."""


class _Text(Protocol):
    def __len__(self) -> int: ...

    def begins(self, token_ids: Sequence[int], digests: TokenSequence | None) -> bool: ...

    def extend(self, token_ids: Sequence[int]) -> None: ...


Text = TypeVar("Text", bound=_Text)


class SessionTexts(Generic[Text]):
    """The indexed text of each session, of at most `sequences_max`; without one for a session it
    makes one, so what is read in it does not depend on what was kept."""

    def __init__(self, make: Callable[[DraftRequest], Text], sequences_max: int) -> None:
        check(sequences_max > 0, "sequences_max must be positive")
        self._make = make
        self._sequences_max = sequences_max
        self._texts: OrderedDict[str, Text] = OrderedDict()

    def of(self, request: DraftRequest) -> Text:
        """The session's, brought to exactly the request's tokens."""
        text = self._texts.pop(request.session_id, None)
        if text is None or not text.begins(request.token_ids, request.digests):
            text = self._make(request)
        text.extend(request.token_ids[len(text) :])
        self._texts[request.session_id] = text
        if len(self._texts) > self._sequences_max:
            self._texts.popitem(last=False)
        return text

    def release(self, session_id: str) -> Text | None:
        """Forgets a session's; returns it, None for an unknown one."""
        return self._texts.pop(session_id, None)
