"""Look-ahead: drafts for the likely outcomes of rounds whose verdict is not known yet.

Let C be the committed tokens of a session, and x_1..x_K the proposal of its newest round.

- The round is *read*: one pass runs x_1..x_K after C. For n = 0..K, a row of logits predicts the
  token y that follows n accepted draft tokens.
- An *outcome* is x_1..x_n y. After each likely outcome, a proposal is drafted, on a fork of the
  session's sequence. A finished proposal is pushed to the coordinator, with the assumed outcome.

A round begins when its `DraftItem` arrives. If the coordinator already has a proposal, the item
contains this proposal. Otherwise the coordinator waits for a draft. If a draft for the actual
outcome of the previous round is running, it continues. Otherwise a new draft begins. A pass adds a
token to each awaited draft and, if the pass has room for more, to the drafts of likely outcomes.

The draft of x_1..x_K has often run all tokens but x_K. If it has also kept the distributions of all
x_i, these distributions predict the outcomes that end with a correction. The drafts of these
outcomes then begin before the round is read."""

import logging
from collections.abc import Sequence
from itertools import count

import torch

from draft_service.model_drafter import ModelDrafter
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline, DraftRequest
from outrider.errors import EngineLost, OutriderError
from outrider.foundation.tokens import EMPTY_DIGEST, digest_after
from outrider.interfaces.engine import ModelInfo, SequenceStep
from outrider.interfaces.messages import DraftAnswer, DraftItem, ProposalReply, Refused, ReplyKey
from outrider.limits import LOOK_AHEAD_BYTES_MAX
from outrider.replica.admission import draft_request
from outrider.replica.step_request import Answers, refusal
from outrider.speculation.draft_sampling import LikelyTokens, likely_tokens
from outrider.speculation.logits_processing import allowed_by_min_tokens, joined_rows
from outrider.speculation.outcome_prediction import (
    OutcomeGuesses,
    OutcomeModel,
    OutcomeModels,
    guess_outcomes,
)
from outrider.speculation.proposal import EMPTY_ENCODED_PROPOSAL, EncodedProposal
from outrider.speculation.sampling_params import SamplingParams

_log = logging.getLogger(__name__)
Outcome = tuple[int, ...]  # x_1..x_n y: the tokens that a round may commit; () = unknown


class RoundAhead:
    def __init__(
        self,
        item: DraftItem,
        deadline: DraftDeadline,
        committed: tuple[int, ...],
        unseen: tuple[int, ...],
        digest: int,
    ) -> None:
        """The round of `item`. `committed` has this `digest`, and ends with `unseen`, the tokens
        that the session's sequence lacks."""
        self.item = item
        self.deadline = deadline  # the time limit of the draft that the coordinator waits for
        self.committed = committed
        self.digest = digest  # of `committed`
        self.unseen = unseen  # last committed tokens, which the session's own sequence has not run
        self.bytes_left = LOOK_AHEAD_BYTES_MAX  # bytes of proposals that may still be pushed
        self.drafted: tuple[int, ...] = ()  # x_1..x_K, once they are known
        self.wanted: AutoregressiveDraft | None = None  # the draft that the coordinator waits for
        self.basis: AutoregressiveDraft | None = None
        """The draft of x_1..x_K, if its sequence still holds all tokens but x_K, and the
        distributions of all x_i were kept."""
        self.is_read = False  # whether the round was read, or cannot be read
        self.guesses: OutcomeGuesses | None = None
        self.chances: dict[Outcome, float] = {}  # the probability of each likely outcome
        self.outcomes: dict[Outcome, AutoregressiveDraft] = {}  # the unfinished drafts
        self.finished: dict[Outcome, EncodedProposal] = {}
        self.kept: dict[Outcome, AutoregressiveDraft] = {}
        """Finished drafts whose sequences still exist. One of them may be the next `basis`."""
        self.num_drawn: dict[Outcome, int] = {}
        """The largest number of tokens that an abandoned draft of each outcome has drawn."""

    @property
    def session_id(self) -> str:
        return self.item.head.session_id

    @property
    def sampling(self) -> SamplingParams:
        return self.item.head.params()

    @property
    def to_read(self) -> tuple[int, ...]:
        """The tokens that the session's own sequence must run to read the round."""
        if self.basis is not None and self.basis.sequence_id == self.session_id:
            return self.drafted[-1:]
        return (*self.unseen, *self.drafted)

    @property
    def reading(self) -> SequenceStep:
        """The step that reads the round. It asks for the logits that predict the bonus and, if
        there is no `basis`, the corrections."""
        num_logits = 1 if self.basis is not None else len(self.drafted) + 1
        return SequenceStep(self.session_id, self.to_read, num_logits)

    def request(self, name: str, outcome: Outcome, info: ModelInfo) -> DraftRequest:
        """The request for a draft after `outcome`; () = for this round itself."""
        head, sampling, committed = self.item.head, self.sampling, (*self.committed, *outcome)
        num_tokens = len(committed) - head.prompt_length
        return draft_request(
            head,
            sampling,
            committed,
            len(committed),
            digest_after(self.digest, outcome),
            name=name,
            num_draft_tokens=self.item.num_draft_tokens,
            allowed=allowed_by_min_tokens(
                sampling, num_tokens, info.eos_token_ids, info.vocab_size
            ),
        )

    def abandon(self, outcome: Outcome) -> AutoregressiveDraft:
        """Gives up an unfinished draft, whose sequence the caller must release. If the outcome
        comes true, its next draft draws at least as many tokens."""
        branch = self.outcomes.pop(outcome)
        self.num_drawn[outcome] = max(self.num_drawn.get(outcome, 0), len(branch.token_ids))
        return branch


class LookAhead:
    """The newest rounds of a draft replica's sessions. For use by the thread of the steps only."""

    def __init__(self, drafter: ModelDrafter, max_num_seqs: int) -> None:
        self._engine = drafter.engine
        self._drafter = drafter
        self._max_num_seqs = max_num_seqs
        self._rounds: dict[str, RoundAhead] = {}
        self._outcome_models = OutcomeModels()
        self._numbers = count()
        self._stale: list[AutoregressiveDraft] = []  # drafts of ended rounds, not yet released

    def works_on(self, item: DraftItem) -> bool:
        """Whether the newest round of the item's session belongs to this item."""
        ahead = self._rounds.get(item.head.session_id)
        return ahead is not None and ahead.item is item

    def progress(self, item: DraftItem) -> Answers:
        """Returns no answers, only whether any will follow. `works_on(item)` must be true."""
        return self._advanced(self._rounds[item.head.session_id], ())

    def begin(self, ahead: RoundAhead) -> Answers:
        """Ends the session's previous round and begins the round `ahead`. Returns the answers that
        are known."""
        before = self._rounds.get(ahead.session_id)
        if before is None:
            before = RoundAhead(ahead.item, ahead.deadline, (), (), EMPTY_DIGEST)
        self._rounds[ahead.session_id] = ahead
        outcome = self._actual_outcome(before, ahead.committed)
        answers: list[DraftAnswer] = []
        if ahead.item.held is not None:
            ahead.drafted = ahead.item.held
        elif outcome in before.finished:
            answers.append(self._answer(ahead, before.finished[outcome]))
        else:
            taken = before.outcomes.pop(outcome, None)
            answers += self._begin_wanted(ahead, taken, before.num_drawn.get(outcome, 0))
        branch = before.kept.get(outcome)
        if branch is not None and ahead.drafted and ahead.basis is None:
            is_its = tuple(branch.token_ids[: len(ahead.drafted)]) == ahead.drafted
            if is_its and self._drafter.holds(branch):
                ahead.basis = before.kept.pop(outcome)
        self._end(before)
        return self._advanced(ahead, answers)

    def advance(self, items: Sequence[DraftItem]) -> list[Answers]:
        """Runs one pass for the rounds of these items. `works_on` must be true for all items.
        Raises the errors of the engine."""
        rounds = [self._rounds[item.head.session_id] for item in items]
        for ahead in rounds:
            self._drop_evicted(ahead)
        room = self._max_num_seqs
        waiting = [ahead.wanted for ahead in rounds if ahead.wanted is not None]
        wanted = [branch for branch in waiting if branch.goes_on()][:room]
        room -= len(wanted)
        unread = [ahead for ahead in rounds if ahead.wanted is None and not ahead.is_read]
        read = [ahead for ahead in unread if self._is_readable(ahead)][:room]
        for ahead in read:
            if ahead.basis is not None and ahead.guesses is None:
                self._begin_outcomes(ahead, None)
        readings = [ahead.reading for ahead in read]
        chosen = self._likeliest(rounds, room - len(read), wanted, readings)
        try:
            logits = self._drafter.advance([*wanted, *chosen], readings)
        except Exception as error:
            if not self._recover(wanted, error):
                raise
        else:
            likely = self._likely_rows(read, logits) if read else []
            for ahead, rows in zip(read, likely, strict=True):
                ahead.is_read = True
                self._begin_outcomes(ahead, rows)
                self._drop_basis(ahead)
            if not read or len(self._stale) > self._max_num_seqs:
                self._release(self._stale)
        for ahead in unread:
            ahead.is_read = ahead.is_read or ahead in read or not self._is_readable(ahead)
        return [self._advanced(ahead, self._collect_finished(ahead)) for ahead in rounds]

    def _likeliest(
        self,
        rounds: Sequence[RoundAhead],
        most: int,
        wanted: Sequence[AutoregressiveDraft],
        readings: Sequence[SequenceStep],
    ) -> list[AutoregressiveDraft]:
        """Returns the drafts of the likeliest outcomes, at most `most`. If pages are too few for
        the pass, ends the drafts of the least likely outcomes."""
        candidates = [(ahead, outcome) for ahead in rounds for outcome in ahead.outcomes]
        candidates.sort(key=lambda pair: pair[0].chances[pair[1]], reverse=True)
        del candidates[most:]
        chosen = [ahead.outcomes[outcome] for ahead, outcome in candidates]
        if not self._drafter.can_advance([*wanted, *chosen], readings):
            self._release(self._stale)
            for other in self._rounds.values():
                self._release(other.kept)
            while chosen and not self._drafter.can_advance([*wanted, *chosen], readings):
                ahead, outcome = candidates.pop()
                self._release([ahead.abandon(outcome)])
                chosen.pop()
        return chosen

    def forget(self, session_id: str) -> None:
        self._outcome_models.forget(session_id)
        ahead = self._rounds.pop(session_id, None)
        if ahead is not None:
            self._end(ahead)
            self._release(self._stale)

    def drop_drafts(self) -> None:
        self._release(self._stale)
        for ahead in self._rounds.values():
            self._drop(ahead)

    def _advanced(self, ahead: RoundAhead, answers: Sequence[DraftAnswer]) -> Answers:
        if any(isinstance(answer, Refused) for answer in answers):
            self.forget(ahead.session_id)
            return Answers(tuple(answers), more=False)
        is_over = ahead.is_read and not ahead.outcomes
        return Answers(tuple(answers), not is_over, ahead.wanted is not None)

    def _actual_outcome(self, before: RoundAhead, committed: tuple[int, ...]) -> Outcome:
        """Returns the actual outcome of the round `before`, and reports it to the outcome model.
        Returns () if nothing was guessed, or if later rounds have committed tokens."""
        length, guesses = len(before.committed), before.guesses
        outcome = committed[length:]
        num_accepted = len(outcome) - 1
        if (
            guesses is None
            or not 0 <= num_accepted <= guesses.num_drafted
            or committed[: length + num_accepted]
            != (*before.committed, *before.drafted[:num_accepted])
        ):
            return ()
        rank = guesses.rank(num_accepted, outcome[-1])
        self._outcome_model(before).note(guesses, num_accepted, rank)
        return outcome

    def _begin_wanted(
        self, ahead: RoundAhead, taken: AutoregressiveDraft | None, num_drawn: int
    ) -> list[DraftAnswer]:
        """Continues `taken`, the draft of the actual outcome, or begins a new draft. If `taken` has
        at least half of the wanted tokens, proposes the tokens it has. Each further token would
        take a pass, and the last tokens are the least likely to be accepted. The number of tokens
        depends on when the item arrived. This time is independent of the numbers with which the
        next tokens would be drawn. A round without a time limit gets all tokens. Abandoned drafts
        of the same outcome have drawn `num_drawn` tokens."""
        if taken is not None:
            num_held = len(taken.token_ids)
            taken.num_wanted = min(taken.num_wanted, ahead.item.num_draft_tokens)
            is_timed = ahead.deadline is not NO_DEADLINE
            if is_timed and 2 * num_held >= taken.num_wanted and num_held >= num_drawn:
                taken.num_wanted = min(taken.num_wanted, num_held)
        branch = taken or self._drafter.begin(
            ahead.request(ahead.session_id, (), self._engine.info)
        )
        branch.num_due = num_drawn
        if branch.num_wanted == 0:
            if taken is not None:
                self._release([taken])
            return [self._answer(ahead, EMPTY_ENCODED_PROPOSAL)]
        branch.deadline = ahead.deadline
        ahead.wanted = branch
        return [self._answer_wanted(ahead, branch)] if branch.is_whole else []

    def _answer(
        self, ahead: RoundAhead, proposal: EncodedProposal, out_of_time: bool = False
    ) -> ProposalReply:
        # A proposal that was drafted before the item came may be too long.
        proposal = proposal.cut(ahead.item.num_draft_tokens)
        ahead.drafted = proposal.token_ids
        held = self._engine.length(ahead.session_id)
        key = ahead.item.head.key
        return ProposalReply(key, proposal, len(ahead.committed), held, out_of_time=out_of_time)

    def _is_readable(self, ahead: RoundAhead) -> bool:
        info = self._engine.info
        length = len(ahead.committed) + len(ahead.drafted)
        return (
            self._engine.length(ahead.session_id) == length - len(ahead.to_read)
            and ahead.item.num_draft_tokens > 0
            and ahead.item.look_ahead > 0
            and not ahead.sampling.penalised
            and length < info.max_model_len
            and max(ahead.to_read) < info.vocab_size
        )

    def _likely_rows(
        self, rounds: Sequence[RoundAhead], logits: Sequence[torch.Tensor]
    ) -> list[LikelyTokens | None]:
        """Returns the likely tokens of each round's rows; None if a row is not a distribution."""
        sizes = [*map(len, logits)]
        params = [
            ahead.sampling for ahead, num in zip(rounds, sizes, strict=True) for _ in range(num)
        ]
        try:
            rows = likely_tokens(joined_rows(logits), params, self._drafter.vocabulary)
        except OutriderError as error:
            if len(rounds) == 1:
                _log.debug("the outcomes of a round cannot be predicted: %s", error)
                return [None]
            alone = zip(rounds, logits, strict=True)
            return [self._likely_rows([ahead], [own])[0] for ahead, own in alone]
        return [*rows.split(sizes)]

    def _begin_outcomes(self, ahead: RoundAhead, read: LikelyTokens | None) -> None:
        """Begins to draft the likeliest outcomes, and ends the drafts of other outcomes. `read` has
        the likely tokens of the rows of `ahead.reading`; None = not read yet, or unusable."""
        # For each x_i, the likely tokens of its distribution.
        parts = [] if ahead.basis is None else ahead.basis.rows[: len(ahead.drafted)]
        if read is not None:
            parts.append(read)
        if not parts:
            return
        rows, noise = LikelyTokens.joined(parts), ahead.item.head.noise
        try:
            ahead.guesses = guess_outcomes(rows, ahead.sampling, noise, ahead.drafted)
        except OutriderError as error:
            _log.debug("the outcomes of a round cannot be predicted: %s", error)
            return
        corrections = ahead.guesses.corrections
        ahead.chances = {
            (
                *ahead.drafted[: likely.num_accepted],
                corrections[likely.num_accepted][likely.rank],
            ): likely.chance
            for likely in self._outcome_model(ahead).plan(ahead.guesses, ahead.item.look_ahead)
        }
        unlikely = [outcome for outcome in ahead.outcomes if outcome not in ahead.chances]
        self._release([ahead.abandon(outcome) for outcome in unlikely])
        for outcome in ahead.chances:
            if outcome not in ahead.outcomes and outcome not in ahead.finished:
                self._branch_off(ahead, outcome)

    def _branch_off(self, ahead: RoundAhead, outcome: Outcome) -> None:
        name = f"{ahead.session_id}/{next(self._numbers)}"
        source = (
            ahead.session_id if ahead.basis is None or ahead.is_read else ahead.basis.sequence_id
        )
        self._engine.fork(source, name)
        self._engine.keep(name, len(ahead.committed) + len(outcome) - 1)
        request = ahead.request(name, outcome, self._engine.info)
        branch = self._drafter.begin(request)
        if branch.num_wanted == 0:
            self._engine.release(name)
        else:
            ahead.outcomes[outcome] = branch

    def _collect_finished(self, ahead: RoundAhead) -> list[DraftAnswer]:
        answers: list[DraftAnswer] = []
        if ahead.wanted is not None and ahead.wanted.is_whole:
            answers.append(self._answer_wanted(ahead, ahead.wanted))
        for outcome, branch in [*ahead.outcomes.items()]:
            if not branch.is_whole:
                continue
            del ahead.outcomes[outcome]
            if branch.is_seen and self._drafter.holds(branch):
                ahead.kept[outcome] = branch
            else:
                self._release([branch])
            if branch.token_ids:
                answers += self._pushed(ahead, outcome, EncodedProposal.of(branch.proposal))
        return answers

    def _answer_wanted(self, ahead: RoundAhead, branch: AutoregressiveDraft) -> DraftAnswer:
        ahead.wanted = None
        is_own = branch.sequence_id == ahead.session_id
        if branch.error is not None:
            if not is_own:
                self._release([branch])
            return refusal(ahead.item.head.key, branch.error)
        answer = self._answer(ahead, EncodedProposal.of(branch.proposal), branch.deadline.has_cut)
        if branch.is_seen and self._drafter.holds(branch):
            ahead.basis = branch
        elif not is_own:
            self._release([branch])
        elif branch.token_ids or not branch.deadline.has_cut:  # Otherwise the draft never ran.
            length = len(ahead.committed) - 1
            is_held = self._engine.keep(ahead.session_id, length) == length
            ahead.unseen = ahead.committed[-1:] if is_held else ()
        return answer

    def _pushed(
        self, ahead: RoundAhead, outcome: Outcome, proposal: EncodedProposal
    ) -> list[ProposalReply]:
        key, length = ahead.item.head.key, len(ahead.committed)
        reply = ProposalReply(
            ReplyKey(key.session_id, key.epoch, key.round + 1),
            proposal,
            length,
            length + len(outcome) - 1,
            assumed=outcome,
        )
        ahead.finished[outcome] = proposal
        if (
            reply.num_bytes > ahead.bytes_left
        ):  # The session's next item may still use the proposal.
            return []
        ahead.bytes_left -= reply.num_bytes
        return [reply]

    def _recover(self, wanted: Sequence[AutoregressiveDraft], error: Exception) -> bool:
        """Handles the error of a pass. Drops the drafts of all outcomes. Every `wanted` draft that
        has tokens ends with these tokens.

        An `OutriderError` other than `EngineLost` is the fault of one draft, so each `wanted` draft
        without tokens runs again alone. After any other error, drafts without tokens fail. But if
        no draft has tokens, returns False, and the caller must raise the error."""
        _log.info("a pass of the draft failed: %r", error)
        self.drop_drafts()
        is_draft_fault = isinstance(error, OutriderError) and not isinstance(error, EngineLost)
        if not is_draft_fault and not any(branch.token_ids for branch in wanted):
            return False
        for branch in wanted:
            if not is_draft_fault or branch.token_ids:
                self._drafter.end(branch, error)
            elif not self._drafter.holds(branch):
                branch.stop()
            else:
                try:
                    self._drafter.advance([branch])
                except EngineLost:
                    raise
                except OutriderError as own_error:
                    self._drafter.end(branch, own_error)
        return True

    def _drop_evicted(self, ahead: RoundAhead) -> None:
        """Drops the outcomes whose drafts have lost their pages. A wanted draft that has lost its
        pages ends with the tokens that it has."""
        if ahead.wanted is not None and not self._drafter.holds(ahead.wanted):
            ahead.wanted.stop()
        for outcome in [
            at for at, draft in ahead.outcomes.items() if not self._drafter.holds(draft)
        ]:
            ahead.abandon(outcome)

    def _release(
        self, branches: list[AutoregressiveDraft] | dict[Outcome, AutoregressiveDraft]
    ) -> None:
        for branch in branches.values() if isinstance(branches, dict) else branches:
            self._engine.release(branch.sequence_id)
        branches.clear()

    def _end(self, ahead: RoundAhead) -> None:
        """Ends a round. The sequences of finished drafts are released after a later pass. A
        release now would delay the next pass, for which a coordinator may wait."""
        if ahead.wanted is not None and ahead.wanted.sequence_id != ahead.session_id:
            self._release([ahead.wanted])
        self._stale += ahead.kept.values()
        ahead.kept.clear()
        self._drop(ahead)

    def _drop(self, ahead: RoundAhead) -> None:
        self._release([ahead.abandon(outcome) for outcome in [*ahead.outcomes]])
        self._release(ahead.kept)
        self._drop_basis(ahead)

    def _drop_basis(self, ahead: RoundAhead) -> None:
        if ahead.basis is not None and ahead.basis.sequence_id != ahead.session_id:
            self._release([ahead.basis])
            ahead.basis = None

    def _outcome_model(self, ahead: RoundAhead) -> OutcomeModel:
        head = ahead.item.head
        return self._outcome_models.of(
            ahead.session_id, head.epoch, head.seed, head.rule, ahead.sampling.temperature
        )
