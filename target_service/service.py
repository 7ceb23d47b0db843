"""The target as a `ReplicaService`: receives items from streams, answers with verdicts, and runs
ahead."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from outrider.engine.interface import Engine
from outrider.engine.step_costs import StepCosts
from outrider.errors import check
from outrider.grammar.compiler import Grammars
from outrider.limits import BATCHED_TOKENS_DEFAULT, SEQUENCES_PER_REPLICA_MAX
from outrider.messages import VerdictReply, VerifyAnswer, VerifyItem
from outrider.replica.batching_delay import BatchingDelay
from outrider.replica.executors import StepExecutor
from outrider.replica.service import SteppedService, describe_model
from outrider.replica.step_request import AnswerSender, StepRequest
from outrider.replica.token_budget import TokenBudget
from outrider.tokens import extend_digest
from target_service.self_drafting import SelfDrafter
from target_service.verifier import Verifier


class TargetService(SteppedService):
    """Serves any number of streams with one engine."""

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
    ) -> None:
        """A step has at most `max_num_seqs` sessions and `max_num_batched_tokens` tokens, or fewer
        if `costs` show that other sessions would notice the longer step. It waits for sessions that
        will soon be ready, if `costs` say that this pays. A `self_drafter` must belong to this
        engine; its time is measured by `clock`, in seconds. Without `grammars` (of the engine's
        tokenizer) sessions with a constraint are refused."""
        budget = TokenBudget(max_num_batched_tokens, max_num_seqs, costs)
        verifier = Verifier(engine, budget, self_drafter, clock, grammars)
        layer = getattr(engine, "draft_layer", None)
        description = replace(
            describe_model(engine.info, max_num_seqs, costs),
            drafts_itself=self_drafter is not None,
            shows_features=verifier.keeper is not None,
            draft_note="" if layer is None else layer.note,
        )
        batching_delay = None if costs is None else BatchingDelay(costs.step_seconds, max_num_seqs)
        super().__init__(verifier, executor, description, budget.note_seconds, batching_delay)
        self._ahead: OrderedDict[str, RunAhead] = OrderedDict()

    def submit(self, work: StepRequest) -> None:
        """Lets a session run ahead, or further ahead if it does already; queues any other item."""
        item, [sender] = work.item, work.senders
        session_id = item.head.session_id
        ahead = self._ahead.get(session_id)
        if ahead is not None and ahead.continues(item):
            sender.send(ahead.extend(item, sender))
            if ahead.running is None:
                self._run_next(session_id, ahead)
            return
        self._forget(session_id)
        if item.run_ahead > 0 and not item.proposal:
            ahead = self._ahead[session_id] = RunAhead(item, sender)
            if len(self._ahead) > SEQUENCES_PER_REPLICA_MAX:
                self._forget(next(iter(self._ahead)))
            self._run_next(session_id, ahead)
        else:
            super().submit(work)

    def _run_next(self, session_id: str, ahead: RunAhead) -> None:
        """Puts the next round of a session that runs ahead, if it may have one, at the end of the
        queue."""
        item = ahead.next_item(self._description.max_model_len)
        if item is None:
            ahead.sender.flush(session_id)
            return
        work = self._work(item, ahead.sender)
        work.may_wait = bool(ahead.replies)
        work.on_done = partial(self._on_round_done, session_id, ahead)
        ahead.running = work
        super().submit(work)

    def _on_round_done(
        self,
        session_id: str,
        ahead: RunAhead,
        work: StepRequest,
        answer: VerifyAnswer | None,
    ) -> None:
        if self._ahead.get(session_id) is not ahead or ahead.running is not work:
            return
        ahead.running = None
        if isinstance(answer, VerdictReply):
            ahead.add(answer)
            if answer.verdict.correction[0] in self._description.eos_token_ids:
                ahead.sender.flush(session_id)  # The session probably ends.
            self._run_next(session_id, ahead)
        else:
            del self._ahead[session_id]

    def _forget(self, session_id: str) -> None:
        ahead = self._ahead.pop(session_id, None)
        if ahead is not None and ahead.running is not None:
            ahead.running.cancelled = True


class RunAhead:
    """The rounds of one session from `item` on: which were answered, and how far they may go.

    | round | committed length at its start | verdict |
    | --- | --- | --- |
    | first | `item.head.committed_length` | `replies[0]` |
    | first + j | the same + j | `replies[j]`, or not yet |
    """

    def __init__(self, item: VerifyItem, sender: AnswerSender) -> None:
        self.sender = sender
        self.running: StepRequest | None = None
        """The round that is queued or being computed."""
        self._item = item
        self.replies: list[VerdictReply] = []
        """The verdicts from the item's round on."""
        self._tokens: list[int] = list(item.head.append)
        """Committed tokens after `item.head.base_length`, including those of these rounds."""
        self._digests: list[int] = [item.head.prefix_digest]
        """Digests of the prefixes that end before and after each of `_tokens`."""
        for token_id in self._tokens:
            self._digests.append(extend_digest(self._digests[-1], token_id))

    @property
    def _last_round(self) -> int:
        return self._item.head.round + self._item.run_ahead

    def continues(self, item: VerifyItem) -> bool:
        """Whether `item` states a prefix that these rounds have reached and still know, and allows
        at least as many rounds. An item that allows fewer is from another coordinator, which may
        draft sooner: it must not get verdicts of rounds that it did not ask for."""
        mine, asked = self._item.head, item.head
        offset = asked.base_length - mine.base_length
        rounds = asked.round - mine.round
        return (
            not item.proposal
            and 0 <= rounds <= len(self.replies)
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

    def extend(self, item: VerifyItem, sender: AnswerSender) -> list[VerdictReply]:
        """Moves the beginning to `item`, which `continues` these rounds, and extends the allowance.
        Returns the known verdicts from its round on if they may be lost: if the item repeats its
        round, or came over another connection."""
        rounds = item.head.round - self._item.head.round
        may_be_lost = rounds == 0 or sender is not self.sender
        offset = item.head.base_length - self._item.head.base_length
        del self.replies[:rounds]
        del self._tokens[:offset]
        del self._digests[:offset]
        self._item = item
        self.sender = sender
        if self.running is not None:
            self.running.senders = [sender]
        return list(self.replies) if may_be_lost else []

    def add(self, reply: VerdictReply) -> None:
        check(len(reply.verdict.correction) == 1, "a round without a proposal has one correction")
        token_id = reply.verdict.correction[0]
        self.replies.append(reply)
        self._tokens.append(token_id)
        self._digests.append(extend_digest(self._digests[-1], token_id))

    def next_item(self, length_max: int) -> VerifyItem | None:
        """The next round; None if the allowance or `length_max` tokens forbid it. The requested
        round is always allowed. A later round's base is what the round before has left in the
        cache. It appends that round's token, and asks for no features."""
        head = self._item.head
        rounds = len(self.replies)
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
            traceparent="",  # It belongs to the requested round, not to this one.
        )
        return replace(self._item, head=own, features_from=None)
