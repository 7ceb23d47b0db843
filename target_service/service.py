"""The target's service answers items with verdicts. With *run-ahead*, it computes rounds without a
proposal before the coordinator asks for them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from outrider.errors import Overloaded, check
from outrider.foundation.tokens import extend_digest
from outrider.grammar.compiler import Grammars
from outrider.interfaces.engine import Engine
from outrider.interfaces.messages import RoundHead, VerdictReply, VerifyAnswer, VerifyItem
from outrider.interfaces.step_costs import StepCosts
from outrider.limits import BATCHED_TOKENS_DEFAULT, SEQUENCES_PER_REPLICA_MAX, STREAM_INTERVAL_MS
from outrider.replica.executors import StepExecutor
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_request import CLOSED, AnswerSender, StepRequest
from outrider.replica.token_budget import TokenBudget
from target_service.verifier import SelfDrafter, Verifier


class TargetService(SteppedService):
    """Answers verify items with verdicts of one engine."""

    def __init__(
        self,
        engine: Engine,
        executor: StepExecutor,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = BATCHED_TOKENS_DEFAULT,
        costs: StepCosts | None = None,
        self_drafter: SelfDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
        stream_interval_ms: int = STREAM_INTERVAL_MS,
    ) -> None:
        """A step has at most `max_num_seqs` sessions and `max_num_batched_tokens` tokens. With
        `costs`, the time of a step is limited too, and a step may wait for sessions that are
        expected soon (`BatchingDelay`). A `self_drafter` must use this engine. `clock` measures the
        time of drafting in seconds. Without `grammars`, sessions with a constraint are refused.
        Verdicts of rounds that run ahead wait up to `stream_interval_ms`, because one message with
        several verdicts costs less than several messages."""
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        verifier = Verifier(engine, budget, self_drafter, clock, grammars)
        layer = getattr(engine, "draft_layer", None)
        description = replace(
            describe_model(engine.info, max_num_seqs, costs),
            drafts_itself=self_drafter is not None,
            shows_features=verifier.keeper is not None,
            draft_note="" if layer is None else layer.note,
        )
        super().__init__(verifier, executor, description, budget.round_seconds)
        self._ahead: OrderedDict[str, RunAhead] = OrderedDict()
        self._held_s = stream_interval_ms / 1e3

    def submit(self, work: StepRequest) -> None:
        """Starts or continues the session's run-ahead, if the item allows run-ahead. Otherwise
        queues the item."""
        item, sender, session_id = work.item, work.sender, work.session_id
        ahead = self._ahead.get(session_id)
        if ahead is not None and ahead.continues(item):
            self._ahead.move_to_end(session_id)
            sender.send(ahead.extend(item, sender))
            if ahead.running is None:
                self._run_next(session_id, ahead)
            return
        self._end_ahead(session_id)
        if item.run_ahead > 0 and not item.proposal:
            if len(self._ahead) >= SEQUENCES_PER_REPLICA_MAX:
                idle = (name for name, run in self._ahead.items() if run.running is None)
                self._end_ahead(next(idle, next(iter(self._ahead))), self._refuse_ahead)
            ahead = self._ahead[session_id] = RunAhead(item, sender)
            self._run_next(session_id, ahead)
        else:
            super().submit(work)

    def _run_next(self, session_id: str, ahead: RunAhead) -> None:
        """Queues the next round of a session that runs ahead. If no further round is allowed, sends
        the session's held verdicts."""
        item = ahead.next_item(self._description.max_model_len)
        if item is None:
            ahead.sender.flush(session_id)
            return
        work = self._work(item, ahead.sender)
        if ahead.may_hold:
            work.held_s = self._held_s
        # With `follow`, the executor runs the next round right after this one. One more round must
        # be allowed after these two: while it runs, the coordinator has time to ask for more.
        # Emulated rounds get no `follow`: the executor would sleep for both before it answers.
        is_short = not ahead.allows(len(ahead.replies) + 2, self._description.max_model_len)
        if ahead.replies and not (is_short or self._executor.is_timed):
            work.follow = self._next_round
        work.on_done = partial(self._on_round_done, session_id, ahead)
        ahead.running = work
        super().submit(work)

    def _on_round_done(
        self, session_id: str, ahead: RunAhead, work: StepRequest, answer: VerifyAnswer | None
    ) -> None:
        if self._ahead.get(session_id) is not ahead or ahead.running is not work:
            return
        ahead.running = None
        if isinstance(answer, VerdictReply):
            ahead.add(answer)
            if answer.verdict.correction[0] in self._description.eos_token_ids:
                ahead.sender.flush(session_id)  # The session probably ends with this token.
            self._run_next(session_id, ahead)
        else:
            del self._ahead[session_id]
            ahead.sender.flush(session_id)  # The coordinator must act on this answer.

    def _next_round(self, item: VerifyItem, answer: VerifyAnswer, step_s: float) -> Any:
        """See `StepRequest.follow`."""
        if not isinstance(answer, VerdictReply) or step_s >= self._held_s:
            return None
        [token_id] = answer.verdict.correction
        if token_id in self._description.eos_token_ids:
            return None
        return _later_round(item, 1, _committed_digest(item.head), token_id)

    def _forget(self, session_id: str) -> None:
        self._end_ahead(session_id, lambda work: self._cancel([work]))

    def _refuse_ahead(self, work: StepRequest) -> None:
        self._refuse(work, Overloaded("too many sessions run ahead on this target", 100))

    def _end_ahead(
        self, session_id: str, tell: Callable[[StepRequest], None] = lambda work: None
    ) -> None:
        """Ends a session's run-ahead. If a round waits or runs, drops its verdict, and calls `tell`
        with its request. A caller that has a newer item of the session needs no `tell`."""
        ahead = self._ahead.pop(session_id, None)
        if ahead is not None and (work := ahead.running) is not None:
            tell(work)
            work.sender = CLOSED


class RunAhead:
    """A session's run-ahead: the round of `item`, and up to `item.run_ahead` further rounds. Each
    round commits one token.

    | round | committed length at its start | verdict |
    | --- | --- | --- |
    | `item.head.round + j` | `item.head.committed_length + j` | `replies[j]`, once it is known |"""

    def __init__(self, item: VerifyItem, sender: AnswerSender) -> None:
        self.sender = sender
        self.running: StepRequest | None = None  # the round that is queued or being computed
        self._item = item
        self.replies: list[VerdictReply] = []
        # Digests of the tokens before the first round, and after each reply.
        self._digests = [_committed_digest(item.head)]

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

    @property
    def may_hold(self) -> bool:
        """Whether the next verdict may wait for further verdicts. The first verdict may not wait.
        Nor may the middle verdict, because it makes the coordinator ask for more rounds."""
        ahead = self._item.run_ahead
        return len(self.replies) not in (0, ahead - ahead // 2)

    def extend(self, item: VerifyItem, sender: AnswerSender) -> list[VerdictReply]:
        """Replaces the item of this run-ahead by `item`, which must satisfy `continues`. Drops all
        earlier rounds. If the item came twice or over another connection, returns all known
        verdicts from the item's round on, to be sent again. Otherwise returns an empty list."""
        rounds = item.head.round - self._item.head.round
        may_be_lost = rounds == 0 or sender is not self.sender
        del self.replies[:rounds]
        del self._digests[:rounds]
        self._item = item
        self.sender = sender
        if self.running is not None:
            self.running.sender = sender
        return list(self.replies) if may_be_lost else []

    def add(self, reply: VerdictReply) -> None:
        check(len(reply.verdict.correction) == 1, "a round without a proposal has one correction")
        self.replies.append(reply)
        self._digests.append(extend_digest(self._digests[-1], reply.verdict.correction[0]))

    def next_item(self, length_max: int) -> VerifyItem | None:
        """Returns the next round to run, or None if all allowed rounds have run (see `allows`). The
        first round is `item`. Each later round appends the token of the round before it."""
        rounds = len(self.replies)
        if rounds == 0:
            return self._item
        if not self.allows(rounds, length_max):
            return None
        [token_id] = self.replies[-1].verdict.correction
        return _later_round(self._item, rounds, self._digests[rounds - 1], token_id)

    def allows(self, rounds: int, length_max: int) -> bool:
        """Whether the round that comes `rounds` rounds after `item` may run. The prefix of that
        round must have at most `length_max` tokens."""
        is_long = self._item.head.committed_length + rounds > length_max
        return rounds <= self._item.run_ahead and not is_long


def _committed_digest(head: RoundHead) -> int:
    return reduce(extend_digest, head.append, head.prefix_digest)


def _later_round(item: VerifyItem, rounds: int, digest: int, token_id: int) -> VerifyItem:
    """Returns the item of a later round, `rounds` rounds after `item`. A round commits one token.
    The returned item appends `token_id` to a prefix with this `digest`."""
    head = item.head
    own = replace(
        head,
        round=head.round + rounds,
        base_length=head.committed_length + rounds - 1,
        prefix_digest=digest,
        append=(token_id,),
        traceparent="",  # Only the first round is traced.
    )
    return replace(item, head=own, features_from=None)
