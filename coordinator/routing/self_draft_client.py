"""The proposals of a target that drafts itself: each comes with the verdict before it."""

from __future__ import annotations

import logging
import math

from coordinator.draft_length.policy import DraftedBeside, RoundLength
from coordinator.draft_length.siblings import fitting
from outrider.errors import OutriderError
from outrider.limits import NUM_DRAFT_TOKENS_MAX
from outrider.messages import VerdictReply
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.speculation.proposal import SealedProposal, require_q
from outrider.speculation.random_streams import RoundNoise

from .drafts import NOTHING_WANTED, Drafted, NextWanted, SessionLookup, check_wanted
from .request_header import budget_us

_log = logging.getLogger(__name__)


class SelfDraftClient:
    """Implements `Drafts`. The target is asked for a round's proposal with the round before, for as
    many tokens as that round will ask for; where the completion ends sooner, it is cut. Where
    nothing has come, as behind rounds that the target ran ahead, the stand-in proposes, and so it
    does where it is confident."""

    def __init__(
        self,
        session: Session,
        stand_in: SessionLookup,
        confident: float | None,
        draft_s: float = math.inf,
        model_tokens: int = NUM_DRAFT_TOKENS_MAX,
    ) -> None:
        """The stand-in goes before the target if it expects `confident` of its tokens to be
        accepted; None = never. The target has `draft_s` seconds to draft a proposal of
        `model_tokens` tokens at most."""
        self._model_tokens = model_tokens
        self._budget_us = budget_us(draft_s)
        self._session = session
        self._stand_in = stand_in
        self._confident = confident
        self._wanted = NOTHING_WANTED
        """Of the newest verdict's proposal ..."""
        self._next_max = 0
        """... and the K of its round, which may be longer."""
        self._is_rejected = False
        self._next: SealedProposal | None = None
        """What it brought ..."""
        self._next_length = 0
        """... and the committed tokens that this extends ..."""
        self._next_s = self._next_work_s = 0.0
        """... and what it took."""
        self._next_is_cut = False
        """Whether its time ran out."""

    @property
    def cache_state(self) -> CacheState | None:
        """See `Drafts.cache_state`."""
        return None

    def prefill(self, round_index: int, num_draft_tokens: int) -> None:
        """See `Drafts.prefill`: the target has read the prompt when it drafts."""

    async def propose(
        self,
        round_index: int,
        num_draft_tokens: int,
        noise: RoundNoise,
        siblings: tuple[int, ...] = (),
        patience_s: float = math.inf,
        is_timed: bool = True,
    ) -> Drafted:
        """See `Drafts.propose`. It waits for nothing. Whose proposal it is depends on what the
        stand-in may look at, and not on what the target has proposed."""
        found, self._next = self._next, None
        if self._next_length != self._session.length:
            found = None  # It extends something else.
        if found is None or self._confident is not None:
            proposal, score = self._stand_in.guess(num_draft_tokens, noise)
            is_sure = self._confident is not None and score >= self._confident
            if found is None or is_sure:
                # Of a guess that only fills in nothing is learned.
                num_asked = num_draft_tokens if is_sure else 0
                was_wanted = self._wanted.num_draft_tokens > 0
                return Drafted(proposal, is_sure or not was_wanted, 0.0, num_asked)
        num_drafted = found.tree.num_depths if self._next_is_cut else self._next_max
        num_asked = min(num_drafted, num_draft_tokens)
        proposal = found.cut(num_draft_tokens)
        beside = DraftedBeside(found.tree.num_depths, self._next_s, self._next_work_s)
        siblings = self._wanted.siblings[:num_asked]
        return Drafted(proposal, True, 0.0, num_asked, siblings=siblings, beside=beside)

    def next_wanted(self, length: RoundLength, room: int) -> NextWanted:
        """See `Drafts.next_wanted`."""
        if self._is_rejected:
            return NOTHING_WANTED
        self._next_max = length.next_max
        num_wanted = min(length.next_max, self._model_tokens)
        siblings = fitting(length.next_siblings[:num_wanted], room - num_wanted)
        budget = self._budget_us if length.is_timed else 0
        self._wanted = NextWanted(num_wanted, siblings, budget_us=budget)
        return self._wanted

    def hear(self, reply: VerdictReply) -> None:
        """See `Drafts.hear`. What cannot be used is left out."""
        self._next = None
        proposal = reply.next_proposal
        if not proposal or self._is_rejected:
            return
        try:
            self._next_length = reply.next_base_length
            self._next_s = reply.next_draft_ms / 1e3
            self._next_work_s = reply.next_work_ms / 1e3
            self._next_is_cut = reply.next_out_of_time
            check_wanted(proposal, self._wanted.num_draft_tokens, self._wanted.siblings)
            require_q(proposal, self._session.record.rule)
        except OutriderError as error:
            _log.warning("a target's own proposal is of no use: %s", error)
            return
        self._next = proposal

    def settle(self, common_length: int) -> None:
        """See `Drafts.settle`: the target keeps its own books."""

    def reject(self) -> None:
        """See `Drafts.reject`: the stand-in goes on."""
        self._is_rejected, self._next, self._wanted = True, None, NOTHING_WANTED

    def close(self) -> None:
        """See `Drafts.close`."""
        self._stand_in.close()
