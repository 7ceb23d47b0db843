"""The next round's proposal, drafted where the verdict is made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import torch

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine, SequenceStep, ShallowEngine
from outrider.errors import InvariantError
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.models.early_exit import LoadedExit
from outrider.models.medusa import LoadedHeads
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import Proposal

logger = logging.getLogger(__name__)


class SelfDrafter(Protocol):
    """Proposes for rounds of the target that it is a part of. As of any drafter, a proposal depends
    on nothing that was drafted and not committed, and on no numbers but its own round's."""

    @property
    def reads_features(self) -> bool:
        """Whether it looks at the target's hidden states; constant."""
        ...

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        """One proposal for each request, in order; of what is wanted or less. A request is of the
        target's sequence, which holds its tokens but the newest one; without penalties it names
        that token alone. `hidden_states`, [D] each, are what the target's head read at the token
        before; none for a drafter that does not read them. The sequences are then as they were.

        A round has what was drawn so far where its logits cannot be drawn from, and where a pass
        fails: a token that is dropped for what it is would bias the output."""
        ...


class HeadDrafter:
    """Drafts with heads: a token of every round at a time."""

    reads_features: Final = True

    def __init__(self, heads: LoadedHeads, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        self._heads = heads.module
        self._sampler = DraftSampler(DraftVocabulary.of(heads.token_ids), entries_max)

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        depths = len(self._heads.heads)
        drafts = [
            AutoregressiveDraft(request, min(request.num_draft_tokens, depths))
            for request in requests
        ]
        features = list(hidden_states)

        def next_logits(active: Sequence[int]) -> torch.Tensor:
            given = torch.stack([features[index] for index in active])
            newest = torch.tensor([drafts[index].newest for index in active], device=given.device)
            found = self._heads.advance(len(drafts[active[0]].token_ids), given, newest)
            for index, row in zip(active, found, strict=True):
                features[index] = row
            return self._heads.logits(found)

        try:
            self._sampler.run(drafts, next_logits)
        except Exception:
            logger.exception("drafts of %d sessions end early", len(drafts))
        return [draft.proposal for draft in drafts]


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
        self._sampler = DraftSampler(DraftVocabulary.of(exit_head.token_ids), entries_max)

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[torch.Tensor] = ()
    ) -> list[Proposal]:
        drafts = [AutoregressiveDraft(request) for request in requests]
        with self._given_back([request.session_id for request in requests]):
            try:
                for draft in drafts:  # Elsewhere it would go on from what is not committed.
                    request = draft.request
                    held = self._engine.length(request.session_id)
                    if held != request.noise.committed_length - 1:
                        draft.stop()
                self._sampler.run(drafts, lambda active: self._next_logits(drafts, active))
            except Exception:
                logger.exception("drafts of %d sessions end early", len(drafts))
        return [draft.proposal for draft in drafts]

    def _next_logits(
        self, drafts: Sequence[AutoregressiveDraft], active: Sequence[int]
    ) -> torch.Tensor:
        steps = {
            index: SequenceStep(drafts[index].request.session_id, (drafts[index].newest,), 1)
            for index in active
        }
        if not self._engine.can_hold([*steps.values()]):
            fitting: list[SequenceStep] = []
            for index, step in steps.items():
                if self._engine.can_hold([*fitting, step]):
                    fitting.append(step)
                else:
                    drafts[index].stop()
            steps = dict(enumerate(fitting))
        if not steps:
            return torch.empty(0, 1)
        return self._head.logits(torch.cat(self._engine.forward_shallow([*steps.values()])))

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
