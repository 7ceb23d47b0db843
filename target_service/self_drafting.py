"""Drafts the next round's proposal on the target, with the verdict."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import DraftingEngine, SequenceStep
from outrider.models.draft_head import LoadedDraftHead
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import Proposal

logger = logging.getLogger(__name__)


class SelfDrafter:
    """Drafts with an EAGLE-3 head or an MTP layer: one more layer on the target's pages, which
    reads pairs of a token and a hidden state. Each step of the engine drafts one token of every
    round."""

    def __init__(self, layer: LoadedDraftHead, engine: DraftingEngine) -> None:
        """`engine` is the target's."""
        self.engine = engine
        self._head = layer.module
        self._sampler = DraftSampler(DraftVocabulary.of(layer.token_ids))

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[Tensor]
    ) -> list[Proposal]:
        """One proposal of at most the requested length for each request, in order. A request names
        a sequence of the target, which holds all its tokens but the newest; without penalties,
        `token_ids` has only the newest token. `hidden_states`, [D] each, are the engine's features
        at the token before it. The sequences stay unchanged.

        As for any drafter, a proposal depends on no uncommitted token of earlier drafts, and on no
        noise but that of its round. If logits cannot be drawn from, or a pass fails, the tokens
        drawn so far are proposed: to drop a token because of its value biases the output.
        """
        drafts = [AutoregressiveDraft(request) for request in requests]
        features, engine = list(hidden_states), self.engine
        lengths = {draft.sequence_id: engine.length(draft.sequence_id) for draft in drafts}
        for draft in drafts:  # A longer sequence would continue from uncommitted tokens.
            if lengths[draft.sequence_id] != draft.request.noise.committed_length - 1:
                draft.stop()

        def next_logits(active: Sequence[int]) -> Tensor:
            steps = self._fitting(drafts, active)
            return self._logits(steps, features) if steps else torch.empty(0, 1)

        try:
            self._sampler.run(drafts, next_logits)
        except Exception:
            logger.exception("drafts of %d sessions end early", len(drafts))
        for name, length in lengths.items():
            if engine.length(name) > length:
                engine.keep(name, length)
        return [draft.proposal for draft in drafts]

    def _fitting(
        self, drafts: Sequence[AutoregressiveDraft], active: Sequence[int]
    ) -> dict[int, SequenceStep]:
        """A step for each of these drafts for which there are pages; the other drafts end."""
        steps = {
            index: SequenceStep(drafts[index].sequence_id, (drafts[index].newest,), 1)
            for index in active
        }
        if self.engine.can_hold([*steps.values()]):
            return steps
        fitting: dict[int, SequenceStep] = {}
        for index, step in steps.items():
            if self.engine.can_hold([*fitting.values(), step]):
                fitting[index] = step
            else:
                drafts[index].stop()
        return fitting

    def _logits(self, steps: Mapping[int, SequenceStep], features: list[Tensor]) -> Tensor:
        """[R, N]: the logits after each step. The keys of `steps` are indices of drafts. Stores in
        `features` what the next step reads."""
        given = [features[index] for index in steps]
        hidden = torch.cat(self.engine.forward_draft([*steps.values()], given))
        for index, row in zip(steps, self._head.carry(hidden), strict=True):
            features[index] = row
        return self._head.logits(hidden)
