"""One session's target, behind the stream of whichever replica it has.

A client knows how many of the session's tokens its replica holds, sends what is missing, asks again
when an answer does not come, and goes to another replica when its own is away. This one ends in a
verdict or an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final, Self

from coordinator.routing.drafts import NOTHING_WANTED, NextWanted
from coordinator.routing.replica_pool import SessionRoute
from outrider.backoff import backoff
from outrider.errors import (
    BadRequest,
    DataLoss,
    DeadlineExceeded,
    InvariantError,
    LinkLost,
    Overloaded,
    Unavailable,
    check,
    error_from_code,
)
from outrider.grammar.constraint import Constraint
from outrider.limits import DRAFT_DEADLINE_MS_MAX
from outrider.messages import (
    PositionLogprobs,
    Refused,
    Resync,
    RoundHead,
    VerdictReply,
    VerifyAnswer,
    VerifyItem,
)
from outrider.replica.step_request import CANCELLED_CODE
from outrider.sessions.state import Session
from outrider.sessions.store import CacheState
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import NOTHING_SEALED, SealedProposal
from outrider.speculation.sampling_params import SamplingParams
from outrider.telemetry.observer import SILENT, RequestObserver, Side

if TYPE_CHECKING:
    from outrider.config import CoordinatorConfig


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a side waits, and for how long it tries. All in seconds."""

    target_answer_s: float
    """A target's answer not here by then is asked for again; doubled at each repetition."""
    target_gone_s: float
    """A target that cannot be reached for so long ends the request with `Unavailable`."""
    target_retry_s: float
    """First rest before a target is asked again; doubled at each repetition."""
    draft_answer_s: float
    """A draft has so long to draw; it then answers with what it has."""
    draft_retry_s: float
    """Rest between two questions to an absent draft."""

    @classmethod
    def of(cls, config: CoordinatorConfig) -> Self:
        """That of these settings."""
        return cls(
            target_answer_s=config.target_timeout_ms / 1e3,
            target_gone_s=config.target_gone_ms / 1e3,
            target_retry_s=config.target_retry_ms / 1e3,
            draft_answer_s=config.draft_timeout_ms / 1e3,
            draft_retry_s=config.draft_retry_ms / 1e3,
        )

    def with_draft_deadline(self, draft_deadline_ms: int | None) -> Timeouts:
        """This one, for a session that says how much time a round gives its draft, if that is
        less."""
        if draft_deadline_ms is None:
            return self
        return replace(self, draft_answer_s=min(self.draft_answer_s, draft_deadline_ms / 1e3))


def budget_us(seconds: float) -> int:
    """Time that is left to draft, as a message says it: 0 for infinity, else at least 1."""
    if seconds == math.inf:
        return 0
    return max(1, min(round(seconds * 1e6), DRAFT_DEADLINE_MS_MAX * 1000))


class HeaderWriter:
    """Writes the head of each message of one session."""

    def __init__(
        self,
        session: Session,
        sampling: SamplingParams,
        deadline: float,
        observer: RequestObserver = SILENT,
        constraint: Constraint | None = None,
    ) -> None:
        self.session = session
        self.observer = observer
        self.sampling = sampling
        self.constraint = constraint
        self._constraint_hash = b"" if constraint is None else constraint.digest()
        self._sampling_hash = sampling.hash()
        self._deadline = deadline

    def write(self, side: Side, round_index: int, base_length: int) -> RoundHead:
        """The head of a message to a side that states the first `base_length` committed tokens."""
        session = self.session
        left = self._deadline - asyncio.get_running_loop().time()
        return RoundHead(
            session_id=session.session_id,
            tenant=session.record.tenant,
            epoch=session.epoch,
            round=round_index,
            base_length=base_length,
            prefix_digest=session.tokens.digest(base_length),
            append=session.tokens.since(base_length),
            prompt_length=session.prompt_length,
            rule=session.record.rule,
            seed=session.record.seed,
            sampling=self.sampling,
            sampling_hash=self._sampling_hash,
            deadline_ms=max(1, math.ceil(left * 1e3)),
            traceparent=self.observer.context(side),
            constraint=self.constraint,
            constraint_hash=self._constraint_hash,
        )

    def held(self, resync: Resync) -> int:
        """How many tokens a replica that asked for a resync can keep."""
        tokens = self.session.tokens
        known = tokens.holds(resync.cached_length, resync.prefix_digest)
        return min(resync.cached_length, len(tokens) - 1) if known else 0


_log = logging.getLogger(__name__)

ANSWER_WAIT_GROWTH_MAX: Final = 8
"""How much longer than the first wait for a verdict the later ones get."""
Q_REFUSALS_MAX: Final = 2
"""How often a target may refuse the q of a proposal that can be read here before nothing of the
proposal is verified."""
RETRY_S_MAX: Final = 1.0
"""Longest rest between two tries to reach a target: one that comes back is soon found."""


class TargetClient:
    """One session's target."""

    def __init__(
        self,
        route: SessionRoute[VerifyItem, VerifyAnswer],
        headers: HeaderWriter,
        timeouts: Timeouts,
        audits: bool = False,
    ) -> None:
        """If it `audits`, each verdict says how its proposal looks: see `VerifyItem.audit`."""
        self._route = route
        self._audits = audits
        self._mailbox = route.mailbox
        self._headers = headers
        self._timeouts = timeouts
        self._random = Random(headers.session.session_id).random  # noqa: S311 (for waits)
        self._asked_until = -1
        """The last round that the target will answer without being asked again."""
        self.cached_length = headers.session.target.held_by(route.replica)
        """Committed tokens that the target is thought to hold."""
        self.found_broken_draft = False
        """Whether q of a proposal could not be read for a reason that may depend on a token drawn
        from it: what is cut off then may bias the output."""

    @property
    def cache_state(self) -> CacheState:
        return CacheState(self._route.replica, self.cached_length)

    async def verify(
        self,
        round_index: int,
        proposal: SealedProposal,
        run_ahead: int,
        num_logprobs: int | None,
        wanted: NextWanted = NOTHING_WANTED,
    ) -> VerdictReply:
        """The verdict of a round, and what is `wanted` of the next one where the target
        drafts itself. Asks again until there is one, elsewhere where the target cannot be reached,
        was asked twice in vain, or is to be left; raises what it refuses with, and `Unavailable`
        once none can be reached for `target_gone_s`.

        Where the target cannot read the draft's q, the proposal is verified as far as it can, or,
        where only the target cannot read it, not at all: the verdict refuses the rest.
        `found_broken_draft` says whether that may bias the tokens."""
        loop = asyncio.get_running_loop()
        if self._route.is_left:
            self._move()
        number = self._route.number(round_index)
        if self._mailbox.begin(number):
            self._asked_until = -1
        num_drafted = len(proposal)
        unreachable_since: float | None = None
        wait_s, num_retries, num_silences = self._timeouts.target_answer_s, 0, 0
        num_refusals = 0
        ask = len(proposal) > 0 or self._must_ask(number, run_ahead)
        while True:
            if number != self._route.number(round_index):  # It has moved.
                number = self._route.number(round_index)
                self._mailbox.begin(number)
            try:
                if ask:
                    self._send(number, proposal, run_ahead, num_logprobs, wanted)
                async with asyncio.timeout(wait_s):
                    answer = await self._mailbox.take(number)
            except TimeoutError:
                unreachable_since = None  # The stream has stood all the while.
                num_silences += 1
                if num_silences > 1 and self._move():
                    num_silences = 0
                wait_s = min(2 * wait_s, ANSWER_WAIT_GROWTH_MAX * self._timeouts.target_answer_s)
            except (LinkLost, Overloaded) as error:
                if isinstance(error, LinkLost) and self._move():
                    ask = True
                    continue
                now = loop.time()
                unreachable_since = now if unreachable_since is None else unreachable_since
                if now - unreachable_since >= self._timeouts.target_gone_s:
                    raise Unavailable(f"no target can be reached: {error.message}") from error
                await self._route.change(self._retry_s(num_retries))
                num_retries += 1
            else:
                unreachable_since = None
                if isinstance(answer, VerdictReply):
                    return _padded(_checked(answer, proposal), num_drafted)
                if isinstance(answer, Refused) and _is_about_q(answer):
                    readable = self._readable(proposal, answer.message)
                    ask = proposal != readable  # Else the answer is about what was sent before ...
                    num_refusals = 0 if ask else num_refusals + 1
                    if num_refusals >= Q_REFUSALS_MAX and len(proposal) > 0:
                        # ... or the target cannot read what can be read here.
                        readable, ask = self._nothing_of(proposal, answer.message), True
                    proposal = readable
                    continue
                await self._put_right(answer, num_retries)
                num_retries += isinstance(answer, Refused)
            ask = True

    def settle(self, reply: VerdictReply, common_length: int) -> None:
        """Notes an outcome: the first `common_length` tokens of what was verified are committed."""
        self.cached_length = min(reply.cached_length, common_length)

    def close(self) -> None:
        """Ends the session on this side."""
        self._route.close()

    def _move(self) -> bool:
        if not self._route.move():
            return False
        self.cached_length = 0
        self._asked_until = -1
        self._headers.observer.moved("target")
        return True

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
        base_length = min(self.cached_length, len(self._headers.session.tokens) - 1)
        head = self._headers.write("target", round_index, base_length)
        self._route.send(
            VerifyItem(
                head,
                proposal,
                run_ahead,
                num_logprobs,
                wanted.num_draft_tokens,
                wanted.siblings,
                wanted.features,
                wanted.budget_us,
                self._audits,
            )
        )
        self._asked_until = round_index + run_ahead

    def _readable(self, proposal: SealedProposal, message: str) -> SealedProposal:
        """What can be verified of a proposal whose q the target could not read."""
        if not self._headers.session.record.rule.needs_q:
            return replace(proposal, q=b"")  # The rule does not look at it.
        readable, is_broken = proposal.readable()
        if readable != proposal:
            _log.warning("a proposal is cut to %d tokens: %s", len(readable), message)
            self._headers.observer.proposal_unreadable()
            self.found_broken_draft |= is_broken
        return readable

    def _nothing_of(self, proposal: SealedProposal, message: str) -> SealedProposal:
        """What is verified of a proposal whose q only the target cannot read."""
        _log.warning("a proposal of %d tokens is dropped: %s", len(proposal), message)
        self._headers.observer.proposal_unreadable()
        self.found_broken_draft = True
        return NOTHING_SEALED

    def _retry_s(self, num_retries: int) -> float:
        return backoff(self._timeouts.target_retry_s, RETRY_S_MAX, num_retries, self._random)

    async def _put_right(self, answer: Resync | Refused, num_retries: int) -> None:
        if isinstance(answer, Resync):
            self.cached_length = self._headers.held(answer)
            self._headers.observer.resynced("target")
            return
        if answer.code == CANCELLED_CODE:
            # Nobody ends a round that is asked for, but a store that has lost that an epoch was
            # given gives it a second time.
            raise DataLoss(f"the target has seen the session's epoch end: {answer.message}")
        error = error_from_code(answer.code, answer.message)
        if isinstance(error, BadRequest):
            # The user's fields were checked before: what is wrong with a message is our doing.
            raise InvariantError(f"the target refuses a message: {error.message}")
        # A deadline that has passed over there is about to pass here.
        if not isinstance(error, Overloaded | Unavailable | DeadlineExceeded):
            raise error
        if isinstance(error, Unavailable):
            self._route.give_up()
            if self._move():
                return
        await asyncio.sleep(self._retry_s(num_retries))


def _checked(reply: VerdictReply, proposal: SealedProposal) -> VerdictReply:
    num_draft_tokens = len(proposal)
    check(
        len(reply.verdict.accept_probability) == num_draft_tokens
        and len(reply.verdict.correction) == num_draft_tokens + 1,
        f"a verdict for {len(reply.verdict.accept_probability)} draft tokens, "
        f"{num_draft_tokens} were proposed",
    )
    return reply


def _padded(reply: VerdictReply, num_drafted: int) -> VerdictReply:
    """The verdict on a proposal of which only the first tokens were verified: the others are
    refused, and what follows them is never used."""
    num_verified = len(reply.verdict.accept_probability)
    num_cut = num_drafted - num_verified
    if num_cut == 0:
        return reply
    accept, correction = reply.verdict.accept_probability, reply.verdict.correction
    logprobs = reply.logprobs
    if logprobs:
        unused = (PositionLogprobs(0.0, ()),) * num_cut
        logprobs = (*logprobs[:num_verified], *unused, *logprobs[num_verified:], *unused)
    verdict = Verdict((*accept, *(0.0,) * num_cut), (*correction, *(0,) * num_cut))
    return replace(reply, verdict=verdict, logprobs=logprobs)


def _is_about_q(answer: Refused) -> bool:
    error = error_from_code(answer.code, answer.message)
    return isinstance(error, BadRequest) and error.field == "proposal.q"
