"""Run-ahead: a target runs rounds before the coordinator asks for them. Proposals, if there are
any, come from the target's look-up, or from its head, together with the verdict before. The next
round of a session is formed right after the verdict of the round before, between two steps. For
that, the target computes the outcome that the coordinator will compute, because both have the same
random numbers."""

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from outrider.errors import Overloaded
from outrider.foundation.tokens import EMPTY_DIGEST, digest_after, extend_digest
from outrider.foundation.values import completed, replaced
from outrider.interfaces.messages import Refused, RoundAnswer, VerdictReply, VerifyItem
from outrider.limits import SEQUENCES_PER_REPLICA_MAX
from outrider.replica.step_loop import Continuation, Prepared, StepLoop
from outrider.replica.step_request import StepRequest, refusal
from outrider.speculation.accept_reject import decide
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal
from outrider.speculation.random_streams import RoundNoise


class RunAheads(Continuation[VerifyItem]):
    """The sessions of a target that run ahead."""

    def __init__(self, length_max: int, eos_token_ids: Collection[int], held_s: float) -> None:
        """A session has at most `length_max` tokens, and ends with an id of `eos_token_ids`, unless
        its items ignore these. A verdict waits for others on its connection up to `held_s`."""
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
            if ahead.replies or ahead.request is not None:
                steps.end(work, replies, then)
                return
            # This run-ahead has ended, for example because the completion has no room. But the
            # coordinator decides that.
        self._end(session_id, steps)
        if item.run_ahead > 0:
            if len(self.sessions) >= SEQUENCES_PER_REPLICA_MAX:
                idle = (name for name, run in self.sessions.items() if run.request is None)
                self._end(next(idle, next(iter(self.sessions))), steps, refuses=True)
            self.sessions[session_id] = RunAhead(work, self._eos_token_ids)
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
        held_s = self._held_s if ahead.add(answer, now, self._held_s) else 0.0
        then = ahead.next_request(now, self._length_max)
        # Without a next round, no further verdict comes soon.
        return then, 0.0 if then is None else held_s

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


_LATE_ASK = 4
"""The middle verdict may wait if half of the rounds take at least this many times as long as it may
wait. Then the coordinator still asks for more rounds in time."""
_WEIGHT = 0.25
"""The weight of the newest round in the average of their times."""
_UNKNOWN = 0
"""The token of a foreseen round, until the round before it has ended."""


class _Start(NamedTuple):
    """Where a round begins."""

    length: int
    """Number of committed tokens."""
    digest: int
    """Digest of these tokens."""
    last_token: int = 0
    """The last of them; not set for the round of the item."""
    digest_before: int = 0
    """Digest of the tokens before the last one."""
    proposal: EncodedProposal = EMPTY_ENCODED_PROPOSAL
    """The proposal of the item, or what the target's head has drafted for this round."""


class _Room(NamedTuple):
    """The fields of a `VerifyItem` that depend on how much of the completion is left."""

    num_tokens_left: int
    num_lookup_tokens: int
    num_next_draft_tokens: int


def _settings(item: VerifyItem) -> tuple[int | None, int, bool]:
    """The fields of an item that are equal in all rounds."""
    return item.num_logprobs, item.next_budget_us, item.ignores_eos


class RunAhead:
    """A session's run-ahead: the round of `item`, and up to `item.run_ahead` further rounds.

    | round | committed length at its start | verdict |
    | --- | --- | --- |
    | `item.head.round + j` | `_starts[j].length` | `replies[j]`, once it is known |"""

    def __init__(self, work: StepRequest[VerifyItem], eos_token_ids: Collection[int]) -> None:
        self.request: StepRequest[VerifyItem] | None = work  # the round that waits or runs
        self.replies: list[VerdictReply] = []
        self._eos_token_ids = eos_token_ids
        self._take(work)
        head = work.item.head
        # Where the first round begins, and each round after a reply.
        self._starts = [
            _Start(head.committed_length, head.committed_digest, proposal=work.item.proposal)
        ]
        self._is_over = False
        """Whether the last reply ends the completion, or lacks the next proposal, so that the
        coordinator must propose."""
        self._foreseen: VerifyItem | None = None
        self._num_probe_tokens = 0
        """`VerifyItem.num_probe_tokens` of the next round that is formed."""
        self._added_at = work.arrived_at
        self._round_s = 0.0  # moving average of the time between two verdicts

    def _take(self, work: StepRequest[VerifyItem]) -> None:
        self._item, self._sender, self._expires_at = work.item, work.sender, work.expires_at
        self._grammar, self._length = work.grammar, work.item.head.committed_length
        sampling = work.item.head.sampling
        self._ends = set(() if sampling is None else sampling.stop_token_ids)
        """The tokens that end the completion."""
        if not work.item.ignores_eos:
            self._ends.update(self._eos_token_ids)

    @property
    def _last_round(self) -> int:
        return self._item.head.round + self._item.run_ahead

    def continues(self, item: VerifyItem) -> bool:
        """Whether this run-ahead can answer `item`. The item must ask for a round with a known
        verdict or for the next round, with the same prefix, proposal and parameters. The item must
        also allow all rounds that this run-ahead allows and that have room. Otherwise the item's
        coordinator could get more verdicts than it asked for."""
        own, other = self._item.head, item.head
        rounds = other.round - own.round
        if not 0 <= rounds < len(self._starts):
            return False
        start, num_ahead = self._starts[rounds], self._last_round - other.round
        if item.num_tokens_left:
            num_ahead = min(num_ahead, item.num_tokens_left - 1)
        return (
            item.proposal == start.proposal
            and item.run_ahead >= num_ahead
            and start.length == other.committed_length
            and start.digest == other.committed_digest
            and self._room(start.length)
            == _Room(item.num_tokens_left, item.num_lookup_tokens, item.num_next_draft_tokens)
            and _settings(item) == _settings(self._item)
            and (
                item.num_lookup_tokens == 0
                or item.lookup_min_chance == self._item.lookup_min_chance
            )
            and (other.epoch, other.rule, other.seed, other.prompt_length, other.sampling)
            == (own.epoch, own.rule, own.seed, own.prompt_length, own.sampling)
            and other.constraint_hash == own.constraint_hash
        )

    def _room(self, length: int) -> _Room:
        """The room of a round that begins at this committed length. A round has no more draft
        tokens than have room before its last token. It leaves room for one token or more, so the
        next round has no more than have room before the last two tokens."""
        item = self._item
        num_lookup, num_next = item.num_lookup_tokens, item.num_next_draft_tokens
        if item.num_tokens_left == 0:
            return _Room(0, num_lookup, num_next)
        left = max(0, item.num_tokens_left - (length - self._length))
        return _Room(left, min(num_lookup, max(0, left - 1)), min(num_next, max(0, left - 2)))

    def extend(self, work: StepRequest[VerifyItem]) -> list[VerdictReply]:
        """Replaces the item of this run-ahead by that of `work`, which must satisfy `continues`.
        Drops all earlier rounds. If the item came twice or over another connection, returns all
        known verdicts from the item's round on, to be sent again. Otherwise returns an empty
        list."""
        rounds = work.item.head.round - self._item.head.round
        may_be_lost = rounds == 0 or work.sender is not self._sender
        del self.replies[:rounds]
        del self._starts[:rounds]
        self._foreseen = None
        self._num_probe_tokens = work.item.num_probe_tokens or self._num_probe_tokens
        self._take(work)
        if self.request is not None:
            self.request.sender = work.sender
        return list(self.replies) if may_be_lost else []

    def add(self, reply: VerdictReply, now: float, held_s: float) -> bool:
        """Adds the verdict of the newest round. Returns whether it may wait for further verdicts,
        for up to `held_s`. The first verdict may not wait. Nor may the middle verdict if the rounds
        after it are short, because it makes the coordinator ask for more rounds."""
        ahead, item, start = self._item.run_ahead, self._item, self._starts[-1]
        self._round_s += (now - self._added_at - self._round_s) * _WEIGHT
        self._added_at = now
        is_middle = len(self.replies) == ahead - ahead // 2
        may_wait = len(self.replies) > 0
        if is_middle and _LATE_ASK * held_s > self._round_s * (ahead // 2):
            may_wait = False
        self.replies.append(reply)
        token_ids, drafted = reply.verdict.correction, start.proposal.token_ids or reply.looked_up
        if drafted:
            noise = RoundNoise(item.head.seed, item.head.rule, start.length)
            uniforms = noise.accept_uniforms(len(drafted))
            token_ids = decide(reply.verdict, drafted, noise.rule, uniforms).token_ids
        before, newest = digest_after(start.digest, token_ids[:-1]), token_ids[-1]
        end = start.length + len(token_ids)
        proposal, left = reply.next_proposal, 0
        if item.num_tokens_left:
            left = item.num_tokens_left - (end - self._length)
            proposal = proposal.cut(max(0, left - 1))
        self._starts.append(_Start(end, extend_digest(before, newest), newest, before, proposal))
        is_full = item.num_tokens_left > 0 and left <= 0
        has_no_draft = item.num_next_draft_tokens > 0 and not reply.next_proposal
        self._is_over = is_full or has_no_draft or not self._ends.isdisjoint(token_ids)
        return may_wait

    def foresee(self, length_max: int) -> VerifyItem | None:
        """Forms the item of the round after the running one, while the token that the running one
        will commit is unknown. Returns None if it may commit several tokens, or if there will be
        no further round."""
        rounds, start = len(self.replies) + 1, self._starts[-1]
        item = self._item
        is_last = item.num_tokens_left == 1 + start.length - self._length
        drafts = item.num_lookup_tokens or item.num_next_draft_tokens or start.proposal
        if rounds <= item.run_ahead and start.length < length_max and not (is_last or drafts):
            end = _Start(start.length + 1, EMPTY_DIGEST, _UNKNOWN, start.digest)
            self._foreseen = self._later_round(end, rounds)
        return self._foreseen

    def next_request(self, now: float, length_max: int) -> StepRequest[VerifyItem] | None:
        """Forms the next round, which appends the last token of the round before it. Returns None
        if all allowed rounds have run, or if the coordinator must ask for the next one. The prefix
        of a round has at most `length_max` tokens."""
        rounds, start = len(self.replies), self._starts[-1]
        foreseen, self._foreseen = self._foreseen, None
        if rounds > self._item.run_ahead or self._is_over or start.length > length_max:
            return None
        item = self._item
        if foreseen is not None:
            item = foreseen
            completed(item.head, append=(start.last_token,))
        elif rounds > 0:
            item = self._later_round(start, rounds)
        if rounds > 0 or item.num_probe_tokens:
            self._num_probe_tokens = 0
        self.request = StepRequest(item, self._sender, now, self._expires_at, self._grammar)
        return self.request

    def _later_round(self, start: _Start, rounds: int) -> VerifyItem:
        """Returns the item of the round that begins at `start`, `rounds` rounds after `_item`."""
        item = self._item
        head = replaced(
            item.head,
            round=item.head.round + rounds,
            base_length=start.length - 1,
            prefix_digest=start.digest_before,
            append=(start.last_token,),
            traceparent="",  # Only the first round is traced.
        )
        room = self._room(start.length)
        return replaced(
            item,
            head=head,
            proposal=start.proposal,
            features_from=None,
            num_tokens_left=room.num_tokens_left,
            num_lookup_tokens=room.num_lookup_tokens,
            num_probe_tokens=self._num_probe_tokens,
            num_next_draft_tokens=room.num_next_draft_tokens,
        )
