"""The two sides of a session: its target and its draft, each behind one replica's stream.

A side knows how many of the session's tokens its replica holds, sends what is missing, and asks
again when an answer does not come. The target's side ends in a verdict or an error; the draft's
side always ends in a proposal, because a request must not suffer from a draft.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, replace
from typing import Final

from outrider.errors import (
    BadRequest,
    DeadlineExceeded,
    InvariantError,
    LinkLost,
    OutriderError,
    Overloaded,
    Unavailable,
    check,
    error_from_code,
)
from outrider.limits import LOOK_AHEAD_BYTES_MAX
from outrider.messages import (
    DraftAnswer,
    DraftItem,
    ProposalReply,
    Refused,
    Resync,
    RoundHead,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import SealedProposal, require_q
from outrider.speculation.sampling import SamplingParams
from outrider.telemetry.observer import SILENT, RequestObserver, Side

from .drafts import NOTHING_WANTED, Drafted, NextWanted, StandIn, check_wanted
from .feature_window import FeatureWindow
from .lengths import RoundLength
from .look_ahead import PushedProposals
from .mailbox import PostOffice

_log = logging.getLogger(__name__)


ANSWER_WAIT_GROWTH_MAX: Final = 8
"""How much longer than the first wait for a verdict the later ones get."""
RETRY_S_MAX: Final = 1.0
"""Longest rest between two tries to reach a target: one that comes back is soon found."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a side waits, and for how long it tries. All in seconds."""

    target_answer_s: float
    """A target's answer not here by then is asked for again; doubled at each repetition."""
    target_gone_s: float
    """A target that cannot be reached for so long ends the request with `Unavailable`."""
    target_retry_s: float
    """First rest before a target is asked again; doubled at each repetition."""
    draft_answer_s: float
    """A draft that takes longer is not waited for until it has answered something."""
    draft_retry_s: float
    """Rest between two questions to an absent draft."""


class HeadWriter:
    """Writes the head of each message of one session."""

    def __init__(
        self,
        session: Session,
        sampling: SamplingParams,
        deadline: float,
        observer: RequestObserver = SILENT,
    ) -> None:
        self.session = session
        self.observer = observer
        self.sampling = sampling
        self._sampling_hash = sampling.hash()
        self._deadline = deadline

    def write(self, side: Side, round_index: int, base_length: int) -> RoundHead:
        """The head of a message to a side that states the first `base_length` committed tokens."""
        session = self.session
        left = self._deadline - asyncio.get_running_loop().time()
        return RoundHead(
            session_id=session.session_id,
            tenant=session.identity.tenant,
            epoch=session.epoch,
            round=round_index,
            base_length=base_length,
            prefix_digest=session.tokens.digest(base_length),
            append=session.tokens.since(base_length),
            prompt_length=session.prompt_length,
            rule=session.identity.rule,
            seed=session.identity.seed,
            sampling=self.sampling,
            sampling_hash=self._sampling_hash,
            deadline_ms=max(1, math.ceil(left * 1e3)),
            traceparent=self.observer.context(side),
        )

    def held(self, resync: Resync) -> int:
        """How many tokens a replica that asked for a resync can keep."""
        tokens = self.session.tokens
        known = tokens.holds(resync.cached_length, resync.prefix_digest)
        return min(resync.cached_length, len(tokens) - 1) if known else 0


class TargetSide:
    """One session's target."""

    def __init__(
        self, office: PostOffice[VerifyItem, VerifyAnswer], heads: HeadWriter, patience: Patience
    ) -> None:
        self._office = office
        self._heads = heads
        self._patience = patience
        self._session_id = heads.session.session_id
        self._epoch = heads.session.epoch
        self._mailbox = office.open(self._session_id, self._epoch)
        self._asked_until = -1
        """The last round that the target will answer without being asked again."""
        self.cached_length = 0
        """Committed tokens that the target is thought to hold."""

    @property
    def cache_state(self) -> CacheState:
        """What the store is told of this side."""
        return CacheState(self._office.replica, self.cached_length)

    async def verify(
        self,
        round_index: int,
        proposal: SealedProposal,
        run_ahead: int,
        num_logprobs: int | None,
        wanted: NextWanted = NOTHING_WANTED,
    ) -> VerdictReply:
        """The verdict of a round, and what is `wanted` of the next one where the target
        drafts itself. Asks again until there is one; raises what the target refuses with, and
        `Unavailable` once it cannot be reached for `target_gone_s`.

        Where the target cannot read the draft's q, the same tokens are verified as one-hot draws,
        which is exact for whatever tokens: none is dropped for what a draft says of it."""
        loop = asyncio.get_running_loop()
        if self._mailbox.begin(round_index):
            self._asked_until = -1
        unreachable_since: float | None = None
        wait_s, retry_s = self._patience.target_answer_s, self._patience.target_retry_s
        ask = len(proposal) > 0 or self._must_ask(round_index, run_ahead)
        while True:
            try:
                if ask:
                    self._send(round_index, proposal, run_ahead, num_logprobs, wanted)
                async with asyncio.timeout(wait_s):
                    answer = await self._mailbox.take(round_index)
            except TimeoutError:
                unreachable_since = None  # The stream has stood all the while.
                wait_s = min(2 * wait_s, ANSWER_WAIT_GROWTH_MAX * self._patience.target_answer_s)
            except (LinkLost, Overloaded) as error:
                now = loop.time()
                unreachable_since = now if unreachable_since is None else unreachable_since
                if now - unreachable_since >= self._patience.target_gone_s:
                    raise Unavailable(f"no target can be reached: {error.message}") from error
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_S_MAX)
            else:
                unreachable_since = None
                if isinstance(answer, VerdictReply):
                    return self._checked(answer, proposal)
                if isinstance(answer, Refused) and _is_about_q(answer):
                    bare = proposal.without_q(self._heads.session.identity.rule)
                    ask = proposal != bare  # Else this is once more about what was sent before.
                    if ask:
                        _log.warning("a draft's q cannot be read: %s", answer.message)
                    proposal = bare
                    continue
                await self._put_right(answer, retry_s)
                if isinstance(answer, Refused):
                    retry_s = min(2 * retry_s, RETRY_S_MAX)
            ask = True

    def settle(self, reply: VerdictReply, common_length: int) -> None:
        """Notes an outcome: the first `common_length` tokens of what was verified are committed."""
        self.cached_length = min(reply.cached_length, common_length)

    def close(self) -> None:
        """Ends the session on this side."""
        self._office.close(self._session_id, self._epoch)

    def _must_ask(self, round_index: int, run_ahead: int) -> bool:
        """Whether the target has to hear of a round without a proposal: not while it decodes
        ahead on its own and more than half of what it may do is left."""
        left = self._asked_until - round_index
        return left < 0 or left < run_ahead // 2

    def _send(
        self,
        round_index: int,
        proposal: SealedProposal,
        run_ahead: int,
        num_logprobs: int | None,
        wanted: NextWanted,
    ) -> None:
        base_length = min(self.cached_length, len(self._heads.session.tokens) - 1)
        head = self._heads.write("target", round_index, base_length)
        self._office.link.send(
            VerifyItem(
                head,
                proposal,
                run_ahead,
                num_logprobs,
                wanted.num_draft_tokens,
                wanted.siblings,
                wanted.features,
            )
        )
        self._asked_until = round_index + run_ahead

    def _checked(self, reply: VerdictReply, proposal: SealedProposal) -> VerdictReply:
        num_draft_tokens = len(proposal)
        check(
            len(reply.verdict.accept_probability) == num_draft_tokens
            and len(reply.verdict.correction) == num_draft_tokens + 1,
            f"a verdict for {len(reply.verdict.accept_probability)} draft tokens, "
            f"{num_draft_tokens} were proposed",
        )
        return reply

    async def _put_right(self, answer: Resync | Refused, retry_s: float) -> None:
        if isinstance(answer, Resync):
            self.cached_length = self._heads.held(answer)
            self._heads.observer.resynced("target")
            return
        error = error_from_code(answer.code, answer.message)
        if isinstance(error, BadRequest):
            # The user's fields were checked before: what is wrong with a message is our doing.
            raise InvariantError(f"the target refuses a message: {error.message}")
        # A deadline that has passed over there is about to pass here.
        if not isinstance(error, Overloaded | Unavailable | DeadlineExceeded):
            raise error
        await asyncio.sleep(retry_s)


def _is_about_q(answer: Refused) -> bool:
    error = error_from_code(answer.code, answer.message)
    return isinstance(error, BadRequest) and error.field == "proposal.q"


class DraftSide:
    """One session's draft, and the local drafter that stands in while it does not answer.
    Implements `Drafts`."""

    def __init__(
        self,
        office: PostOffice[DraftItem, DraftAnswer],
        heads: HeadWriter,
        patience: Patience,
        stand_in: StandIn,
        look_ahead: int = 0,
        look_ahead_bytes_max: int = LOOK_AHEAD_BYTES_MAX,
        reads_features: bool = False,
    ) -> None:
        """`look_ahead` outcomes of each round are to be worked out before they are known; so many
        bytes of proposals are kept for them. A draft that `reads_features` is sent those of the
        target."""
        self._office = office
        self._heads = heads
        self._patience = patience
        self._stand_in = stand_in
        self._session_id = heads.session.session_id
        self._epoch = heads.session.epoch
        self._mailbox = office.open(self._session_id, self._epoch)
        self._look_ahead = look_ahead
        self._pushed = PushedProposals(look_ahead_bytes_max)
        self._mailbox.on_pushed = self._take_pushed
        self._features = FeatureWindow() if reads_features else None
        self._asked: tuple[int, int] | None = None
        """The round whose proposal is waited for, and its K."""
        self._present = True
        self._held: ProposalReply | None = None
        self._looked_for = 0
        """K of the newest item: of what is drafted ahead for the next round."""
        self._ask_again_at = 0.0
        self.cached_length = 0
        """Committed tokens that the draft is thought to hold."""

    @property
    def cache_state(self) -> CacheState | None:
        """See `Drafts.cache_state`."""
        return CacheState(self._office.replica, self.cached_length)

    def prefill(self, round_index: int, num_draft_tokens: int) -> None:
        """Lets the draft read the prompt while the target does, and look ahead of a round without
        a proposal, for so many tokens; waits for nothing."""
        self._mailbox.begin(round_index)
        self._looked_for = num_draft_tokens
        try:
            self._send(round_index, num_draft_tokens if self._look_ahead else 0, held=())
        except (LinkLost, Overloaded) as error:
            self._lose(error)
        # Messages of a session are worked off in order; where this one is lost, a resync follows.
        self.cached_length = len(self._heads.session.tokens)

    async def propose(
        self,
        round_index: int,
        num_draft_tokens: int,
        noise: RoundNoise,
        siblings: tuple[int, ...] = (),
    ) -> Drafted:
        """See `Drafts.propose`: the replica's, or the stand-in's where the replica is away, late or
        refuses."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        self._mailbox.begin(round_index)
        looked_for, self._looked_for = self._looked_for, num_draft_tokens
        pushed = self._pushed.begin(round_index, self._heads.session.tokens)
        if pushed is not None and self._is_fit(pushed):
            self._held = pushed
            self.cached_length = pushed.cached_length
            proposal = pushed.proposal.cut(num_draft_tokens)
            # The verification leaves first, in the loop's next turn: nobody waits for what the
            # draft is told.
            loop.call_soon(
                loop.call_soon, self._tell, round_index, num_draft_tokens, proposal.token_ids
            )
            num_asked = self._drafted_for(proposal, num_draft_tokens, looked_for)
            queue_ms, compute_ms = pushed.queue_ms, pushed.compute_ms
            return Drafted(proposal, True, 0.0, num_asked, queue_ms, compute_ms, ahead=True)
        reply: ProposalReply | None = None
        if self._present or self._heard_again():
            try:
                async with asyncio.timeout(self._patience.draft_answer_s):
                    reply = await self._ask(round_index, num_draft_tokens, siblings)
            except (TimeoutError, OutriderError) as error:
                self._lose(error)
        else:
            self._probe(round_index, num_draft_tokens)
        self._held = reply
        if reply is not None:
            seconds = loop.time() - start
            num_asked = self._drafted_for(reply.proposal, num_draft_tokens, looked_for)
            queue_ms, compute_ms = reply.queue_ms, reply.compute_ms
            return Drafted(
                reply.proposal, True, seconds, num_asked, queue_ms, compute_ms, siblings=siblings
            )
        proposal = self._stand_in.propose(num_draft_tokens, noise)
        return Drafted(proposal, False, loop.time() - start, num_draft_tokens)

    def next_wanted(self, length: RoundLength, room: int) -> NextWanted:
        """See `Drafts.next_wanted`: the target proposes nothing."""
        return NextWanted(features=self._features is not None)

    def hear(self, reply: VerdictReply) -> None:
        """See `Drafts.hear`: what it shows is for the draft's next question."""
        if self._features is not None and reply.features is not None:
            self._features.put(reply.features, self._heads.session.length)

    def settle(self, common_length: int) -> None:
        """See `Drafts.settle`."""
        if self._held is not None:
            self.cached_length = min(self._held.cached_length, common_length)
            self._held = None

    def close(self) -> None:
        """See `Drafts.close`."""
        self._stand_in.close()
        self._office.close(self._session_id, self._epoch)

    async def _ask(
        self, round_index: int, num_draft_tokens: int, siblings: tuple[int, ...]
    ) -> ProposalReply:
        """Asks until there is a proposal; the caller bounds the time."""
        while True:
            self._send(round_index, num_draft_tokens, siblings=siblings)
            answer = await self._take(round_index, num_draft_tokens)
            if isinstance(answer, Resync):
                self.cached_length = self._heads.held(answer)
                if self._features is not None:
                    self._features.forgotten()
                self._heads.observer.resynced("draft")
            elif isinstance(answer, Refused):
                raise error_from_code(answer.code, answer.message)
            else:
                self._check(answer, num_draft_tokens, siblings)
                if self._features is not None:
                    self._features.told()
                return answer

    async def _take(self, round_index: int, num_draft_tokens: int) -> DraftAnswer:
        """The answer to a round, or what was pushed for it meanwhile."""
        self._asked = (round_index, num_draft_tokens)
        try:
            return await self._mailbox.take(round_index)
        finally:
            self._asked = None

    def _take_pushed(self, reply: ProposalReply) -> None:
        """A proposal that assumes something has come: for the next round, or for the one that
        waits for just this."""
        if self._asked is None or reply.key.round != self._asked[0]:
            self._pushed.put(reply)
            return
        session = self._heads.session
        behind = session.tokens.since(reply.base_length)
        if reply.assumed == behind and self._is_fit(reply):
            proposal = reply.proposal.cut(self._asked[1])
            self._mailbox.put(
                replace(reply, proposal=proposal, assumed=(), base_length=session.length)
            )

    def _drafted_for(self, proposal: SealedProposal, num_draft_tokens: int, looked_for: int) -> int:
        """K of a proposal: one of just what was looked ahead for may have been cut short by that,
        in an answer, too, where it was still being drafted when it was asked for."""
        is_cut = self._look_ahead > 0 and len(proposal) == looked_for < num_draft_tokens
        return looked_for if is_cut else num_draft_tokens

    def _is_fit(self, pushed: ProposalReply) -> bool:
        """Whether it can be used at all."""
        try:
            check(not pushed.proposal.parents, "it is a tree")
            require_q(pushed.proposal, self._heads.session.identity.rule)
        except OutriderError as error:
            _log.warning("a pushed proposal is of no use: %s", error)
            return False
        return True

    def _tell(self, round_index: int, num_draft_tokens: int, token_ids: tuple[int, ...]) -> None:
        """Tells the draft which of its proposals has come true."""
        if self._present:
            try:
                self._send(round_index, num_draft_tokens, held=token_ids)
            except (LinkLost, Overloaded) as error:
                self._lose(error)

    def _check(
        self, answer: ProposalReply, num_draft_tokens: int, siblings: tuple[int, ...]
    ) -> None:
        """Raises `InvariantError` or `BadRequest` for a proposal that is not what was asked for."""
        length = self._heads.session.length
        check_wanted(answer.proposal, num_draft_tokens, siblings)
        check(answer.base_length == length, f"it extends {answer.base_length}, not {length} tokens")
        require_q(answer.proposal, self._heads.session.identity.rule)

    def _send(
        self,
        round_index: int,
        num_draft_tokens: int,
        held: tuple[int, ...] | None = None,
        siblings: tuple[int, ...] = (),
    ) -> None:
        base_length = min(self.cached_length, len(self._heads.session.tokens) - 1)
        head = self._heads.write("draft", round_index, base_length)
        news = None if self._features is None else self._features.news
        self._office.link.send(
            DraftItem(head, num_draft_tokens, self._look_ahead, held, siblings, news)
        )

    def _lose(self, error: Exception) -> None:
        _log.info("session %s goes on without its draft: %r", self._session_id, error)
        self._present = False
        self._mailbox.heard = False
        self._rest()

    def _rest(self) -> None:
        self._ask_again_at = asyncio.get_running_loop().time() + self._patience.draft_retry_s

    def _heard_again(self) -> bool:
        """Whether an absent draft has answered anything since it was lost."""
        self._present = self._mailbox.heard
        return self._present

    def _probe(self, round_index: int, num_draft_tokens: int) -> None:
        """Asks an absent draft now and then without waiting; an answer makes it present."""
        if asyncio.get_running_loop().time() < self._ask_again_at:
            return
        self._rest()
        try:
            self._send(round_index, num_draft_tokens)
        except (LinkLost, Overloaded):
            return  # Still away; the next probe comes after the rest.
