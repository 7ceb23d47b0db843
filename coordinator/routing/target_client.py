"""One session's target, behind the stream of whichever replica it has: it ends in a verdict or an
error. What the replica lacks of the session is sent, what it does not answer is asked again, and
where it is away the session goes to another one."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from random import Random
from typing import Final

from coordinator.routing.drafts import NOTHING_WANTED, NextWanted
from coordinator.routing.replica_pool import SessionContext, TargetPool, TargetRoute
from outrider.backoff import backoff
from outrider.config import CoordinatorConfig
from outrider.errors import (
    BadRequest,
    DataLoss,
    DeadlineExceeded,
    InvariantError,
    LinkLost,
    OutriderError,
    Overloaded,
    Unavailable,
    check,
    error_from_code,
)
from outrider.messages import PositionLogprobs, Refused, Resync, VerdictReply, VerifyItem
from outrider.replica.step_request import CANCELLED_CODE
from outrider.sessions.store import CacheState
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.proposal import NOTHING_SEALED, SealedProposal

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
        pool: TargetPool,
        context: SessionContext,
        config: CoordinatorConfig,
        audits: bool = False,
    ) -> None:
        """If it `audits`, each verdict says how its proposal looks: see `VerifyItem.audit`."""
        self._route: TargetRoute = TargetRoute(pool, context)
        self._context = context
        self._audits = audits
        self._answer_s = config.target_timeout_ms / 1e3
        self._gone_s = config.target_gone_ms / 1e3
        self._retry_s = config.target_retry_ms / 1e3
        self._random = Random(context.session.session_id).random  # noqa: S311 (for waits)
        self._asked_until = -1
        """The last round that the target will answer without being asked again."""
        self.found_broken_draft = False
        """Whether q of a proposal could not be read for a reason that may depend on a token drawn
        from it: what is cut off then may bias the output."""

    @property
    def cache_state(self) -> CacheState:
        return self._route.cache_state

    async def verify(
        self,
        round_index: int,
        proposal: SealedProposal,
        run_ahead: int = 0,
        wanted: NextWanted = NOTHING_WANTED,
    ) -> VerdictReply:
        """The verdict of a round, and what is `wanted` of the next one where the target
        drafts itself. Asks again until there is one, elsewhere where the target cannot be reached,
        was asked twice in vain, or is to be left; raises what it refuses with, and `Unavailable`
        once none can be reached for `target_gone_ms`.

        Where the target cannot read the draft's q, the proposal is verified as far as it can, or,
        where only the target cannot read it, not at all: the verdict refuses the rest.
        `found_broken_draft` says whether that may bias the tokens."""
        loop, route = asyncio.get_running_loop(), self._route
        if route.is_left:
            self._move()
        num_drafted, num_refusals = len(proposal), 0
        wait_s, num_retries, num_silences = self._answer_s, 0, 0
        gone_at: float | None = None
        number = route.begin(round_index)
        ask = num_drafted > 0 or route.was_lost or self._must_ask(number, run_ahead)
        while True:
            try:
                if ask:
                    self._send(number, proposal, run_ahead, wanted)
                async with asyncio.timeout(wait_s):
                    answer = await route.take()
            except TimeoutError:
                gone_at = None  # The stream has stood all the while.
                num_silences += 1
                if num_silences > 1 and self._move():
                    num_silences = 0
                wait_s = min(2 * wait_s, ANSWER_WAIT_GROWTH_MAX * self._answer_s)
            except (LinkLost, Overloaded) as error:
                if not (isinstance(error, LinkLost) and self._move()):
                    gone_at = loop.time() + self._gone_s if gone_at is None else gone_at
                    if loop.time() >= gone_at:
                        raise Unavailable(f"no target can be reached: {error.message}") from error
                    await route.change(self._rest_s(num_retries))
                    num_retries += 1
            else:
                gone_at = None
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
            number, ask = route.begin(round_index), True

    def settle(self, reply: VerdictReply, common_length: int) -> None:
        """Notes an outcome: the first `common_length` tokens of what was verified are committed."""
        self._route.cached_length = min(reply.cached_length, common_length)

    def close(self) -> None:
        """Ends the session on this side."""
        self._route.close()

    def _move(self) -> bool:
        is_moved = self._route.move()
        if is_moved:
            self._asked_until = -1
        return is_moved

    def _must_ask(self, number: int, run_ahead: int) -> bool:
        """Whether the target has to hear of a round without a proposal: not while it decodes
        ahead on its own and more than half of what it may do is left."""
        left = self._asked_until - number
        return left < 0 or left < run_ahead // 2

    def _send(
        self, number: int, proposal: SealedProposal, run_ahead: int, wanted: NextWanted
    ) -> None:
        item = VerifyItem(
            self._route.head(number),
            proposal,
            run_ahead,
            None if self._audits else self._context.parameters.logprobs,
            wanted.num_draft_tokens,
            wanted.siblings,
            wanted.features,
            wanted.budget_us,
            self._audits,
        )
        self._route.send(item)
        self._asked_until = number + run_ahead

    def _readable(self, proposal: SealedProposal, message: str) -> SealedProposal:
        """What can be verified of a proposal whose q the target could not read."""
        if not self._context.session.record.rule.needs_q:
            return replace(proposal, q=b"")  # The rule does not look at it.
        readable, is_broken = proposal.readable()
        if readable != proposal:
            _log.warning("a proposal is cut to %d tokens: %s", len(readable), message)
            self._context.observer.count("unreadable_proposals")
            self.found_broken_draft |= is_broken
        return readable

    def _nothing_of(self, proposal: SealedProposal, message: str) -> SealedProposal:
        """What is verified of a proposal whose q only the target cannot read."""
        _log.warning("a proposal of %d tokens is dropped: %s", len(proposal), message)
        self._context.observer.count("unreadable_proposals")
        self.found_broken_draft = True
        return NOTHING_SEALED

    def _rest_s(self, num_retries: int) -> float:
        return backoff(self._retry_s, RETRY_S_MAX, num_retries, self._random)

    async def _put_right(self, answer: Resync | Refused, num_retries: int) -> None:
        if isinstance(answer, Resync):
            self._route.resync(answer)
            return
        error = _error_of(answer)
        if isinstance(error, Unavailable):
            self._route.give_up()
            if self._move():
                return
        # A deadline that has passed over there is about to pass here.
        elif not isinstance(error, Overloaded | DeadlineExceeded):
            raise error
        await asyncio.sleep(self._rest_s(num_retries))


def _error_of(answer: Refused) -> OutriderError:
    if answer.code == CANCELLED_CODE:
        # Nobody ends a round that is asked for, but a store that has lost that an epoch was
        # given gives it a second time.
        return DataLoss(f"the target has seen the session's epoch end: {answer.message}")
    error = error_from_code(answer.code, answer.message)
    if isinstance(error, BadRequest):
        # The user's fields were checked before: what is wrong with a message is our doing.
        return InvariantError(f"the target refuses a message: {error.message}")
    return error


def _is_about_q(answer: Refused) -> bool:
    error = error_from_code(answer.code, answer.message)
    return isinstance(error, BadRequest) and error.field == "proposal.q"


def _checked(reply: VerdictReply, proposal: SealedProposal) -> VerdictReply:
    num_verified, num_draft_tokens = len(reply.verdict.accept_probability), len(proposal)
    check(
        num_verified == num_draft_tokens and len(reply.verdict.correction) == num_draft_tokens + 1,
        f"a verdict for {num_verified} draft tokens, {num_draft_tokens} were proposed",
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
