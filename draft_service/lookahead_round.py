"""What is worked out of one session's newest round: values for `lookahead.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.model_drafter import Branch
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import SequenceStep
from outrider.messages import DraftItem
from outrider.speculation.draft_sampling import LikelyTokens
from outrider.speculation.outcome_prediction import RoundGuesses
from outrider.speculation.proposal import SealedProposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One that is being drafted, or has been."""

    assumed: tuple[int, ...]
    chance: float
    branch: Branch

    @property
    def name(self) -> str:
        """Of its sequence."""
        return self.branch.request.session_id


@dataclass(frozen=True, slots=True)
class Basis:
    """A sequence that holds a round's committed tokens and x_1..x_{K-1}, for it drafted them, and
    what each x was drawn from."""

    name: str
    seen: Sequence[LikelyTokens]


class RoundAhead:
    """One session's newest round."""

    __slots__ = (
        "basis", "bytes_left", "committed", "drafted", "finished", "guesses", "is_read", "item",
        "kept", "num_recorded", "outcomes", "sampling", "unseen", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        item: DraftItem,
        sampling: SamplingParams,
        committed: tuple[int, ...],
        unseen: tuple[int, ...],
        bytes_left: int,
    ) -> None:
        self.item = item
        self.sampling = sampling
        self.committed = committed
        self.unseen = unseen
        """Of the committed tokens those at the end that the session's own sequence lacks."""
        self.bytes_left = bytes_left
        """Of what may be pushed."""
        self.num_recorded = len(committed) - len(unseen)
        """Tokens that its table has while its own proposal grows."""
        self.drafted: tuple[int, ...] = ()
        """x_1..x_K, once they are known."""
        self.wanted: Branch | None = None
        """The proposal that is waited for, as it grows."""
        self.basis: Basis | None = None
        """Where outcomes can branch off before the round is read."""
        self.is_read = False
        self.guesses: RoundGuesses | None = None
        """What may come of it."""
        self.outcomes: list[Outcome] = []
        self.finished: dict[tuple[int, ...], SealedProposal] = {}
        """By what is assumed."""
        self.kept: list[Outcome] = []
        """Those whose sequences are left for the round that they turn out to be."""

    @property
    def session_id(self) -> str:
        """Whose round it is."""
        return self.item.head.session_id

    @property
    def noise(self) -> RoundNoise:
        """Its numbers."""
        head = self.item.head
        return RoundNoise(head.seed, head.rule, len(self.committed))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_read and not self.outcomes

    @property
    def to_read(self) -> tuple[int, ...]:
        """What is still to be run of it on the session's own sequence."""
        if self.basis is not None and self.basis.name == self.session_id:
            return self.drafted[-1:]
        return (*self.unseen, *self.drafted)

    @property
    def reading(self) -> SequenceStep:
        """Runs it; a row for each outcome, or for the bonus alone where the others are known."""
        num_logits = 1 if self.basis is not None else len(self.drafted) + 1
        return SequenceStep(self.session_id, self.to_read, num_logits)

    def request(self, name: str, committed: tuple[int, ...]) -> DraftRequest:
        """Asks for a proposal after these tokens, by a sequence of that name."""
        head = self.item.head
        return DraftRequest(
            session_id=name,
            tenant=head.tenant,
            token_ids=committed,
            prompt_length=head.prompt_length,
            num_draft_tokens=self.item.num_draft_tokens,
            sampling=self.sampling,
            rule=head.rule,
            noise=RoundNoise(head.seed, head.rule, len(committed)),
        )
