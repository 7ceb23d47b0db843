"""Drafts the next round's proposal on the target, right after a verdict."""

import logging
from collections.abc import Sequence

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
        """Returns a proposal for each request, of at most the requested number of tokens. The
        engine must hold all committed tokens of a request but the newest. Without penalties, the
        request's `token_ids` needs only the newest. For each request, `hidden_states` has the
        engine's feature [D] at the token before the newest. The engine's sequences stay unchanged.

        If a pass fails, or if no token can be drawn from its logits, the tokens drawn so far are
        proposed. To drop them could bias the output, because the failure may depend on their
        values."""
        drafts, engine = [AutoregressiveDraft(request) for request in requests], self.engine
        lengths = {draft.sequence_id: engine.length(draft.sequence_id) for draft in drafts}
        for draft, row in zip(drafts, hidden_states, strict=True):
            draft.carried = row
            # The row is of the token before the newest. This must be the engine's last token.
            if lengths[draft.sequence_id] != draft.request.noise.committed_length - 1:
                draft.stop()
        try:
            while active := [draft for draft in drafts if draft.goes_on()]:
                self._draw(active)
        except Exception:
            logger.exception("drafts of %d sessions end early", len(drafts))
        for name, length in lengths.items():
            engine.keep(name, length)
        return [draft.proposal for draft in drafts]

    def _draw(self, drafts: list[AutoregressiveDraft]) -> None:
        """Draws a token for each draft. If pages are short, ends the last drafts instead."""
        steps = [SequenceStep(draft.sequence_id, (draft.newest,), 1) for draft in drafts]
        while not self.engine.can_hold(steps):
            steps.pop()
            drafts.pop().stop()
        if not drafts:
            return
        hidden = self.engine.forward_draft(steps, [draft.carried for draft in drafts])
        for draft, row in zip(drafts, self._head.carry(hidden), strict=True):
            draft.carried = row
        self._sampler.draw(drafts, torch.split(self._head.logits(hidden), 1))
