"""Drafts with a model, in K passes. Each pass is for all sessions that still want a token."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine, SequenceStep
from outrider.errors import OutriderError, check
from outrider.speculation.logits_processing import DraftVocabulary
from outrider.speculation.proposal import EMPTY_PROPOSAL, Proposal

logger = logging.getLogger(__name__)


class ModelDrafter:
    """Drafts with a model. After `propose` the engine holds the committed tokens and all drafted
    ones but the last, which was drawn and never run.

    It proposes nothing if the prefix has a token outside the model's vocabulary or is longer than
    `max_model_len`. It proposes fewer tokens than requested near `max_model_len`, or if there is no
    time for another draw. It checks the time before the pass for a draw; if the pass also runs the
    prefix, after the pass. If a pass fails after the first draw, it proposes the drawn tokens. One
    of them may be the cause, and dropping a token because of its value biases the output.
    """

    looks_ahead = True
    """Whether sessions may look ahead with it."""
    in_one_pass = False
    """Whether the pass of the last committed token has the rows for all draft tokens."""
    reads_features = False
    """Whether it reads hidden states that the target sends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.vocabulary = DraftVocabulary.of(engine.info.logit_token_ids)
        """The tokens that its logits are for; None = all tokens."""
        self._sampler = DraftSampler(self.vocabulary)
        self.num_passes = 0
        """Passes of the last `propose`."""

    def propose(
        self, requests: Sequence[DraftRequest | AutoregressiveDraft]
    ) -> list[Proposal | OutriderError | AutoregressiveDraft]:
        """Like `Drafter.propose`, with two further results: the error of a session for which
        nothing was drawn, and an unfinished draft, which the next call continues if it gets it in
        place of the request. Drafts stay unfinished if the time of a finished proposal is over,
        because that proposal must leave. The engine must hold a proper prefix of each request's
        tokens, or what was run of an unfinished draft. A request for no tokens also runs the
        prefix. Raises what the engine's first pass raises, unless a draft with tokens was part of
        that pass."""
        kept = [one for one in requests if isinstance(one, AutoregressiveDraft)]
        for branch in kept:
            if not self.holds(branch):  # Without its pages, it ends with what was drawn.
                branch.stop()
        branches = [
            one if isinstance(one, AutoregressiveDraft) else self.begin(one) for one in requests
        ]
        active = [branch for branch in branches if branch is not None]
        growing = [branch for branch in kept if branch.goes_on()]
        growing += [branch for branch in active if branch not in kept]
        self.num_passes = 0
        with torch.inference_mode():
            self._grow(growing, active)
        return [EMPTY_PROPOSAL if branch is None else _result(branch) for branch in branches]

    def holds(self, branch: AutoregressiveDraft) -> bool:
        """Whether the engine still holds all tokens that were run for a branch."""
        length = len(branch.request.token_ids) + len(branch.token_ids) - len(branch.unseen)
        return self.engine.length(branch.sequence_id) == length

    def begin(self, request: DraftRequest) -> AutoregressiveDraft | None:
        """A draft without tokens. None if the model cannot continue the prefix."""
        info = self.engine.info
        committed = request.token_ids
        held = self.engine.length(request.session_id)
        check(held < len(committed), f"{held} slots are held of {len(committed)} committed tokens")
        # x_K is drawn from the row of the token before it and needs no slot.
        num_wanted = min(request.num_draft_tokens, info.max_model_len - len(committed) + 1)
        unseen = tuple(committed[held:])
        if len(committed) > info.max_model_len or max(unseen) >= info.vocab_size:
            return None
        return AutoregressiveDraft(request, num_wanted, unseen)

    def advance(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep] = ()
    ) -> list[Tensor]:
        """Runs one pass, in which each of these unfinished drafts gets one more token, or an error.
        The steps `beside`, of other sequences, run in the same pass. Returns their logits. Raises
        what the engine's pass raises."""
        if not (branches or beside):
            return []
        with torch.inference_mode():
            logits = self._pass(branches, beside)
            self._draw(branches, logits[len(beside) :])
        return logits[: len(beside)]

    def _pass(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep] = ()
    ) -> list[Tensor]:
        """The logits of the steps `beside`, and then those from which the branches draw."""
        return self.engine.forward([*beside, *map(self._step, branches)])

    def _step(self, branch: AutoregressiveDraft) -> SequenceStep:
        num_logits = 1 if branch.num_wanted > 0 else 0
        return SequenceStep(branch.sequence_id, branch.unseen, num_logits)

    def _grow(
        self, active: list[AutoregressiveDraft], together: Sequence[AutoregressiveDraft]
    ) -> None:
        """Extends the `active` branches to their length. In each pass, all that lack a token get
        one. Ends early, between two passes, once the time of a finished branch of `together` is
        over, because its answer leaves only when the step ends."""
        while active:
            self.num_passes += 1
            try:
                logits = self._pass(active)
            except Exception as error:
                if not any(branch.token_ids for branch in active):
                    raise
                # If the engine is lost, the first pass of the next step raises.
                logger.exception("%d drafts end early", len(active))
                for branch in active:
                    self.end(branch, error)
                return
            # A draft whose prefix ran in this pass checks its time only now.
            going_on = [i for i, one in enumerate(active) if one.token_ids or one.goes_on()]
            active = self._draw([active[i] for i in going_on], [logits[i] for i in going_on])
            active = [branch for branch in active if branch.goes_on()]
            if any(other.deadline.is_over and other not in active for other in together):
                return

    def _draw(
        self, branches: Sequence[AutoregressiveDraft], rows: Sequence[Tensor]
    ) -> list[AutoregressiveDraft]:
        """Draws the next token of each branch from its row of logits [1, V]. Returns the branches
        that got one."""
        drawn = self._sampler.draw(branches, rows)
        if len(drawn) < len(branches):
            for branch in branches:
                if branch.is_whole:
                    self._undo_last_pass(branch)
        return drawn

    def end(self, branch: AutoregressiveDraft, error: Exception) -> None:
        """Ends a draft; its last token keeps no slot."""
        branch.end(error)
        self._undo_last_pass(branch)

    def _undo_last_pass(self, branch: AutoregressiveDraft) -> None:
        if not branch.token_ids:
            return
        session_id = branch.sequence_id
        length = len(branch.request.token_ids) + len(branch.token_ids) - 1
        if self.engine.length(session_id) > length:
            self.engine.keep(session_id, length)


def _result(branch: AutoregressiveDraft) -> Proposal | OutriderError | AutoregressiveDraft:
    if branch.token_ids and not branch.is_whole:
        branch.unseen = (branch.token_ids[-1],)
        return branch
    return branch.error or branch.proposal
