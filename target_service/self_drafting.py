"""Drafts the next round's proposal on the target, right after a verdict."""

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
    """Drafts with an EAGLE-3 head or an MTP layer on the target's pages. Each pass of the head
    drafts one token of every proposal."""

    def __init__(self, layer: LoadedDraftHead, engine: DraftingEngine) -> None:
        self.engine = engine
        self._head = layer.module
        self._sampler = DraftSampler(DraftVocabulary.of(layer.token_ids))

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[Tensor]
    ) -> list[Proposal]:
        """Returns a proposal for each request, in order. Each proposal has at most the requested
        number of tokens. The engine must hold all committed tokens of a request except the newest
        token. Without penalties, the request's `token_ids` needs only the newest token.
        `hidden_states` are the engine's features [D] at the token before the newest token. The
        engine's sequences stay unchanged.

        A proposal depends only on committed tokens and on the random numbers of its own round. If a
        pass fails, or if no token can be drawn from the pass's logits, the tokens drawn so far are
        proposed. Dropping these tokens could bias the output, because the failure may depend on
        their values."""
        drafts = [AutoregressiveDraft(request) for request in requests]
        features, engine = list(hidden_states), self.engine
        lengths = {draft.sequence_id: engine.length(draft.sequence_id) for draft in drafts}
        # If the engine holds another number of tokens, the features are of another token.
        for draft in drafts:
            if lengths[draft.sequence_id] != draft.request.noise.committed_length - 1:
                draft.stop()

        try:
            while active := [index for index, draft in enumerate(drafts) if draft.goes_on()]:
                if steps := self._fitting(drafts, active):
                    logits = self._logits(steps, features)
                    self._sampler.draw([drafts[index] for index in steps], torch.split(logits, 1))
        except Exception:
            logger.exception("drafts of %d sessions end early", len(drafts))
        for name, length in lengths.items():
            engine.keep(name, length)
        return [draft.proposal for draft in drafts]

    def _fitting(
        self, drafts: Sequence[AutoregressiveDraft], active: Sequence[int]
    ) -> dict[int, SequenceStep]:
        """Returns steps of the `active` drafts for which there are pages. Ends the other active
        drafts."""
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
        """Returns the logits [R, N] after R steps. The keys of `steps` are indices of drafts.
        Replaces the `features` of these drafts by the features for the next steps."""
        given = [features[index] for index in steps]
        hidden = self.engine.forward_draft([*steps.values()], given)
        for index, row in zip(steps, self._head.carry(hidden), strict=True):
            features[index] = row
        return self._head.logits(hidden)
