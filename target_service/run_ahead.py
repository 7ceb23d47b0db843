"""Run-ahead: a target runs rounds without a proposal before the coordinator asks for them. The next
round of a session is formed right after the verdict of the round before, between two steps."""

from collections import OrderedDict
from collections.abc import Collection
from functools import reduce

from outrider.errors import Overloaded, check
from outrider.foundation.tokens import extend_digest
from outrider.foundation.values import completed, replaced
from outrider.interfaces.messages import Refused, RoundAnswer, RoundHead, VerdictReply, VerifyItem
from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.replica.step_loop import Continuation, Prepared, StepLoop
from outrider.replica.step_request import StepRequest, refusal


class RunAheads(Continuation[VerifyItem]):
    """The sessions of a target that run ahead."""

    def __init__(self, length_max: int, eos_token_ids: Collection[int], held_s: float) -> None:
        """A session has at most `length_max` tokens, and probably ends with an id of
        `eos_token_ids`. A verdict waits for others of its session up to `held_s`."""
        self._length_max, self._eos_token_ids = length_max, eos_token_ids
        self._held_s = held_s
        self.sessions: OrderedDict[str, RunAhead] = OrderedDict()
        """Those that a coordinator asked for least recently come first."""

    def arrived(self, work: StepRequest[VerifyItem], steps: StepLoop[VerifyItem, Prepared]) -> None:
        """Starts or continues the session's run-ahead, if the item allows run-ahead. Otherwise
        queues the item."""
        item, session_id = work.item, work.session_id
        ahead = self.sessions.get(session_id)
        if ahead is not None and ahead.continues(item):
            self.sessions.move_to_end(session_id)
            replies, then = ahead.extend(work), None
            if ahead.request is None:
                then = ahead.next_request(work.arrived_at, self._length_max)
            if then is not None:
                steps.enqueue(then)
            steps.end(work, replies, then)
            return
        self._end(session_id, steps)
        if item.run_ahead > 0 and not item.proposal:
            if len(self.sessions) >= SEQUENCES_PER_REPLICA_MAX:
                idle = (name for name, run in self.sessions.items() if run.request is None)
                self._end(next(idle, next(iter(self.sessions))), steps, refuses=True)
            self.sessions[session_id] = RunAhead(work)
        steps.enqueue(work)

    def answered(
        self, work: StepRequest[VerifyItem], answer: RoundAnswer | None, now: float
    ) -> tuple[StepRequest[VerifyItem] | None, float]:
        ahead = self.sessions.get(work.session_id)
        if ahead is None or ahead.request is not work:
            return None, 0.0
        ahead.request = None
        if not isinstance(answer, VerdictReply):
            del self.sessions[work.session_id]
            return None, 0.0  # The coordinator must act on this answer.
        held_s = self._held_s if ahead.add(answer) else 0.0
        then = ahead.next_request(now, self._length_max)
        if then is None or answer.verdict.correction[0] in self._eos_token_ids:
            held_s = 0.0  # No further verdict comes soon, or the session probably ends.
        return then, held_s

    def foresee(self, work: StepRequest[VerifyItem]) -> VerifyItem | None:
        ahead = self.sessions.get(work.session_id)
        if ahead is None or ahead.request is not work:
            return None
        return ahead.foresee(self._length_max)

    def forget(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    def _end(
        self, session_id: str, steps: StepLoop[VerifyItem, Prepared], *, refuses: bool = False
    ) -> None:
        """Ends a session's run-ahead, and the round that waits. A caller that has a newer item of
        the session need not refuse this round."""
        ahead = self.sessions.pop(session_id, None)
        if ahead is not None and (work := ahead.request) is not None:
            full = Overloaded("too many sessions run ahead on this target")
            answers: list[Refused] = [refusal(work.key, full)] if refuses else []
            steps.cancel(work, answers)


class RunAhead:
    """A session's run-ahead: the round of `item`, and up to `item.run_ahead` further rounds. Each
    round commits one token.

    | round | committed length at its start | verdict |
    | --- | --- | --- |
    | `item.head.round + j` | `item.head.committed_length + j` | `replies[j]`, once it is known |"""

    def __init__(self, work: StepRequest[VerifyItem]) -> None:
        self.request: StepRequest[VerifyItem] | None = work  # the round that waits or runs
        self.replies: list[VerdictReply] = []
        self._item, self._sender, self._expires_at = work.item, work.sender, work.expires_at
        # Digests of the tokens before the first round, and after each reply.
        self._digests = [_committed_digest(work.item.head)]
        self._foreseen: VerifyItem | None = None

    @property
    def _last_round(self) -> int:
        return self._item.head.round + self._item.run_ahead

    def continues(self, item: VerifyItem) -> bool:
        """Whether this run-ahead can answer `item`. The item must ask for a round with a known
        verdict or for the next round, with the same prefix and parameters. The item must also allow
        all rounds that this run-ahead allows. Otherwise the item's coordinator could get more
        verdicts than it asked for."""
        own, other = self._item.head, item.head
        rounds = other.round - own.round
        return (
            not item.proposal
            and 0 <= rounds <= len(self.replies)
            and other.round + item.run_ahead >= self._last_round
            and other.committed_length - own.committed_length == rounds
            and self._digests[rounds] == _committed_digest(other)
            and item.num_logprobs == self._item.num_logprobs
            and (other.epoch, other.rule, other.seed, other.prompt_length, other.sampling)
            == (own.epoch, own.rule, own.seed, own.prompt_length, own.sampling)
            and other.constraint_hash == own.constraint_hash
        )

    def extend(self, work: StepRequest[VerifyItem]) -> list[VerdictReply]:
        """Replaces the item of this run-ahead by that of `work`, which must satisfy `continues`.
        Drops all earlier rounds. If the item came twice or over another connection, returns all
        known verdicts from the item's round on, to be sent again. Otherwise returns an empty
        list."""
        rounds = work.item.head.round - self._item.head.round
        may_be_lost = rounds == 0 or work.sender is not self._sender
        del self.replies[:rounds]
        del self._digests[:rounds]
        self._foreseen = None
        self._item, self._sender, self._expires_at = work.item, work.sender, work.expires_at
        if self.request is not None:
            self.request.sender = work.sender
        return list(self.replies) if may_be_lost else []

    def add(self, reply: VerdictReply) -> bool:
        """Adds the verdict of the newest round. Returns whether it may wait for further verdicts.
        The first verdict may not wait. Nor may the middle verdict, because it makes the coordinator
        ask for more rounds."""
        check(len(reply.verdict.correction) == 1, "a round without a proposal has one correction")
        ahead = self._item.run_ahead
        may_wait = len(self.replies) not in (0, ahead - ahead // 2)
        self.replies.append(reply)
        self._digests.append(extend_digest(self._digests[-1], reply.verdict.correction[0]))
        return may_wait

    def _allows(self, rounds: int, length_max: int) -> bool:
        """Whether the round with this index may run. Its prefix has at most `length_max` tokens."""
        is_long = self._item.head.committed_length + rounds > length_max
        return rounds <= self._item.run_ahead and not is_long

    def foresee(self, length_max: int) -> VerifyItem | None:
        """Forms the item of the round after the running one, while its token is unknown. Returns
        None if there will be no such round."""
        rounds = len(self.replies) + 1
        if self._allows(rounds, length_max):
            self._foreseen = _later_round(self._item, rounds, self._digests[rounds - 1])
        return self._foreseen

    def next_request(self, now: float, length_max: int) -> StepRequest[VerifyItem] | None:
        """Forms the next round, which appends the token of the round before it. Returns None if all
        allowed rounds have run."""
        rounds = len(self.replies)
        if not self._allows(rounds, length_max):
            return None
        item = self._item
        if rounds > 0:
            item = self._foreseen or _later_round(item, rounds, self._digests[rounds - 1])
            self._foreseen = None
            completed(item.head, append=self.replies[-1].verdict.correction)
        self.request = StepRequest(item, self._sender, now, self._expires_at)
        return self.request


def _committed_digest(head: RoundHead) -> int:
    return reduce(extend_digest, head.append, head.prefix_digest)


_UNKNOWN = 0
"""The token of a foreseen round, until the round before it has ended."""


def _later_round(item: VerifyItem, rounds: int, digest: int) -> VerifyItem:
    """Returns the item of a later round, `rounds` rounds after `item`. A round commits one token.
    The returned item appends the token `_UNKNOWN` to a prefix with this `digest`."""
    head = item.head
    own = replaced(
        head,
        round=head.round + rounds,
        base_length=head.committed_length + rounds - 1,
        prefix_digest=digest,
        append=(_UNKNOWN,),
        traceparent="",  # Only the first round is traced.
    )
    return replaced(item, head=own, features_from=None)
