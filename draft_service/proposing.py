"""One step of a draft: prefixes checked, then one call of the drafter for every session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.drafting.drafter import DraftRequest
from outrider.engine.interface import Engine
from outrider.engine.sequences import SequenceTable
from outrider.errors import BadRequest, OutriderError
from outrider.messages import DraftAnswer, DraftItem, ProposalReply, Refused, Resync
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import Proposal, SealedProposal
from outrider.speculation.sampling import Rule
from outrider.stepping import refusal

_Prepared = tuple[DraftItem, DraftRequest, tuple[int, ...]]
"""An item, the request to the drafter, and the committed tokens that were not held."""


class FallibleDrafter(Protocol):
    """A `Drafter`, or one that may fail for one request and serve the others of the same call."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal | OutriderError]:
        """See `Drafter.propose`; or why nothing could be proposed to one session."""
        ...

    def release(self, session_id: str) -> None:
        """See `Drafter.release`."""
        ...


class Proposer:
    """The draft's `StepWorker`: owns the drafter and what tokens it holds of which session."""

    def __init__(self, drafter: FallibleDrafter, engine: Engine | None) -> None:
        """`engine` is the one behind the drafter; None for a drafter that keeps no slots."""
        self._drafter = drafter
        self._engine = engine
        self._table = SequenceTable(engine)

    def step(self, items: Sequence[DraftItem]) -> list[DraftAnswer]:
        """See `StepWorker.step`."""
        prepared = [self._prepare(item) for item in items]
        answers = iter(self._run([entry for entry in prepared if isinstance(entry, tuple)]))
        return [next(answers) if isinstance(entry, tuple) else entry for entry in prepared]

    def release(self, session_id: str, epoch: int) -> None:
        """See `StepWorker.release`."""
        if self._table.epoch(session_id) <= epoch:
            self._forget(session_id)

    def recover(self, items: Sequence[DraftItem]) -> None:
        """See `StepWorker.recover`."""
        for item in items:
            self._forget(item.head.session_id)

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless tokens and slots agree for every session."""
        self._table.check_integrity()

    def _prepare(self, item: DraftItem) -> _Prepared | Resync | Refused:
        head = item.head
        try:
            if head.sampling is None:
                raise BadRequest("head.sampling", "the parameters behind the hash are not known")
            if head.sampling.greedy != (head.rule is Rule.GREEDY):
                raise BadRequest(
                    "head.rule",
                    f"{head.rule.value} does not go with temperature {head.sampling.temperature}",
                )
            aligned = self._table.align(head)
        except OutriderError as error:
            return refusal(head.key, error)
        if isinstance(aligned, Resync):
            return aligned
        request = DraftRequest(
            session_id=head.session_id,
            token_ids=aligned.committed,
            prompt_length=head.prompt_length,
            num_draft_tokens=item.num_draft_tokens,
            sampling=head.sampling,
            rule=head.rule,
            noise=RoundNoise(head.seed, head.rule, head.committed_length),
            digests=aligned.sequence,
        )
        return item, request, aligned.new_tokens

    def _run(self, prepared: Sequence[_Prepared]) -> list[DraftAnswer]:
        """One call of the drafter for all; where it raises an error with a name, each session
        alone, so that the one with the error hurts nobody else."""
        if not prepared:
            return []
        try:
            proposals = self._drafter.propose([request for _, request, _ in prepared])
        except OutriderError as error:
            if len(prepared) > 1:
                return [self._run_alone(entry) for entry in prepared]
            return [self._fail(prepared[0][0], error)]
        return [
            self._answer(item, new_tokens, proposal)
            for (item, _, new_tokens), proposal in zip(prepared, proposals, strict=True)
        ]

    def _run_alone(self, entry: _Prepared) -> DraftAnswer:
        """Again for one session. The failed call may have run some of its steps: back to where
        the session stood."""
        item, request, new_tokens = entry
        if self._engine is not None:
            before = len(request.token_ids) - len(new_tokens)
            if self._engine.length(request.session_id) > before:
                self._engine.keep(request.session_id, before)
        return self._run([(item, request, new_tokens)])[0]

    def _answer(
        self, item: DraftItem, new_tokens: tuple[int, ...], proposal: Proposal | OutriderError
    ) -> DraftAnswer:
        if isinstance(proposal, OutriderError):
            return self._fail(item, proposal)
        head = item.head
        # Without an engine nothing is cached of the guesses, and nothing needs to be.
        drafted = () if self._engine is None else proposal.token_ids
        held = self._table.record(head.session_id, (*new_tokens, *drafted))
        return ProposalReply(
            key=head.key,
            proposal=SealedProposal.of(proposal),
            base_length=head.committed_length,
            cached_length=held,
        )

    def _fail(self, item: DraftItem, error: OutriderError) -> Refused:
        """What a failed pass has left of the session cannot be trusted, so it is forgotten."""
        self._forget(item.head.session_id)
        return refusal(item.head.key, error)

    def _forget(self, session_id: str) -> None:
        self._drafter.release(session_id)
        self._table.release(session_id)
