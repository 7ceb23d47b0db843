"""Drafting with a model: K sequential steps, each over all sessions that still want a token. Where
the engine can take them all in one call, and their draws with them, nobody waits in between; those
whose draws need a look at what was drawn go step by step beside them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine, MultiStep, MultiStepEngine, SequenceStep
from outrider.errors import OutriderError, check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.draft_sampling import (
    DeviceDraws,
    Drawing,
    can_draw,
)
from outrider.speculation.logits_processing import (
    DraftVocabulary,
)
from outrider.speculation.proposal import (
    EMPTY_PROPOSAL,
    Proposal,
)

_UNSEEN_OF_A_ROUND = 2
"""Tokens of a prefix that a call may run in the time of its draws."""
_SLOWER_SHARE = 0.25
"""Weight of a call in what a draw is taken to last, if it was slower than that; else it is that."""

logger = logging.getLogger(__name__)


class ModelDrafter:
    """The drafter that asks a model. After `propose` the engine holds the committed tokens and
    all drafted ones but the last, which was drawn and never run.

    It proposes less than was asked for, or nothing, where the model cannot go on: when the prefix
    holds a token outside its vocabulary, or comes near its `max_model_len`; and where there is no
    time for a further draw, which is decided before its pass, or before the draw where that pass
    runs the prefix, too. Draws that are made in one call of the engine cannot stop in between: as
    many are asked for as there is time for by earlier calls. Where a pass fails
    after a first token was drawn, what was drawn is proposed: the failure may be due to that token,
    and a token that is dropped for what it is biases the output.
    """

    def __init__(self, engine: Engine, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        self.engine = engine
        self._draw_s = 0.0
        """What a draw takes where several are made in one call, with its pass; 0 = not known."""
        self.vocabulary = DraftVocabulary.of(engine.info.logit_token_ids)
        """The tokens that its logits are of; None = all of them."""
        self._sampler = DraftSampler(self.vocabulary, entries_max)

    def propose(
        self, requests: Sequence[DraftRequest | AutoregressiveDraft]
    ) -> list[Proposal | OutriderError | AutoregressiveDraft]:
        """See `Drafter.propose`; or why nothing could be proposed to one session; or a draft that
        has not ended, and goes on when it is given in place of its request. The engine must hold a
        proper prefix of each request's tokens, or what was run of one that goes on. A request for
        no tokens runs the prefix all the same, so that it is held when one comes. Once the time of
        a proposal that has ended is over, those that have not are left so. Raises what the engine's
        first pass raises, unless a proposal that goes on is part of it."""
        kept = [one for one in requests if isinstance(one, AutoregressiveDraft)]
        for branch in kept:
            if not self.holds(branch):  # It has lost its pages: what was drawn is proposed.
                branch.stop()
        branches = [
            one if isinstance(one, AutoregressiveDraft) else self.begin(one) for one in requests
        ]
        active = [branch for branch in branches if branch is not None]
        fresh = [branch for branch in active if branch not in kept]
        at_once = [branch for branch in fresh if _needs_no_look(branch) and branch.goes_on()]
        if not self._grow_at_once(at_once, active):
            at_once = []
        by_step = [branch for branch in kept if branch.goes_on()]
        by_step += [branch for branch in fresh if branch not in at_once]
        try:
            with torch.inference_mode():
                self._grow(by_step, active)
        except Exception:
            # Nobody gets a proposal: nobody has run any of it.
            for branch in at_once:
                length = len(branch.request.token_ids) - len(branch.unseen)
                self.engine.keep(branch.sequence_id, length)
            raise
        return [EMPTY_PROPOSAL if branch is None else _result(branch) for branch in branches]

    def holds(self, branch: AutoregressiveDraft) -> bool:
        """Whether the engine has all that was run of a branch, which has lost no pages then."""
        length = len(branch.request.token_ids) + len(branch.token_ids) - len(branch.unseen)
        return self.engine.length(branch.sequence_id) == length

    def release(self, session_id: str) -> None:
        """Forgets what is held of the session."""
        self.engine.release(session_id)

    def begin(self, request: DraftRequest) -> AutoregressiveDraft | None:
        """A proposal without tokens yet; None where the model cannot go on after the prefix."""
        info = self.engine.info
        committed = request.token_ids
        held = self.engine.length(request.session_id)
        check(held < len(committed), f"{held} slots are held of {len(committed)} committed tokens")
        # x_K is drawn from the row of the token before it and needs no slot of its own.
        num_wanted = min(request.num_draft_tokens, info.max_model_len - len(committed) + 1)
        unseen = tuple(committed[held:])
        if len(committed) > info.max_model_len or max(unseen) >= info.vocab_size:
            return None
        return AutoregressiveDraft(request, num_wanted, unseen)

    def advance(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[SequenceStep] = ()
    ) -> list[Tensor]:
        """One pass for proposals that are not whole, of any length so far: each has a token more
        then, or all of them, or an error. Returns the logits of other sequences' steps, which run
        beside them. Raises what the engine's pass raises."""
        at_once = [branch for branch in branches if not branch.token_ids and _needs_no_look(branch)]
        if not self._grow_at_once(at_once, at_once):
            at_once = []
        others = [branch for branch in branches if branch not in at_once]
        steps = [*beside, *map(_step, others)]
        if not steps:
            return []
        with torch.inference_mode():
            logits = self.engine.forward(steps)
            self._draw(others, logits[len(beside) :])
        return logits[: len(beside)]

    def _grow_at_once(
        self, branches: Sequence[AutoregressiveDraft], beside: Sequence[AutoregressiveDraft]
    ) -> bool:
        """Each branch to its length in one call of the engine, or as far as there is time for all
        of those `beside` it; False, and nothing has changed, where that cannot be done."""
        engine = self.engine
        if not branches or not isinstance(engine, MultiStepEngine):
            return False
        drawings = [
            Drawing(branch.request.sampling, branch.request.rule, branch.request.noise)
            for branch in branches
        ]
        own = [branch.deadline.num_draws(branch.num_wanted, self._draw_s) for branch in branches]
        longest = max(own)
        together = min(other.deadline.num_draws(longest, self._draw_s) for other in beside)
        counts = [min(num, together) for num in own]
        num_depths = max(counts)
        draws = DeviceDraws(drawings, num_depths, self._sampler.entries_max, self.vocabulary)
        began = time.perf_counter()
        chains = [
            MultiStep(_step(branch), num) for branch, num in zip(branches, counts, strict=True)
        ]
        drawn = engine.run_multi_step(chains, draws)
        if drawn is None:
            return False
        if all(len(branch.unseen) <= _UNSEEN_OF_A_ROUND for branch in branches):
            draw_s = (time.perf_counter() - began) / num_depths
            is_slower = 0.0 < self._draw_s < draw_s
            self._draw_s += (draw_s - self._draw_s) * (_SLOWER_SHARE if is_slower else 1.0)
        for index, (branch, num_own) in enumerate(zip(branches, own, strict=True)):
            branch.deadline.has_cut |= num_own < branch.num_wanted
            branch.num_wanted, num_draws = num_own, counts[index]
            for depth in range(num_draws):
                try:
                    token_id, q = draws.read(drawn[depth, index], index)
                except OutriderError as error:
                    self.end(branch, error)
                    break
                branch.add((token_id,), q)
        return True

    def _grow(
        self, active: list[AutoregressiveDraft], together: Sequence[AutoregressiveDraft]
    ) -> None:
        """Each branch to its length: one pass over all that lack a token, then their draws. It
        stops between two passes once the time of one of those `together` is over that has ended:
        its answer leaves with the step."""
        while active:
            try:
                logits = self.engine.forward([_step(branch) for branch in active])
            except Exception as error:
                if not any(branch.token_ids for branch in active):
                    raise
                # If the engine is beyond help, the first pass of the next step says so.
                logger.exception("%d drafts end early", len(active))
                for branch in active:
                    self.end(branch, error)
                return
            # Those whose prefix it ran are asked only now.
            going_on = [i for i, one in enumerate(active) if one.token_ids or one.goes_on()]
            active = self._draw([active[i] for i in going_on], [logits[i] for i in going_on])
            active = [branch for branch in active if branch.goes_on()]
            if any(other.deadline.is_over and other not in active for other in together):
                return

    def _draw(
        self, branches: Sequence[AutoregressiveDraft], rows: Sequence[Tensor]
    ) -> list[AutoregressiveDraft]:
        """Draws the next token of each from its row of logits [1, V]; those that got one."""
        drawn = self._sampler.draw(branches, rows)
        if len(drawn) < len(branches):
            for branch in branches:
                if branch.is_whole:
                    self._undo_last_pass(branch)
        return drawn

    def end(self, branch: AutoregressiveDraft, error: Exception) -> None:
        """Ends a draft, whose last token keeps no slot."""
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


def _needs_no_look(branch: AutoregressiveDraft) -> bool:
    request = branch.request
    if any(request.siblings) or request.allowed is not None:
        return False
    return branch.num_wanted > 0 and can_draw(request.sampling)


def _step(branch: AutoregressiveDraft) -> SequenceStep:
    num_logits = 1 if branch.num_wanted > 0 else 0
    return SequenceStep(branch.sequence_id, branch.unseen, num_logits)
