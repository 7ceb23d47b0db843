"""The next round's proposal, drafted where the verdict is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import SequenceStep, ShallowEngine
from outrider.models.early_exit import LoadedExit
from outrider.models.medusa import LoadedHeads
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import Proposal

logger = logging.getLogger(__name__)


class HeadDrafter:
    """Drafts with heads: a token of every round at a time."""

    reads_features: Final = True
    """Whether it looks at the target's hidden states."""

    def __init__(self, heads: LoadedHeads, entries_max: int) -> None:
        self._heads = heads.module
        self._sampler = DraftSampler(DraftVocabulary.of(heads.token_ids), entries_max)

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[Tensor]
    ) -> list[Proposal]:
        """One proposal for each request, in order; of what is wanted or less. A request is of the
        target's sequence, which holds its tokens but the newest one; without penalties it names
        that token alone. `hidden_states`, [D] each, are what the target's head read at the token
        before. The sequences are then as they were.

        As of any drafter, a proposal depends on nothing that was drafted and not committed, and on
        no numbers but its own round's. A round has what was drawn so far where its logits cannot be
        drawn from, and where a pass fails: a token that is dropped for what it is would bias the
        output."""
        depths = len(self._heads.heads)
        drafts = [
            AutoregressiveDraft(request, min(request.num_draft_tokens, depths))
            for request in requests
        ]
        features = list(hidden_states)

        def next_logits(active: Sequence[int]) -> Tensor:
            given = torch.stack([features[index] for index in active])
            newest = torch.tensor([drafts[index].newest for index in active], device=given.device)
            found = self._heads.advance(len(drafts[active[0]].token_ids), given, newest)
            for index, row in zip(active, found, strict=True):
                features[index] = row
            return self._heads.logits(found)

        return _proposals(self._sampler, drafts, next_logits)


class ExitDrafter:
    """Drafts with the target's first layers: a token of every round at a time, each with a shallow
    step of the engine behind the slots of what is committed."""

    reads_features: Final = False

    def __init__(self, exit_head: LoadedExit, engine: ShallowEngine, entries_max: int) -> None:
        """`engine` is the target's; `entries_max` bounds the support of each draft distribution."""
        self._head = exit_head.module
        self._engine = engine
        self._sampler = DraftSampler(DraftVocabulary.of(exit_head.token_ids), entries_max)

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[Tensor] = ()
    ) -> list[Proposal]:
        """As `HeadDrafter.propose`; it reads no hidden states."""
        drafts = [AutoregressiveDraft(request) for request in requests]
        engine = self._engine
        lengths = {draft.sequence_id: engine.length(draft.sequence_id) for draft in drafts}
        for draft in drafts:  # Elsewhere it would go on from what is not committed.
            if lengths[draft.sequence_id] != draft.request.noise.committed_length - 1:
                draft.stop()
        found = _proposals(self._sampler, drafts, lambda active: self._next_logits(drafts, active))
        for name, length in lengths.items():
            if engine.length(name) > length:
                engine.keep(name, length)
        return found

    def _next_logits(self, drafts: Sequence[AutoregressiveDraft], active: Sequence[int]) -> Tensor:
        steps = {
            index: SequenceStep(drafts[index].sequence_id, (drafts[index].newest,), 1)
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


def _proposals(
    sampler: DraftSampler,
    drafts: Sequence[AutoregressiveDraft],
    next_logits: Callable[[Sequence[int]], Tensor],
) -> list[Proposal]:
    try:
        sampler.run(drafts, next_logits)
    except Exception:
        logger.exception("drafts of %d sessions end early", len(drafts))
    return [draft.proposal for draft in drafts]


SelfDrafter = HeadDrafter | ExitDrafter
"""Proposes for rounds of the target that it is a part of."""
