"""A session's client for its target. The client asks for verdicts, repeats requests that get no
answer, and moves to another target if the current target is leaving or does not answer."""

import asyncio
import logging
from random import Random

from coordinator.routing.absence import Absence
from coordinator.routing.drafts import NO_LOOKUP, NO_NEXT_REQUEST, LookupRequest, NextRoundRequest
from coordinator.routing.replica_pool import SessionContext, SessionRoute, TargetPool
from outrider.config.deployment import CoordinatorConfig
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
from outrider.foundation.backoff import backoff
from outrider.foundation.refusals import REFUSALS
from outrider.foundation.tokens import digest_after
from outrider.interfaces.messages import Refused, Resync, VerdictReply, VerifyAnswer, VerifyItem
from outrider.replica.step_request import CANCELLED_CODE
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal

_log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""If no verdict arrives within this time, the client repeats the request."""
ANSWER_WAIT_GROWTH_MAX = 8
"""The wait for a verdict doubles with each repetition, up to this multiple of `ANSWER_S`."""
MISMATCHES_MAX = 8
"""If so many verdicts of a target are on other tokens than the session's, the session leaves the
target for good."""
REPLICA_LIMIT = "replica"
"""`Overloaded.limit` of requests that a target has refused. They wait until the target has room, so
each counts once."""
RETRY_S_MIN, RETRY_S_MAX = 0.1, 1.0
"""First and longest pause between two attempts to reach a target, or after a refusal. The pause
doubles each time."""


class TargetClient(SessionRoute[VerifyItem, VerifyAnswer]):
    """Asks one session's target for verdicts."""

    def __init__(
        self,
        pool: TargetPool,
        context: SessionContext,
        config: CoordinatorConfig,
        audits: bool = False,
    ) -> None:
        super().__init__(pool, context)
        self._audits = audits
        self._config = config
        self._random = Random(context.session.session_id).random  # noqa: S311 (for waits)
        self._was_overloaded = False
        self._asked_until = -1
        """The last round that the target may run without another request."""
        self._asked_drafts = 0
        """Number of tokens that the target's head drafts for each round after the requested one."""
        self._next_proposal = EMPTY_ENCODED_PROPOSAL
        """What the newest verdict proposes for a round that the target runs without a request."""
        self._num_mismatches = 0
        """Number of the target's verdicts on other tokens than the session's."""
        self._runs_ahead = True
        """Whether targets may run rounds ahead. False after a verdict on other tokens."""
        self.was_asked = False
        """Whether a request was sent for the newest verdict. If not, the target ran ahead."""
        self.verified = EMPTY_ENCODED_PROPOSAL
        """The proposal that the newest verdict is about. It may come from the target's look-up. If
        it is shorter than the proposal given to `verify`, the target could not read q. The caller
        must then stop using the drafter. Otherwise the output may be biased: if only certain draft
        tokens make q unreadable, the proposals always end before these tokens."""

    async def verify(
        self,
        round_index: int,
        proposal: EncodedProposal,
        run_ahead: int = 0,
        wanted: NextRoundRequest = NO_NEXT_REQUEST,
        *,
        num_tokens_left: int = 0,
        lookup: LookupRequest = NO_LOOKUP,
    ) -> VerdictReply:
        """Returns the verdict of a round, with the data `wanted` for the next round, and sets
        `verified`. See `VerifyItem` for the other parameters. Repeats the request until an answer
        arrives. Moves to another target if the current target cannot be reached, is leaving,
        answers with UNAVAILABLE, or twice does not answer in time. Raises `Unavailable` if no
        target can be reached, or the stream to the target is full, for as long as `Absence` allows.
        For refusals, see `_take_refusal`.

        If the target cannot read the proposal's q, the client itself tries to read q, cuts the
        proposal before the first unreadable q, and asks again. If the client can read all of q, or
        if the target also refuses the cut proposal, the client asks without a proposal."""
        if self.is_left:
            self.move()
        num_retries, num_silences, num_refusals = 0, 0, 0
        wait_s, absence = ANSWER_S, None
        number = self.begin(round_index)
        is_same = proposal == self._proposal_ahead(num_tokens_left)
        ask = self.was_lost or not (is_same and self._covers(number, run_ahead, wanted))
        self.was_asked = False
        while True:
            try:
                if ask:
                    self.was_asked = True
                    self._ask(number, proposal, run_ahead, wanted, num_tokens_left, lookup)
                answer = await self.take(wait_s)
            except TimeoutError:
                absence = None  # The stream did not break, so the target can be reached.
                num_silences += 1
                if num_silences > 1 and self.move():
                    num_silences = 0
                wait_s = min(2 * wait_s, ANSWER_WAIT_GROWTH_MAX * ANSWER_S)
            except (LinkLost, Overloaded) as error:
                if not (isinstance(error, LinkLost) and self.move()):
                    absence = absence or Absence(self._pool, self._config)
                    absence.check_error(error)
                    await self._pool.change(self._rest_s(num_retries))
                    num_retries += 1
            else:
                absence = None
                if isinstance(answer, VerdictReply):
                    if self._take_verdict(answer, proposal):
                        return answer
                elif isinstance(answer, Resync):
                    self.resync(answer)
                elif (
                    isinstance(refused := error_from_code(answer.code, answer.message), BadRequest)
                    and refused.field == "proposal.q"
                ):
                    num_refusals += 1
                    # The second refusal is ignored: it may answer a repeat of the first request.
                    ask = len(proposal) > 0 and num_refusals != 2
                    if ask:
                        proposal = self._cut(proposal, num_refusals, answer.message)
                        run_ahead = 0  # The caller stops using the drafter.
                    continue
                else:
                    await self._take_refusal(answer, refused, num_retries)
                    num_retries += 1
            number, ask = self.begin(round_index), True

    def take_ahead(self, num_tokens_left: int = 0) -> VerdictReply | None:
        """Begins the next round, and returns its verdict, if the target may run this round without
        another request, and the verdict has arrived. Otherwise returns None, and begins no round.
        `num_tokens_left`: as in `verify`, after which this must be called."""
        number = self._round + 1
        answer = self._answers.get(number) if number <= self._asked_until else None
        if not isinstance(answer, VerdictReply):
            return None
        proposal, before = self._proposal_ahead(num_tokens_left), self._round
        self._round = number
        if not self._take_verdict(answer, proposal):
            self._round = before
            return None
        del self._answers[number]
        self.was_asked = False
        return answer

    def _proposal_ahead(self, num_tokens_left: int) -> EncodedProposal:
        """The proposal of the next round if the target runs it without another request, except for
        tokens of the target's look-up."""
        if num_tokens_left == 0:
            return self._next_proposal
        return self._next_proposal.cut(num_tokens_left - 1)

    def _covers(self, number: int, run_ahead: int, wanted: NextRoundRequest) -> bool:
        """Whether an earlier request covers this round, and half of the `run_ahead` rounds after
        it. If these need other drafts than that request states, they are requested when all rounds
        of that request have run."""
        if self._asked_drafts != wanted.num_draft_tokens:
            run_ahead = 0
        return self._asked_until - number >= run_ahead // 2

    def _take_verdict(self, answer: VerdictReply, proposal: EncodedProposal) -> bool:
        """Whether a verdict is on the session's tokens and on `proposal`, or on the tokens of the
        target's look-up. If so, sets `verified`. If not, coordinator and target differ in an
        earlier outcome or in the proposal. Then drops this verdict and all later ones, and lets
        targets run no more rounds ahead. If this happens `MISMATCHES_MAX` times, leaves the target.
        Raises `InvariantError` if there is no other, or if the verdict has another number of draft
        tokens."""
        if answer.looked_up and not proposal.token_ids:
            proposal = EncodedProposal(answer.looked_up)
        tokens = self.context.session.tokens
        own = len(tokens), tokens.digest(), digest_after(tokens.digest(), proposal.token_ids)
        stated = answer.committed_length, answer.prefix_digest, answer.proposal_digest
        if stated == own:
            self._set_verified(answer, proposal)
            return True
        _log.error(
            "a verdict of round %d is on %d tokens with digest %x, and %x with its draft tokens, "
            "not on %d with digests %x and %x",
            answer.key.round,
            *stated,
            *own,
        )
        self.context.observer.count("verdict_mismatches")
        self._num_mismatches += 1
        self._runs_ahead = False
        self.recall()
        if self._num_mismatches == MISMATCHES_MAX:
            is_left = self.move(for_good=True)
            check(is_left, "the target's verdicts are on other tokens")
        return False

    def recall(self) -> None:
        """Drops the verdicts of rounds that the target runs ahead, also those that come later."""
        self._answers.clear()
        self._asked_until = -1
        self.renumber()

    def _set_verified(self, answer: VerdictReply, proposal: EncodedProposal) -> None:
        num, verdict = len(proposal.token_ids), answer.verdict
        if not num == len(verdict.accept_probability) == len(verdict.correction) - 1:
            num_judged = len(verdict.accept_probability)
            raise InvariantError(f"the verdict has {num_judged} draft tokens; {num} were proposed")
        self.verified = proposal
        self._next_proposal = EMPTY_ENCODED_PROPOSAL
        if self._asked_drafts:
            self._next_proposal = answer.next_proposal
            if not answer.next_proposal:
                self._asked_until = min(self._asked_until, self._round)  # It is the last one.

    def _cut(self, proposal: EncodedProposal, num_refusals: int, reason: str) -> EncodedProposal:
        """The part of a proposal to ask for after so many refusals of its q."""
        part = proposal.decodable_prefix() if num_refusals == 1 else EMPTY_ENCODED_PROPOSAL
        kept = part if len(part) < len(proposal) else EMPTY_ENCODED_PROPOSAL
        _log.warning("only %d draft tokens are verified: %s", len(kept), reason)
        self.context.observer.count("unreadable_proposals")
        return kept

    def settle(self, reply: VerdictReply, common_length: int) -> None:
        """Records a round's outcome (see `Drafts.settle`)."""
        self.cached_length = min(reply.cached_length, common_length)

    def move(self, *, for_good: bool = False) -> bool:
        is_moved = super().move(for_good=for_good)
        if is_moved:
            self._asked_until, self._num_mismatches = -1, 0
        return is_moved

    def _ask(
        self,
        number: int,
        proposal: EncodedProposal,
        run_ahead: int,
        wanted: NextRoundRequest,
        num_tokens_left: int,
        lookup: LookupRequest,
    ) -> None:
        parameters = self.context.parameters
        if not self._runs_ahead or (lookup.num_tokens and not self.looks_up):
            run_ahead = 0
        item = VerifyItem(
            head=self.head(number),
            proposal=proposal,
            run_ahead=run_ahead,
            num_logprobs=None if self._audits else parameters.logprobs,
            num_next_draft_tokens=wanted.num_draft_tokens,
            features_from=wanted.features_from,
            next_budget_us=wanted.budget_us,
            num_lookup_tokens=lookup.num_tokens,
            lookup_min_chance=lookup.min_chance,
            indexes=lookup.indexes,
            num_probe_tokens=lookup.num_probed,
            num_tokens_left=num_tokens_left,
            ignores_eos=parameters.ignore_eos,
            audit=self._audits,
        )
        self.send(item)
        self._asked_until = number + run_ahead
        self._asked_drafts = wanted.num_draft_tokens

    def _rest_s(self, num_retries: int) -> float:
        return backoff(RETRY_S_MIN, RETRY_S_MAX, num_retries, self._random)

    async def _take_refusal(self, answer: Refused, error: OutriderError, num_retries: int) -> None:
        """Handles a refusal that is not about q. If this returns, the caller must ask again.

        | code of the answer | reaction |
        | --- | --- |
        | UNAVAILABLE | the target counts as away. The session moves, or pauses if it cannot |
        | RESOURCE_EXHAUSTED | pause. The session does not move, but asks until its deadline |
        | DEADLINE_EXCEEDED | pause |
        | CANCELLED | raises `DataLoss` |
        | INVALID_ARGUMENT | raises `InvariantError` |
        | any other | raises the target's error |
        """
        if answer.code == CANCELLED_CODE:
            # An earlier run of the session had the same epoch, and has released the session at the
            # target. So the store has lost its last writes, and has issued this epoch twice.
            raise DataLoss(f"the target has already released this session: {answer.message}")
        if isinstance(error, BadRequest):
            # The coordinator has validated the user's request, so the refusal shows a bug.
            raise InvariantError(f"the target refuses a message: {error.message}")
        if isinstance(error, Unavailable):
            self.mark_away()
            if self.move():
                return
        elif isinstance(error, Overloaded):
            if not self._was_overloaded:
                REFUSALS[REPLICA_LIMIT] += 1
            self._was_overloaded = True
        # `DeadlineExceeded` is not raised: the coordinator's own deadline will soon pass.
        elif not isinstance(error, DeadlineExceeded):
            raise error
        await asyncio.sleep(self._rest_s(num_retries))
