"""Plain decoding ahead of the coordinator: rounds without a proposal that were not asked for yet.

In such a round the target's correction is the token that gets committed, whatever the rule, so the
target knows the next round's prefix without being told. The coordinator checks each verdict all
the same, and extends the allowance by asking for a round that it has reached.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.errors import check
from outrider.messages import VerdictReply, VerifyAnswer, VerifyItem
from outrider.replica.step_request import AnswerSender, StepRequest
from outrider.tokens import extend_digest


class RunAhead:
    """The rounds of one session from `item`'s on: which were answered and how far they may go.

    | round | committed length at its start | verdict |
    | --- | --- | --- |
    | first | `item.head.committed_length` | `replies[0]` |
    | first + j | the same + j | `replies[j]`, or not yet |
    """

    def __init__(self, item: VerifyItem, outlet: AnswerSender[VerifyAnswer]) -> None:
        check(not item.proposal, "a round with a proposal is never run ahead of")
        self.outlet = outlet
        self.running: StepRequest[VerifyItem, VerifyAnswer] | None = None
        """The round that is queued or being computed."""
        self._item = item
        self._last_round = item.head.round + item.run_ahead
        self._replies: list[VerdictReply] = []
        self._tokens: list[int] = list(item.head.append)
        """Committed tokens after `item.head.base_length`, own ones included ..."""
        self._digests: list[int] = [item.head.prefix_digest]
        """... and the digests of their prefixes."""
        for token_id in self._tokens:
            self._digests.append(extend_digest(self._digests[-1], token_id))

    @property
    def is_ahead(self) -> bool:
        """Whether the round that was asked for is answered."""
        return bool(self._replies)

    def continues(self, item: VerifyItem) -> bool:
        """Whether `item` states a prefix that these rounds have reached and still remember, and
        allows at least the rounds they were allowed. A coordinator that allows fewer is another
        one, which may draft sooner: it must not get verdicts of rounds that it did not ask for."""
        mine, asked = self._item.head, item.head
        offset = asked.base_length - mine.base_length
        rounds = asked.round - mine.round
        return (
            not item.proposal
            and 0 <= rounds <= len(self._replies)
            and asked.round + item.run_ahead >= self._last_round
            and asked.committed_length - mine.committed_length == rounds
            and 0 <= offset < len(self._digests)
            and self._digests[offset] == asked.prefix_digest
            and tuple(self._tokens[offset : offset + len(asked.append)]) == asked.append
            and item.num_logprobs == self._item.num_logprobs
            and (asked.epoch, asked.rule, asked.seed, asked.prompt_length, asked.sampling)
            == (mine.epoch, mine.rule, mine.seed, mine.prompt_length, mine.sampling)
            and asked.constraint_hash == mine.constraint_hash
        )

    def extend(self, item: VerifyItem, outlet: AnswerSender[VerifyAnswer]) -> list[VerdictReply]:
        """Moves the beginning to `item`, which `continues` these rounds, and the allowance on.
        Returns the verdicts known from its round on if they may have been lost on the way: where
        that round is asked for again, or over another connection."""
        rounds = item.head.round - self._item.head.round
        may_be_lost = rounds == 0 or outlet is not self.outlet
        offset = item.head.base_length - self._item.head.base_length
        del self._replies[:rounds]
        del self._tokens[:offset]
        del self._digests[:offset]
        self._last_round = item.head.round + item.run_ahead
        self._item = item
        self.outlet = outlet
        if self.running is not None:
            self.running.outlets = [outlet]
        return list(self._replies) if may_be_lost else []

    def add(self, reply: VerdictReply) -> None:
        """Notes the verdict of the round that was running."""
        check(len(reply.verdict.correction) == 1, "a round without a proposal has one correction")
        token_id = reply.verdict.correction[0]
        self._replies.append(reply)
        self._tokens.append(token_id)
        self._digests.append(extend_digest(self._digests[-1], token_id))

    def next_item(self, length_max: int) -> VerifyItem | None:
        """The next round, if the allowance and `length_max` tokens reach that far; the round that
        was asked for in any case. It states as held what the round before has left in the cache,
        and appends that round's own token."""
        head = self._item.head
        rounds = len(self._replies)
        if rounds == 0:
            return self._item
        if head.round + rounds > self._last_round or head.committed_length + rounds > length_max:
            return None
        held = head.committed_length + rounds - 1
        own = replace(
            head,
            round=head.round + rounds,
            base_length=held,
            prefix_digest=self._digests[held - head.base_length],
            append=(self._tokens[-1],),
            traceparent="",  # It names the round that was asked for, and this is another one.
        )
        return replace(self._item, head=own)
