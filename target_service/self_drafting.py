"""Drafts the next round's proposal on the target, with the verdict."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import DraftingEngine, Engine, SequenceStep
from outrider.models.draft_head import LoadedDraftHead
from outrider.models.medusa import LoadedHeads
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import Proposal

logger = logging.getLogger(__name__)


class HeadDrafter:
    """Drafts with heads: in each step, one token of every round."""

    reads_features: Final = True
    """Whether it reads the target's hidden states."""

    def __init__(self, heads: LoadedHeads) -> None:
        self._heads = heads.module
        self._sampler = DraftSampler(DraftVocabulary.of(heads.token_ids))

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[Tensor]
    ) -> list[Proposal]:
        """One proposal of at most the requested length for each request, in order. A request names
        a sequence of the target, which holds all its tokens but the newest; without penalties,
        `token_ids` has only the newest token. `hidden_states`, [D] each, are what the target's head
        read at the token before it. The sequences stay unchanged.

        As for any drafter, a proposal depends on no uncommitted token of earlier drafts, and on no
        noise but that of its round. If logits cannot be drawn from, or a pass fails, the tokens
        drawn so far are proposed: to drop a token because of its value biases the output.
        """
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


class _LayerDrafter:
    """Drafts with layers on the target's pages, after the committed tokens. Each step of the engine
    drafts one token of every round."""

    def __init__(self, head: Any, token_ids: Sequence[int], engine: Engine):
        """`engine` is the target's; the logits of `head` are over `token_ids`."""
        self._head = head
        self._engine: Any = engine
        self._sampler = DraftSampler(DraftVocabulary.of(token_ids))

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[Tensor] = ()
    ) -> list[Proposal]:
        """Like `HeadDrafter.propose`; `hidden_states` are needed if it `reads_features`."""
        drafts = [AutoregressiveDraft(request) for request in requests]
        features = list(hidden_states)
        engine = self._engine
        lengths = {draft.sequence_id: engine.length(draft.sequence_id) for draft in drafts}
        for draft in drafts:  # Else it would continue from uncommitted tokens.
            if lengths[draft.sequence_id] != draft.request.noise.committed_length - 1:
                draft.stop()

        def next_logits(active: Sequence[int]) -> Tensor:
            steps = self._fitting(drafts, active)
            return self._logits(steps, features) if steps else torch.empty(0, 1)

        found = _proposals(self._sampler, drafts, next_logits)
        for name, length in lengths.items():
            if engine.length(name) > length:
                engine.keep(name, length)
        return found

    def _fitting(
        self, drafts: Sequence[AutoregressiveDraft], active: Sequence[int]
    ) -> dict[int, SequenceStep]:
        """A step for each of these drafts for which there are pages; the other drafts end."""
        steps = {
            index: SequenceStep(drafts[index].sequence_id, (drafts[index].newest,), 1)
            for index in active
        }
        if self._engine.can_hold([*steps.values()]):
            return steps
        fitting: dict[int, SequenceStep] = {}
        for index, step in steps.items():
            if self._engine.can_hold([*fitting.values(), step]):
                fitting[index] = step
            else:
                drafts[index].stop()
        return fitting

    def _logits(self, steps: Mapping[int, SequenceStep], features: list[Tensor]) -> Tensor:
        """[R, N]: the logits after each step. The keys of `steps` are indices of drafts. Stores in
        `features` what the next step reads."""
        raise NotImplementedError


class PairDrafter(_LayerDrafter):
    """Drafts with an EAGLE-3 head or an MTP layer. Either is one more layer on the target's pages,
    which reads pairs of a token and a hidden state."""

    reads_features: Final = True

    def __init__(self, layer: LoadedDraftHead, engine: DraftingEngine) -> None:
        super().__init__(layer.module, layer.token_ids, engine)

    def _logits(self, steps: Mapping[int, SequenceStep], features: list[Tensor]) -> Tensor:
        given = [features[index] for index in steps]
        hidden = torch.cat(self._engine.forward_draft([*steps.values()], given))
        for index, row in zip(steps, self._head.carry(hidden), strict=True):
            features[index] = row
        logits: Tensor = self._head.logits(hidden)
        return logits


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


SelfDrafter = HeadDrafter | PairDrafter
"""Drafts on the target for the target's own rounds."""
