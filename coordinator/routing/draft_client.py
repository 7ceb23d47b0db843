"""One session's draft: a replica, behind whichever stream the session has, or the target itself.

This side always ends in a proposal, because a request must not suffer from a draft.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace

from coordinator.draft_length.acceptance import fitting
from coordinator.draft_length.policy import DraftedBeside, RoundLength
from coordinator.routing.drafts import (
    NOTHING_WANTED,
    Drafted,
    NextWanted,
    SessionLookup,
    Source,
    check_wanted,
)
from coordinator.routing.replica_pool import SessionRoute
from coordinator.routing.target_client import HeaderWriter, Timeouts, budget_us
from outrider.errors import (
    DeadlineExceeded,
    LinkLost,
    OutriderError,
    Overloaded,
    Unavailable,
    check,
    error_from_code,
)
from outrider.hidden_states import Features
from outrider.limits import (
    FEATURES_MAX,
    LOOK_AHEAD_BYTES_MAX,
    LOOK_AHEAD_MAX,
    NUM_DRAFT_TOKENS_MAX,
    SILENT_DRAFT_S,
    UNTIMED_DRAFT_S,
)
from outrider.messages import DraftAnswer, DraftItem, ProposalReply, Refused, Resync, VerdictReply
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.speculation.proposal import SealedProposal, require_q
from outrider.speculation.random_streams import RoundNoise
from outrider.tokens import TokenSequence

_log = logging.getLogger(__name__)


class FeatureWindow:
    """Of one session: `FEATURES_MAX` tokens at most, and which of them the draft has answered to.
    The store has none of it: after a take-over, as after a gap, it begins with what comes."""

    def __init__(self) -> None:
        self._kept: Features | None = None
        self._told = 0
        """The place before which the draft was told of all."""

    def put(self, features: Features, committed_length: int) -> None:
        """A verdict on a round that began with so many tokens has come with these; they begin with
        the last of them, or are of no use."""
        if features.first != committed_length - 1:
            _log.warning("features from %d on, behind %d tokens", features.first, committed_length)
            return
        kept = features if self._kept is None else self._kept.joined(features)
        self._kept = kept.since(kept.end - FEATURES_MAX)

    @property
    def news(self) -> Features | None:
        return None if self._kept is None else self._kept.since(self._told)

    def told(self) -> None:
        if self._kept is not None:
            self._told = self._kept.end

    def forgotten(self) -> None:
        self._told = 0


class PushedProposals:
    """Of one session, for its next round; those of earlier rounds are forgotten.

    Which one is picked depends on what was committed, and on whether it came in time: on nothing
    that another one holds."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._round = 0
        self._bytes = 0
        self._kept: dict[tuple[int, tuple[int, ...]], ProposalReply] = {}
        """By length of the committed prefix, and what is assumed behind it."""

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, reply: ProposalReply) -> None:
        """Keeps a proposal for the round behind the current one, while there is room."""
        place = (reply.base_length, reply.assumed)
        if reply.key.round != self._round + 1 or place in self._kept:
            return
        if len(self._kept) < LOOK_AHEAD_MAX and self._bytes + reply.num_bytes <= self._bytes_max:
            self._kept[place] = reply
            self._bytes += reply.num_bytes

    def expects(self, round_index: int) -> bool:
        """Whether proposals for a round that begins were kept: it follows the one before."""
        return round_index == self._round + 1

    def begin(self, round_index: int, tokens: TokenSequence) -> ProposalReply | None:
        """A round begins after these committed tokens: the proposal that assumed them, if it is
        there. All others are forgotten."""
        found = None
        if round_index == self._round + 1:
            for base_length in {length for length, _ in self._kept}:
                found = self._kept.get((base_length, tokens.since(base_length))) or found
        self._round = round_index
        self._bytes = 0
        self._kept = {}
        return found


class DraftClient:
    """One session's draft, and the local drafter that stands in while it does not answer.
    Implements `Drafts`."""

    lookup: SessionLookup | None = None

    def __init__(
        self,
        route: SessionRoute[DraftItem, DraftAnswer],
        headers: HeaderWriter,
        timeouts: Timeouts,
        fallback: SessionLookup,
        look_ahead: int = 0,
        look_ahead_bytes_max: int = LOOK_AHEAD_BYTES_MAX,
        reads_features: bool = False,
        confident: float | None = None,
        model_tokens: int = NUM_DRAFT_TOKENS_MAX,
    ) -> None:
        """`look_ahead` outcomes of each round are to be worked out before they are known; so many
        bytes of proposals are kept for them. A draft that `reads_features` is sent those of the
        target. Where the fallback expects `confident` of its tokens to be accepted, it proposes,
        and the replica is not asked; else that is asked for `model_tokens` of a round at most."""
        self._confident = confident
        self._model_tokens = model_tokens
        self._route = route
        self._mailbox = route.mailbox
        self._headers = headers
        self._timeouts = timeouts
        self._fallback = fallback
        self._look_ahead = look_ahead
        self._look_ahead_bytes_max = look_ahead_bytes_max
        self._pushed = PushedProposals(look_ahead_bytes_max)
        self._mailbox.on_pushed = self._take_pushed
        self._features = FeatureWindow() if reads_features else None
        self._asked: tuple[int, int] | None = None
        """The round whose proposal is waited for, and its K."""
        self._present = True
        self._is_rejected = False
        """Whether the replica is broken, and there was no other."""
        self._held: ProposalReply | None = None
        self._looked_for = 0
        """K of the newest item: of what is drafted ahead for the next round."""
        self._ask_again_at = 0.0
        self.cached_length = headers.session.draft.held_by(route.replica)
        """Committed tokens that the draft is thought to hold."""

    @property
    def cache_state(self) -> CacheState | None:
        return CacheState(self._route.replica, self.cached_length)

    def prefill(self, round_index: int, num_draft_tokens: int) -> None:
        """Lets the draft read the prompt while the target does, and look ahead of a round without
        a proposal, for so many tokens; waits for nothing."""
        number = self._route.number(round_index)
        self._mailbox.begin(number)
        self._looked_for = num_draft_tokens = min(num_draft_tokens, self._model_tokens)
        try:
            self._send(number, num_draft_tokens if self._look_ahead else 0, held=())
        except (LinkLost, Overloaded) as error:
            self._lose(error)
        # Messages of a session are worked off in order; where this one is lost, a resync follows.
        self.cached_length = len(self._headers.session.tokens)

    async def propose(
        self,
        round_index: int,
        num_draft_tokens: int,
        noise: RoundNoise,
        siblings: tuple[int, ...] = (),
        draft_budget_s: float = math.inf,
        is_timed: bool = True,
    ) -> Drafted:
        """See `Drafts.propose`: the fallback's where it is confident, which depends on the
        committed tokens and its history alone; else the replica's."""
        guess: SealedProposal | None = None
        if self._confident is not None:
            start = asyncio.get_running_loop().time()
            guess, score = self._fallback.guess(num_draft_tokens, noise)
            if score >= self._confident:
                self._go_on_without(round_index, num_draft_tokens, guess)
                seconds = asyncio.get_running_loop().time() - start
                return Drafted(guess, "local", seconds, num_draft_tokens)
        num_drawn = min(num_draft_tokens, self._model_tokens)
        drafted = await self._propose(
            round_index, num_drawn, noise, siblings[:num_drawn], draft_budget_s, is_timed, guess
        )
        # Of a hybrid, tokens beyond the model's count as asked for and not proposed.
        is_whole = drafted.num_asked == num_drawn
        return replace(drafted, num_asked=num_draft_tokens) if is_whole else drafted

    def _go_on_without(
        self, round_index: int, num_draft_tokens: int, proposal: SealedProposal
    ) -> None:
        """A round has its proposal, for which the replica was not asked; that may look ahead."""
        if self._look_ahead == 0 or self._is_rejected:
            return
        number = self._route.number(round_index)
        self._mailbox.begin(number)
        self._pushed.begin(number, self._headers.session.tokens)
        self._looked_for = min(num_draft_tokens, self._model_tokens)
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._tell, number, self._looked_for, proposal.token_ids)

    async def _propose(
        self,
        round_index: int,
        num_draft_tokens: int,
        noise: RoundNoise,
        siblings: tuple[int, ...],
        draft_budget_s: float,
        is_timed: bool,
        guess: SealedProposal | None,
    ) -> Drafted:
        """The replica's. The fallback's where the replica is away or silent, refuses, or had no
        time for a first token: its `guess`, if it was asked already. The replica is told how much
        time there is and decides itself, before each draw, whether to make it: a proposal that has
        been drawn is never given up for being late, as how late it is may depend on its tokens. A
        round that is not timed waits until its replica is lost, or a step of that must have
        hung."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        if (self._route.is_left or self._is_rejected) and self._move():
            self._present, self._is_rejected = True, False
        if self._is_rejected:
            proposal = self._filled_in(guess, num_draft_tokens, noise)
            return Drafted(proposal, "fallback", 0.0, num_draft_tokens)
        number = self._route.number(round_index)
        self._mailbox.begin(number)
        looked_for, self._looked_for = self._looked_for, num_draft_tokens
        was_looked_for = self._look_ahead > 0 and looked_for > 0 and self._pushed.expects(number)
        pushed = self._pushed.begin(number, self._headers.session.tokens)
        if pushed is not None and self._is_fit(pushed):
            self._held = pushed
            self.cached_length = pushed.cached_length
            proposal = pushed.proposal.cut(num_draft_tokens)
            # The verification leaves first, in the loop's next turn: nobody waits for what the
            # draft is told.
            loop.call_soon(loop.call_soon, self._tell, number, num_draft_tokens, proposal.token_ids)
            num_asked = self._drafted_for(proposal, num_draft_tokens, looked_for)
            return _drafted_by(pushed, proposal, 0.0, num_asked, ahead=True)
        if was_looked_for:
            self._headers.observer.look_ahead_missed()
        reply: ProposalReply | None = None
        is_late = False
        if self._present or self._heard_again():
            budget_s = min(draft_budget_s, self._timeouts.draft_answer_s) if is_timed else math.inf
            wait_s = (budget_s if is_timed else UNTIMED_DRAFT_S) + SILENT_DRAFT_S
            try:
                async with asyncio.timeout(wait_s):
                    reply = await self._ask(number, num_draft_tokens, siblings, start + budget_s)
            except (TimeoutError, OutriderError) as error:
                is_late = isinstance(error, TimeoutError | DeadlineExceeded)
                self._lose(error)
        else:
            self._probe(number, num_draft_tokens, is_timed)
        self._held = reply
        if reply is not None and reply.out_of_time and not reply.proposal:
            is_late = True
        elif reply is not None:
            seconds = loop.time() - start
            num_asked = self._drafted_for(reply.proposal, num_draft_tokens, looked_for)
            if reply.out_of_time:
                num_asked = reply.proposal.tree.num_depths
            return _drafted_by(reply, reply.proposal, seconds, num_asked, siblings=siblings)
        proposal = self._filled_in(guess, num_draft_tokens, noise)
        num_asked = 0 if is_late else num_draft_tokens
        return Drafted(proposal, "fallback", loop.time() - start, num_asked)

    def _filled_in(
        self, guess: SealedProposal | None, num_draft_tokens: int, noise: RoundNoise
    ) -> SealedProposal:
        """The fallback's proposal. An empty guess is one, too: it is not looked up again."""
        return self._fallback.propose(num_draft_tokens, noise) if guess is None else guess

    def next_wanted(self, length: RoundLength, room: int) -> NextWanted:
        """See `Drafts.next_wanted`: the target proposes nothing."""
        return NextWanted(features=self._features is not None)

    def hear(self, reply: VerdictReply) -> None:
        """See `Drafts.hear`: what it shows is for the draft's next question."""
        if self._features is not None and reply.features is not None:
            self._features.put(reply.features, self._headers.session.length)

    def settle(self, common_length: int) -> None:
        """See `Drafts.settle`."""
        if self._held is not None:
            self.cached_length = min(self._held.cached_length, common_length)
            self._held = None

    def reject(self) -> None:
        """See `Drafts.reject`: another replica goes on, or the fallback until there is one."""
        self._held = None
        self._pushed = PushedProposals(self._look_ahead_bytes_max)
        self._route.reject()
        self._is_rejected = not self._move()

    def close(self) -> None:
        """See `Drafts.close`."""
        self._fallback.close()
        self._route.close()

    async def _ask(
        self, number: int, num_draft_tokens: int, siblings: tuple[int, ...], draw_until: float
    ) -> ProposalReply:
        """Asks until there is a proposal, whose tokens are drawn until a loop time; the caller
        bounds the wait."""
        loop = asyncio.get_running_loop()
        while True:
            budget = budget_us(draw_until - loop.time())
            self._send(number, num_draft_tokens, siblings=siblings, budget=budget)
            answer = await self._take(number, num_draft_tokens)
            if isinstance(answer, Resync):
                self.cached_length = self._headers.held(answer)
                if self._features is not None:
                    self._features.forgotten()
                self._headers.observer.resynced("draft")
            elif isinstance(answer, Refused):
                raise error_from_code(answer.code, answer.message)
            else:
                self._check(answer, num_draft_tokens, siblings)
                if self._features is not None:
                    self._features.told()
                return answer

    async def _take(self, number: int, num_draft_tokens: int) -> DraftAnswer:
        """The answer to a round, or what was pushed for it meanwhile."""
        self._asked = (number, num_draft_tokens)
        try:
            return await self._mailbox.take(number)
        finally:
            self._asked = None

    def _take_pushed(self, reply: ProposalReply) -> None:
        """A proposal that assumes something has come: for the next round, or for the one that
        waits for just this."""
        if self._is_rejected:
            return
        if self._asked is None or reply.key.round != self._asked[0]:
            self._pushed.put(reply)
            return
        session = self._headers.session
        behind = session.tokens.since(reply.base_length)
        if reply.assumed == behind and self._is_fit(reply):
            proposal = reply.proposal.cut(self._asked[1])
            answer = replace(reply, proposal=proposal, assumed=(), base_length=session.length)
            if self._mailbox.put(answer):
                self._route.expect_repeat(reply.key)

    def _drafted_for(self, proposal: SealedProposal, num_draft_tokens: int, looked_for: int) -> int:
        """K of a proposal: one of just what was looked ahead for may have been cut short by that,
        in an answer, too, where it was still being drafted when it was asked for."""
        is_cut = self._look_ahead > 0 and len(proposal) == looked_for < num_draft_tokens
        return looked_for if is_cut else num_draft_tokens

    def _is_fit(self, pushed: ProposalReply) -> bool:
        try:
            check(not pushed.proposal.parents, "it is a tree")
            require_q(pushed.proposal, self._headers.session.record.rule)
        except OutriderError as error:
            _log.warning("a pushed proposal is of no use: %s", error)
            return False
        return True

    def _tell(self, number: int, num_draft_tokens: int, token_ids: tuple[int, ...]) -> None:
        if self._present:
            try:
                self._send(number, num_draft_tokens, held=token_ids)
            except (LinkLost, Overloaded) as error:
                self._lose(error)

    def _check(
        self, answer: ProposalReply, num_draft_tokens: int, siblings: tuple[int, ...]
    ) -> None:
        """Raises `InvariantError` or `BadRequest` for a proposal that is not what was asked for."""
        length = self._headers.session.length
        check_wanted(answer.proposal, num_draft_tokens, siblings)
        check(answer.base_length == length, f"it extends {answer.base_length}, not {length} tokens")
        require_q(answer.proposal, self._headers.session.record.rule)

    def _send(
        self,
        number: int,
        num_draft_tokens: int,
        held: tuple[int, ...] | None = None,
        siblings: tuple[int, ...] = (),
        budget: int = 0,
    ) -> None:
        base_length = min(self.cached_length, len(self._headers.session.tokens) - 1)
        head = self._headers.write("draft", number, base_length)
        news = None if self._features is None else self._features.news
        self._route.send(
            DraftItem(head, num_draft_tokens, self._look_ahead, held, siblings, news, budget)
        )

    def _lose(self, error: Exception) -> None:
        _log.debug("a round goes on without its draft: %r", error)
        if isinstance(error, Unavailable) and not isinstance(error, LinkLost):
            self._route.give_up()
        self._present = isinstance(error, Unavailable) and self._move()
        self._mailbox.heard = False
        self._rest()

    def _move(self) -> bool:
        if not self._route.move():
            return False
        self.cached_length = 0
        if self._features is not None:
            self._features.forgotten()
        self._headers.observer.moved("draft")
        return True

    def _rest(self) -> None:
        self._ask_again_at = asyncio.get_running_loop().time() + self._timeouts.draft_retry_s

    def _heard_again(self) -> bool:
        self._present = self._mailbox.heard
        return self._present

    def _probe(self, number: int, num_draft_tokens: int, is_timed: bool) -> None:
        """Asks an absent draft now and then without waiting; an answer makes it present."""
        if asyncio.get_running_loop().time() < self._ask_again_at:
            return
        self._rest()
        try:
            budget = budget_us(self._timeouts.draft_answer_s if is_timed else math.inf)
            self._send(number, num_draft_tokens, budget=budget)
        except (LinkLost, Overloaded):
            return  # Still away; the next probe comes after the rest.


def _drafted_by(
    reply: ProposalReply,
    proposal: SealedProposal,
    seconds: float,
    num_asked: int,
    *,
    ahead: bool = False,
    siblings: tuple[int, ...] = (),
) -> Drafted:
    """What a replica's answer brings, of which `proposal` is what the round asked for."""
    return Drafted(
        proposal, "replica", seconds, num_asked, reply.queue_ms, reply.compute_ms, reply.work_ms,
        ahead=ahead, siblings=siblings,
    )  # fmt: skip


class SelfDraftClient:
    """Implements `Drafts`. The target is asked for a round's proposal with the round before, for as
    many tokens as that round will ask for; where the completion ends sooner, it is cut. Where
    nothing has come, as behind rounds that the target ran ahead, the fallback proposes, and so it
    does where it is confident."""

    lookup: SessionLookup | None = None

    def __init__(
        self,
        session: Session,
        fallback: SessionLookup,
        confident: float | None,
        draft_s: float = math.inf,
        model_tokens: int = NUM_DRAFT_TOKENS_MAX,
    ) -> None:
        """The fallback goes before the target if it expects `confident` of its tokens to be
        accepted; None = never. The target has `draft_s` seconds to draft a proposal of
        `model_tokens` tokens at most."""
        self._model_tokens = model_tokens
        self._budget_us = budget_us(draft_s)
        self._session = session
        self._fallback = fallback
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
        return None

    def prefill(self, round_index: int, num_draft_tokens: int) -> None:
        """See `Drafts.prefill`: the target has read the prompt when it drafts."""

    async def propose(
        self,
        round_index: int,
        num_draft_tokens: int,
        noise: RoundNoise,
        siblings: tuple[int, ...] = (),
        draft_budget_s: float = math.inf,
        is_timed: bool = True,
    ) -> Drafted:
        """See `Drafts.propose`. It waits for nothing. Whose proposal it is depends on what the
        fallback may look at, and not on what the target has proposed."""
        found, self._next = self._next, None
        if self._next_length != self._session.length:
            found = None  # It extends something else.
        if found is None or self._confident is not None:
            proposal, score = self._fallback.guess(num_draft_tokens, noise)
            is_sure = self._confident is not None and score >= self._confident
            if found is None or is_sure:
                # Of a guess that only fills in nothing is learned.
                num_asked = num_draft_tokens if is_sure else 0
                was_wanted = self._wanted.num_draft_tokens > 0
                source: Source = "local" if is_sure or not was_wanted else "fallback"
                return Drafted(proposal, source, 0.0, num_asked)
        num_drafted = found.tree.num_depths if self._next_is_cut else self._next_max
        num_asked = min(num_drafted, num_draft_tokens)
        proposal = found.cut(num_draft_tokens)
        beside = DraftedBeside(found.tree.num_depths, self._next_s, self._next_work_s)
        siblings = self._wanted.siblings[:num_asked]
        return Drafted(proposal, "local", 0.0, num_asked, siblings=siblings, beside=beside)

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
        """See `Drafts.reject`: the fallback goes on."""
        self._is_rejected, self._next, self._wanted = True, None, NOTHING_WANTED

    def close(self) -> None:
        """See `Drafts.close`."""
        self._fallback.close()
