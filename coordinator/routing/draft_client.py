"""Gets proposals from a draft replica (`DraftClient`), or from a head in the target
(`SelfDraftClient`). If these have no proposal, a look-up (`suffix` or `ngram`) proposes. A session
that begins before any draft has joined has no proposals, and later drafts do not change this."""

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import replace
from typing import Generic

from coordinator.draft_length.policy import DraftedBeside, RoundLength
from coordinator.routing.drafts import (
    NO_NEXT_REQUEST,
    Drafted,
    Drafts,
    LookupDrafts,
    NextRoundRequest,
    NoDrafts,
    SessionLookup,
)
from coordinator.routing.replica_pool import DraftPool, SessionContext, SessionRoute
from outrider import errors, limits
from outrider.config.deployment import CoordinatorConfig
from outrider.drafters.features import Features
from outrider.drafters.lookup import LookupDrafter
from outrider.foundation.tokens import TokenSequence
from outrider.interfaces.messages import (
    Answer,
    DraftAnswer,
    DraftItem,
    Item,
    ProposalReply,
    Refused,
    Resync,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.sessions.store import CacheState
from outrider.speculation.proposal import EncodedProposal, require_q
from outrider.speculation.random_streams import RoundNoise

_log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a draft that failed is asked again."""
_USELESS_FEEDS_MAX = 2
"""A *feed* is a message that brings features to the draft. If this many feeds in a row do not
lengthen the draft's cached prefix, the session sends nothing to the draft for `RETRY_S`."""


class PushedProposals:
    """Proposals that the draft drafts ahead for the next round, one for each predicted outcome of
    this round. If the proposal for the actual outcome has arrived, the next round uses it."""

    def __init__(self) -> None:
        self._round = 0
        self._bytes = 0
        self._kept: dict[tuple[int, tuple[int, ...]], ProposalReply] = {}
        """(Length of the committed prefix, tokens assumed to follow the prefix) -> proposal."""

    def put(self, reply: ProposalReply) -> None:
        """Keeps a proposal for the next round if the limits on look-ahead allow one more."""
        place = (reply.base_length, reply.assumed)
        if reply.key.round != self._round + 1 or place in self._kept:
            return
        num_bytes = self._bytes + reply.num_bytes
        if len(self._kept) < limits.LOOK_AHEAD_MAX and num_bytes <= limits.LOOK_AHEAD_BYTES_MAX:
            self._kept[place], self._bytes = reply, num_bytes

    def expects(self, number: int) -> bool:
        return number == self._round + 1

    def begin(self, number: int, tokens: TokenSequence) -> ProposalReply | None:
        """Begins round `number`. Returns the proposal that extends `tokens`, if any, and drops the
        others."""
        reply = None
        if self.expects(number):
            for base_length in {length for length, _ in self._kept}:
                reply = self._kept.get((base_length, tokens.since(base_length))) or reply
        self._round, self._bytes, self._kept = number, 0, {}
        return reply


def budget_us(seconds: float) -> int:
    """Converts a time limit to microseconds, for a message. Infinity becomes 0."""
    if seconds == math.inf:
        return 0
    return max(1, min(round(seconds * 1e6), limits.DRAFT_DEADLINE_MS_MAX * 1000))


class _ModelDrafts(Drafts, Generic[Item, Answer]):
    """Base class of both clients. In a hybrid drafter, a confident look-up proposes instead of the
    model. The confidence depends only on committed tokens, of this session and earlier sessions."""

    def __init__(
        self, route: SessionRoute[Item, Answer], lookup: LookupDrafter, config: CoordinatorConfig
    ) -> None:
        self._route = route
        self._session = route.context.session
        self._lookup = SessionLookup(lookup, route.context)
        self.max_tokens = route.context.parameters.num_draft_tokens
        hybrid = config.lookup
        self._is_hybrid = hybrid.drafter.lookup is not None
        self._confident = hybrid.hybrid_min_score if self._is_hybrid else math.inf
        """In a hybrid, the look-up proposes if it expects at least this many accepted tokens."""
        self._model_tokens = (
            hybrid.hybrid_model_tokens if self._is_hybrid else limits.NUM_DRAFT_TOKENS_MAX
        )
        """Largest number of draft tokens that a round requests from the model."""
        of_request_ms = route.context.parameters.draft_deadline_ms or config.draft_timeout_ms
        self._draft_s = min(of_request_ms, config.draft_timeout_ms) / 1e3
        """Time limit of drafting, at which the drafter answers with the tokens drawn so far."""

    @property
    def on_trial(self) -> bool | None:
        return self._route.on_trial

    def close(self) -> None:
        self._lookup.close()

    def _check(self, proposal: EncodedProposal, num_draft_tokens: int) -> None:
        if len(proposal) > num_draft_tokens:
            raise errors.InvariantError(
                f"the proposal has {len(proposal)} tokens; {num_draft_tokens} are allowed"
            )
        require_q(proposal, self._session.record.rule)

    def _is_fit(
        self, proposal: EncodedProposal, num_draft_tokens: int = limits.NUM_DRAFT_TOKENS_MAX
    ) -> bool:
        try:
            self._check(proposal, num_draft_tokens)
        except errors.OutriderError as error:
            _log.warning("a proposal cannot be used: %s", error)
            return False
        return True


class DraftClient(_ModelDrafts[DraftItem, DraftAnswer]):
    """Asks a draft replica for proposals. While the replica does not answer, a look-up proposes."""

    def __init__(
        self,
        pool: DraftPool,
        context: SessionContext,
        lookup: LookupDrafter,
        config: CoordinatorConfig,
    ) -> None:
        super().__init__(SessionRoute(pool, context), lookup, config)
        self._clock = asyncio.get_running_loop().time
        self._observer = context.observer
        self._reads_features = pool.first is not None and pool.first.reads_features
        self._features: Features | None = None
        """Hidden states that came with the newest verdict, until they are sent to the draft."""
        self._held_before = 0
        """Number of tokens that the draft held before the newest feed, as far as known."""
        self._num_useless_feeds = 0
        """Number of consecutive feeds that did not lengthen the draft's cached prefix."""
        self._is_behind = False
        """Whether the draft lacks features, so that it cannot propose in this round."""
        self._look_ahead = 0
        """Largest number of outcomes of a round for which the draft drafts ahead."""
        if not (self._reads_features or context.parameters.constraint):
            self._look_ahead = config.look_ahead or 0
        self._pushed = PushedProposals()
        self._route.on_pushed = lambda reply: self._pushed.put(reply)
        self._is_late = False
        """Whether this round's proposal did not arrive within its time limit."""
        self._reply: ProposalReply | None = None
        """The reply with this round's proposal; None = no proposal."""
        self._num_ahead = 0
        """K of the newest message to the draft. Each proposal drafted ahead has up to K tokens."""
        self._retry_at = 0.0
        """Earliest time of the next message to a draft that failed, or of the next feed."""

    @property
    def cache_state(self) -> CacheState | None:
        return self._route.cache_state

    def prefill(self, num_draft_tokens: int) -> None:
        if self._reads_features:
            return  # The draft needs features of the prompt, which the first verdict brings.
        number = self._route.begin(0)
        self._num_ahead = min(num_draft_tokens, self._model_tokens)
        self._try_send(number, self._num_ahead if self._look_ahead else 0, ())
        # The draft handles a session's messages in order, so it prefills before it reads the next
        # message. If this prefill is lost, the draft answers the next message with `Resync`.
        self._route.cached_length = self._session.length

    async def propose(self, round_index: int, length: RoundLength, noise: RoundNoise) -> Drafted:
        start = self._clock()
        num_wanted, guess = length.num_draft_tokens, None
        if not length.is_timed and self._look_ahead > 0:
            # Times decide how much is drafted ahead, and must not shorten an untimed proposal.
            self._look_ahead, self._pushed = 0, PushedProposals()
        self._read_feed_answer()
        if self._is_hybrid:
            guess, score = self._lookup.propose(num_wanted, noise)
            if score >= self._confident:
                if self._features is not None:
                    self._feed(self._route.begin(round_index))
                elif self._look_ahead > 0:
                    number = self._route.begin(round_index)
                    self._pushed.begin(number, self._session.tokens)
                    self._num_ahead = min(num_wanted, self._model_tokens)
                    self._send_soon(number, self._num_ahead, guess)
                return Drafted(guess, "local", self._clock() - start, num_wanted)
        num_drawn = min(num_wanted, self._model_tokens)
        if num_drawn < num_wanted:
            length = replace(length, num_draft_tokens=num_drawn)
        drafted = None
        # When features arrive depends on times, which must not shorten an untimed proposal.
        self._is_behind = self._reads_features and not length.is_timed
        if not self._is_behind:
            drafted = await self._by_replica(round_index, length, start)
        if drafted is None:
            if guess is None:
                guess, _ = self._lookup.propose(num_wanted, noise)
            if self._is_behind:
                return Drafted(guess, "fallback", 0.0, 0)
            num_asked = 0 if self._is_late else num_wanted
            return Drafted(guess, "fallback", self._clock() - start, num_asked)
        if num_drawn < num_wanted and drafted.num_asked == num_drawn:
            # Length control needs the round's K, although the model was asked for fewer tokens.
            return replace(drafted, num_asked=num_wanted)
        return drafted

    async def _by_replica(
        self, round_index: int, length: RoundLength, start: float
    ) -> Drafted | None:
        """Returns the replica's proposal; None if the replica cannot be reached, does not answer,
        refuses, lacks features, or had no time for a first token.

        The replica itself stops drawing at the time limit. The coordinator never drops a late
        proposal. Delays may depend on the drawn tokens, so dropping would bias the output."""
        num_wanted = length.num_draft_tokens
        self._is_late = False
        if self._route.is_left:
            self._move()
        number = self._route.begin(round_index)
        num_ahead, self._num_ahead = self._num_ahead, num_wanted
        was_drafted_ahead = (
            self._look_ahead > 0
            and num_ahead > 0
            and not self._route.is_left
            and self._pushed.expects(number)
        )
        pushed = self._pushed.begin(number, self._session.tokens)
        is_ahead = pushed is not None and self._is_fit(pushed.proposal)
        if is_ahead:
            self._reply = pushed
        else:
            if was_drafted_ahead:
                self._observer.count("look_ahead_misses")
            self._reply = await self._ask(number, length, start)
        if self._reply is None or self._is_late:
            return None
        reply, proposal, seconds = self._reply, self._reply.proposal, 0.0
        if is_ahead:
            self._route.cached_length = reply.cached_length
            proposal = proposal.cut(num_wanted)
            self._send_soon(number, num_wanted, proposal)
        else:
            seconds = self._clock() - start
        # The answer to a request may have been drafted ahead, with at most `num_ahead` tokens.
        is_cut = self._look_ahead > 0 and len(proposal) == num_ahead < num_wanted
        num_asked = num_ahead if is_cut else num_wanted
        if reply.out_of_time and not is_ahead:
            num_asked = len(proposal)
        return Drafted(
            proposal,
            "replica",
            seconds,
            num_asked,
            reply.queue_ms,
            reply.compute_ms,
            reply.work_ms,
            is_ahead,
        )

    async def _ask(self, number: int, length: RoundLength, start: float) -> ProposalReply | None:
        """Asks the replica. Returns its reply, or None in the cases that `_by_replica` lists."""
        self._is_behind = self._lacks_features
        if not self._route.is_responsive:
            self._retry(number, length)
            return None
        num_wanted = length.num_draft_tokens
        wait_s, draw_until = float(limits.UNTIMED_DRAFT_S), math.inf
        if length.is_timed:
            wait_s = min(length.draft_budget_s, self._draft_s)
            draw_until = start + wait_s
        give_up_at = self._clock() + wait_s + limits.SILENT_DRAFT_S
        answer: DraftAnswer | None = None
        try:
            while not isinstance(answer, ProposalReply):
                if isinstance(answer, Refused):
                    raise errors.error_from_code(answer.code, answer.message)
                if isinstance(answer, Resync):
                    self._route.resync(answer)
                    self._is_behind = self._lacks_features
                if self._is_behind:
                    self._feed(number)
                    return None
                # The answer to this message makes the answer to an earlier feed unnecessary.
                self._route.awaited = None
                budget = budget_us(draw_until - self._clock())
                self._send(number, num_wanted, budget=budget)
                answer = await self._route.take(give_up_at - self._clock())
            self._check(answer.proposal, num_wanted)
            if answer.base_length != (committed := self._session.length):
                raise errors.InvariantError(
                    f"the proposal extends a prefix of {answer.base_length} tokens, not {committed}"
                )
        except (TimeoutError, errors.OutriderError) as error:
            self._is_late = isinstance(error, TimeoutError | errors.DeadlineExceeded)
            self._on_error(error)
            return None
        self._features = None
        self._is_late = answer.out_of_time and not answer.proposal
        return answer

    def next_round_request(self, length: RoundLength) -> NextRoundRequest:
        needs_features = self._reads_features and length.is_timed
        if not needs_features or not self._route.is_responsive or length.next_max == 0:
            return NO_NEXT_REQUEST
        if self._features is not None and self._route.awaited is not None:
            return NO_NEXT_REQUEST  # `_features` must be sent first.
        held = self._route.cached_length if self._reply is None else self._reply.cached_length
        return NextRoundRequest(features_from=max(0, held - 1))

    def on_verdict(self, reply: VerdictReply) -> bool:
        is_newest = reply.features is not None or self._route.awaited is None
        if self._reads_features and is_newest:
            self._features = reply.features
        return True

    def settle(self, common_length: int) -> None:
        if self._reply is not None:
            self._route.cached_length = min(self._reply.cached_length, common_length)
            self._reply = None

    def reject(self) -> None:
        self._reply = None
        self._pushed = PushedProposals()
        self._route.reject()
        self._move()

    def close(self) -> None:
        super().close()
        self._route.close()

    def _send_soon(self, number: int, num_draft_tokens: int, proposal: EncodedProposal) -> None:
        """Sends this round's proposal to the draft, which then drafts ahead. Waits two turns of the
        event loop, so that the message to the target is sent first."""

        def send() -> None:
            if self._route.is_responsive:
                self._try_send(number, num_draft_tokens, proposal.token_ids)

        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, send)

    def _try_send(self, number: int, num_draft_tokens: int, held: tuple[int, ...]) -> bool:
        """Sends a message, and returns whether this succeeded. If the replica is out of reach,
        moves the session."""
        try:
            self._send(number, num_draft_tokens, held)
        except (errors.LinkLost, errors.Overloaded) as error:
            self._on_error(error)
            return False
        return True

    def _send(
        self,
        number: int,
        num_draft_tokens: int,
        held: tuple[int, ...] | None = None,
        budget: int = 0,
    ) -> None:
        head = self._route.head(number)
        self._route.send(
            DraftItem(head, num_draft_tokens, self._look_ahead, held, self._features, budget)
        )

    @property
    def _length_after_feed(self) -> int:
        """Number of committed tokens that the draft will hold after it has processed `_features`.
        To process a token, the draft needs the feature of the previous token."""
        held, features = self._route.cached_length, self._features
        if features is None or features.first >= max(1, held):
            return held
        return max(held, min(features.end + 1, self._session.length))

    @property
    def _lacks_features(self) -> bool:
        return self._reads_features and self._length_after_feed < self._session.length

    def _feed(self, number: int) -> None:
        """Sends `_features` to the draft, unless a feed of the last `RETRY_S` is unanswered."""
        held, length, now = self._route.cached_length, self._length_after_feed, self._clock()
        is_waiting = self._route.awaited is not None and now < self._retry_at
        if not self._route.is_responsive or is_waiting or length <= held:
            return
        if self._try_send(number, 0, ()):
            self._route.awaited, self._retry_at = number, now + RETRY_S
            self._held_before, self._route.cached_length, self._features = held, length, None

    def _read_feed_answer(self) -> None:
        """Reads the answer to the newest feed, if it has arrived. The draft may hold more tokens
        than expected (from pages of other sessions), or fewer (if it ran out of pages)."""
        answer = self._route.take_awaited()
        if answer is None:
            return
        if isinstance(answer, Refused):
            self._on_error(errors.error_from_code(answer.code, answer.message))
            return
        if isinstance(answer, Resync):
            self._route.resync(answer)
        else:
            self._route.cached_length = answer.cached_length
        is_useless = self._route.cached_length <= self._held_before
        self._num_useless_feeds = self._num_useless_feeds + 1 if is_useless else 0
        if self._num_useless_feeds == _USELESS_FEEDS_MAX:
            self._num_useless_feeds, self._route.is_responsive = 0, False
            self._retry_at = self._clock() + RETRY_S

    def _on_error(self, error: Exception) -> None:
        _log.debug("the draft failed, and the round continues without it: %r", error)
        if isinstance(error, errors.Unavailable) and not isinstance(error, errors.LinkLost):
            self._route.mark_away()
        self._route.is_responsive = False
        if isinstance(error, errors.Unavailable):
            self._move()
        self._retry_at = self._clock() + RETRY_S

    def _move(self) -> None:
        if self._route.move():
            self._route.is_responsive = True
            self._features = None  # The new draft may need other features.

    def _retry(self, number: int, length: RoundLength) -> None:
        """Asks a failed draft again, at most once per `RETRY_S`. Does not wait for the answer."""
        now = self._clock()
        if now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        with suppress(errors.LinkLost, errors.Overloaded):
            budget = budget_us(self._draft_s if length.is_timed else math.inf)
            self._send(number, length.num_draft_tokens, budget=budget)


class SelfDraftClient(_ModelDrafts[VerifyItem, VerifyAnswer]):
    """Gets proposals from a head in the target. A round's proposal comes with the previous round's
    verdict, also if the target runs the round ahead. If a verdict has no proposal, for example that
    of a plain round that ran ahead, the look-up proposes."""

    def __init__(
        self,
        target: SessionRoute[VerifyItem, VerifyAnswer],
        lookup: LookupDrafter,
        config: CoordinatorConfig,
    ) -> None:
        super().__init__(target, lookup, config)
        self._wanted = NO_NEXT_REQUEST
        self._next_max = 0
        """`RoundLength.next_max` of the newest request. A hybrid may ask for fewer tokens."""
        self._is_rejected = False
        self.by_head = not self._is_hybrid
        self._reply: VerdictReply | None = None
        """The newest verdict, if it has a valid proposal that is not used yet."""

    async def propose(self, round_index: int, length: RoundLength, noise: RoundNoise) -> Drafted:
        """Returns the proposal of the newest verdict, or of the look-up. The choice never depends
        on the drawn tokens."""
        num_wanted = length.num_draft_tokens
        drafted = self.take_next(length)
        if drafted is None or self._is_hybrid:
            proposal, score = self._lookup.propose(num_wanted, noise)
            is_sure = score >= self._confident
            if drafted is None or is_sure:
                is_fallback = not is_sure and self._wanted.num_draft_tokens > 0
                # 0: length control must not learn from a look-up that stands in for the head.
                num_asked = num_wanted if is_sure else 0
                return Drafted(proposal, "fallback" if is_fallback else "local", 0.0, num_asked)
        return drafted

    def take_next(self, length: RoundLength) -> Drafted | None:
        num_wanted = length.num_draft_tokens
        reply, self._reply = self._reply, None
        if reply is None or reply.next_base_length != self._session.length:
            return None
        next_proposal = reply.next_proposal
        num_drafted = len(next_proposal)
        num_asked = min(num_drafted if reply.next_out_of_time else self._next_max, num_wanted)
        took_s, work_s = reply.next_draft_ms / 1e3, reply.next_work_ms / 1e3
        return Drafted(
            next_proposal.cut(num_wanted),
            "local",
            0.0,
            num_asked,
            beside=DraftedBeside(num_drafted, took_s, work_s),
        )

    def next_round_request(self, length: RoundLength) -> NextRoundRequest:
        if self._is_rejected:
            return NO_NEXT_REQUEST
        self._next_max = length.next_max
        num_wanted = min(length.next_max, self._model_tokens)
        budget = budget_us(self._draft_s) if length.is_timed else 0
        self._wanted = NextRoundRequest(num_wanted, budget_us=budget)
        return self._wanted

    def on_verdict(self, reply: VerdictReply) -> bool:
        proposal, num_wanted = reply.next_proposal, self._wanted.num_draft_tokens
        is_fit = self._is_fit(proposal, num_wanted)
        self._reply = reply if proposal and is_fit else None
        return is_fit or not proposal

    def reject(self) -> None:
        self._is_rejected, self._reply, self._wanted = True, None, NO_NEXT_REQUEST
        self.by_head = False


def open_drafts(
    pool: DraftPool,
    target: SessionRoute[VerifyItem, VerifyAnswer],
    lookup: LookupDrafter,
    config: CoordinatorConfig,
) -> Drafts:
    """Creates a session's source of proposals, for the session's whole run. If a draft replica
    should propose, but none has ever joined the `pool`, the session has no proposals."""
    context, parameters = target.context, target.context.parameters
    if parameters.num_draft_tokens == 0:
        return NoDrafts()
    if target.drafts_itself:
        return SelfDraftClient(target, lookup, config)
    if not config.lookup.drafter.name:
        return LookupDrafts(lookup, context, config.lookup_on == "target")
    if pool.first is None:
        return NoDrafts()
    return DraftClient(pool, context, lookup, config)
