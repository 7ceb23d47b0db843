"""Work on rounds whose outcome nobody knows yet, beside proposals that somebody waits for.

    a round       C = committed tokens, x_1..x_K = its proposal
    read          C x_1..x_K is run in one pass; its rows say how each outcome may go on
    outcomes      C x_1..x_n y for likely n and y: forks of the session, all drafted together
    pushed        each finished proposal, with the tokens x_1..x_n y that it assumes

A round is begun by its item: with the proposal, where the coordinator holds one; or with an outcome
of the round before that has come true and is still being drafted; or with nothing, and the session
itself is drafted. Everything advances a token a pass. What somebody waits for goes first, then the
likeliest outcomes of all sessions, as many as the engine takes.

Whoever drafted the proposal has run all of it but x_K, and may know what each token was drawn
from. Then refusals are guessed and branch off there at once, beside the pass that reads x_K for the
bonus.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from draft_service.model_drafter import ModelDrafter
from outrider.drafters.autoregressive_draft import AutoregressiveDraft
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine, SequenceStep
from outrider.errors import EngineLost, OutOfPages, OutriderError
from outrider.kv_cache.session_table import SessionTable
from outrider.messages import DraftAnswer, DraftItem, ProposalReply, Refused, ReplyKey
from outrider.replica.step_request import Answers, refusal
from outrider.speculation.draft_sampling import LikelyTokens
from outrider.speculation.outcome_prediction import (
    RANKS_MAX,
    LikelyOutcome,
    OutcomeGuesses,
    OutcomeModel,
    OutcomeModels,
    guess_outcomes,
    with_bonus,
)
from outrider.speculation.proposal import NOTHING_SEALED, SealedProposal
from outrider.speculation.random_streams import RoundNoise

_log = logging.getLogger(__name__)


class LookAhead:
    """The rounds of a draft's sessions, over one engine, on the executor's side."""

    def __init__(
        self,
        engine: Engine,
        table: SessionTable,
        drafter: ModelDrafter,
        max_num_seqs: int,
        bytes_max: int,
    ) -> None:
        """So many sequences share a pass, and so much is pushed of one round of a session."""
        self._engine = engine
        self._table = table
        self._drafter = drafter
        self._max_num_seqs = max_num_seqs
        self._bytes_max = bytes_max
        self._rounds: dict[str, RoundAhead] = {}
        self._outcome_models = OutcomeModels()
        self._numbers = count()
        self._stale: list[Outcome] = []
        """Of rounds that are over."""

    def works_on(self, item: DraftItem) -> bool:
        """Whether this very item's round has begun."""
        found = self._rounds.get(item.head.session_id)
        return found is not None and found.item is item

    def progress(self, item: DraftItem) -> Answers:
        """No answer, of a round that it `works_on`."""
        return self._advanced(self._rounds[item.head.session_id], ())

    def begin(
        self,
        item: DraftItem,
        committed: tuple[int, ...],
        unseen: tuple[int, ...],
    ) -> Answers:
        """Begins the round of `item`, whose session is aligned and lacks `unseen`; it ends the one
        before. Answers at once what is known already."""
        before = self._rounds.pop(item.head.session_id, None)
        now = RoundAhead(item, committed, unseen, self._bytes_max)
        self._rounds[item.head.session_id] = now
        outcome = None if before is None else self._come_true(before, committed)
        answers: list[DraftAnswer] = []
        if item.held is not None:
            now.drafted = item.held
        elif before is not None and outcome in before.finished:
            answers.append(self._answer(now, before.finished[outcome]))
        else:
            answers += self._begin_wanted(now, self._taken(before, outcome))
        if before is not None:
            if now.drafted and now.basis is None:
                self._take_basis(now, before, outcome)
            self._end(before)
        return self._advanced(now, answers)

    def advance(self, items: Sequence[DraftItem]) -> list[Answers]:
        """One pass for these rounds, all of which it `works_on`. Raises what the engine does."""
        rounds = [self._rounds[item.head.session_id] for item in items]
        for now in rounds:
            self._drop_evicted(now)
        room = self._max_num_seqs
        waiting = [now.wanted for now in rounds if now.wanted is not None]
        wanted = [branch for branch in waiting if branch.goes_on()][:room]
        room -= len(wanted)
        unread = [now for now in rounds if now.wanted is None and not now.is_read]
        read = [now for now in unread if self._is_readable(now)][:room]
        for now in read:
            if now.basis is not None and now.guesses is None:
                self._begin_outcomes(now, None)
        outcomes = [found for now in rounds for found in now.outcomes]
        outcomes.sort(key=lambda found: -found.chance)
        chosen = outcomes[: room - len(read)]
        try:
            branches = [*wanted, *(found.branch for found in chosen)]
            logits = self._drafter.advance(branches, [now.reading for now in read])
        except Exception as error:
            if not self._recover(wanted, error):
                raise
        else:
            for now, rows in zip(read, logits, strict=True):
                self._note_read(now, rows)
            if not read or len(self._stale) > self._max_num_seqs:
                self._release(self._stale)
        for now in unread:
            now.is_read = now.is_read or now in read or not self._is_readable(now)
        return [self._advanced(now, self._harvest(now)) for now in rounds]

    def forget(self, session_id: str) -> None:
        """Nobody waits for the session any more; unknown ones are ignored."""
        self._outcome_models.forget(session_id)
        found = self._rounds.pop(session_id, None)
        if found is not None:
            self._end(found)
            self._release(self._stale)

    def give_way(self) -> None:
        self._release(self._stale)
        for found in self._rounds.values():
            self._drop(found)

    def _advanced(self, now: RoundAhead, answers: Sequence[DraftAnswer]) -> Answers:
        if any(isinstance(answer, Refused) for answer in answers):
            self.forget(now.session_id)
            return Answers(tuple(answers), more=False)
        # The round stays, for its finished proposals, until the session's next item.
        return Answers(tuple(answers), not now.is_over, now.wanted is not None)

    def _come_true(self, before: RoundAhead, committed: tuple[int, ...]) -> tuple[int, ...] | None:
        """What was committed since the round before began; learned from. None where the two do not
        follow each other."""
        length = len(before.committed)
        guesses = before.guesses
        if committed[:length] != before.committed or guesses is None:
            return None
        outcome = committed[length:]
        num_accepted = len(outcome) - 1
        if not 0 <= num_accepted <= guesses.num_drafted:
            return None
        if outcome[:-1] != before.drafted[:num_accepted]:
            return None
        self._outcome_model(before).note(
            guesses, num_accepted, guesses.rank(num_accepted, outcome[-1])
        )
        return outcome

    def _taken(
        self, before: RoundAhead | None, outcome: tuple[int, ...] | None
    ) -> AutoregressiveDraft | None:
        if before is None:
            return None
        for found in before.outcomes:
            if found.assumed == outcome:
                before.outcomes.remove(found)
                return found.branch
        return None

    def _begin_wanted(
        self, now: RoundAhead, taken: AutoregressiveDraft | None
    ) -> list[DraftAnswer]:
        """Somebody waits for a proposal: the branch that came true goes on, or the session is
        drafted. A branch with half of its tokens is answered as it is: the others are the least
        likely to be accepted, and each takes a pass. This depends on when it was asked for, and on
        no token's value."""
        num_wanted = now.item.num_draft_tokens
        if taken is not None:
            num_held = len(taken.token_ids)
            taken.num_wanted = min(taken.num_wanted, num_wanted)
            if 2 * num_held >= taken.num_wanted:
                taken.num_wanted = min(taken.num_wanted, num_held)
        request = now.request(now.session_id, now.committed)
        branch = taken or self._drafter.begin(request)
        if branch is None or branch.num_wanted == 0:
            if taken is not None:
                self._engine.release(taken.request.session_id)
            return [self._answer(now, NOTHING_SEALED)]
        branch.deadline = now.item.deadline
        now.wanted = branch
        return [self._answer_wanted(now, branch)] if branch.is_whole else []

    def _take_basis(
        self, now: RoundAhead, before: RoundAhead, outcome: tuple[int, ...] | None
    ) -> None:
        """The sequence that drafted the proposal, if it is still there."""
        for found in before.kept:
            branch = found.branch
            drafted = tuple(branch.token_ids[: len(now.drafted)])
            if found.assumed == outcome and drafted == now.drafted and self._is_intact(branch):
                before.kept.remove(found)
                now.basis = Basis(found.name, branch.rows[: len(drafted)])

    def _answer(
        self, now: RoundAhead, proposal: SealedProposal, out_of_time: bool = False
    ) -> ProposalReply:
        """What was waited for is there; it may have been drafted for a larger K."""
        proposal = proposal.cut(now.item.num_draft_tokens)
        now.drafted = proposal.token_ids
        held = self._engine.length(now.session_id)
        key = now.item.head.key
        return ProposalReply(key, proposal, len(now.committed), held, out_of_time=out_of_time)

    def _is_readable(self, now: RoundAhead) -> bool:
        """Whether the session still stands where it was aligned, and the model can go on."""
        info = self._engine.info
        length = len(now.committed) + len(now.drafted)
        return (
            self._engine.length(now.session_id) == length - len(now.to_read)
            and now.item.num_draft_tokens > 0
            and now.item.look_ahead > 0
            and not now.sampling.penalised
            and length < info.max_model_len
            and max(now.to_read) < info.vocab_size
        )

    def _note_read(self, now: RoundAhead, logits: torch.Tensor) -> None:
        self._table.record(now.session_id, now.to_read)
        now.is_read = True
        self._begin_outcomes(now, logits)
        self._drop_basis(now)

    def _begin_outcomes(self, now: RoundAhead, logits: torch.Tensor | None) -> None:
        """Branches off for each outcome that is worth it, as long as there are pages; ends those
        that were begun and are not. Without `logits` the bonus is not among them."""
        seen = () if now.basis is None else now.basis.seen
        vocabulary = self._drafter.vocabulary
        try:
            if now.guesses is None or logits is None or now.basis is None:
                guesses = guess_outcomes(
                    logits, now.sampling, now.noise, now.drafted, RANKS_MAX, vocabulary, seen
                )
            else:
                guesses = with_bonus(
                    now.guesses, logits, now.sampling, now.noise, RANKS_MAX, vocabulary
                )
        except OutriderError as error:
            _log.debug("the outcomes of a round cannot be guessed: %s", error)
            return
        now.guesses = guesses
        plan = self._outcome_model(now).plan(guesses, now.item.look_ahead)
        begun = {found.assumed: found for found in now.outcomes}
        now.outcomes = []
        for place, guess in enumerate(plan):
            assumed = _assumed(now, guesses, guess)
            if assumed in begun:
                now.outcomes.append(begun.pop(assumed))
                continue
            if assumed in now.finished:
                continue
            try:
                self._branch_off(now, guess, assumed)
            except OutOfPages:  # Even now that no other round keeps any.
                rest = {_assumed(now, guesses, guess) for guess in plan[place:]}
                now.outcomes += [begun.pop(name) for name in rest & begun.keys()]
                break
        for found in begun.values():
            self._engine.release(found.name)

    def _branch_off(self, now: RoundAhead, guess: LikelyOutcome, assumed: tuple[int, ...]) -> None:
        """Begins an outcome. Raises `OutOfPages`."""
        name = f"{now.session_id}/{next(self._numbers)}"
        source = now.session_id if now.is_read or now.basis is None else now.basis.name
        try:
            self._engine.fork(source, name)
        except OutOfPages:
            self._release_kept()
            self._engine.fork(source, name)
        self._engine.keep(name, len(now.committed) + guess.num_accepted)
        branch = self._drafter.begin(now.request(name, (*now.committed, *assumed)))
        if branch is None or branch.num_wanted == 0:
            self._engine.release(name)
        else:
            now.outcomes.append(Outcome(assumed, guess.chance, branch))

    def _harvest(self, now: RoundAhead) -> list[DraftAnswer]:
        answers: list[DraftAnswer] = []
        if now.wanted is not None:
            self._record_wanted(now, now.wanted)
            if now.wanted.is_whole:
                answers.append(self._answer_wanted(now, now.wanted))
        for found in [one for one in now.outcomes if one.branch.is_whole]:
            now.outcomes.remove(found)
            self._keep_or_release(now, found)
            if found.branch.error is None:
                sealed = SealedProposal.of(found.branch.proposal)
                answers += self._pushed(now, found.assumed, sealed)
        return answers

    def _keep_or_release(self, now: RoundAhead, found: Outcome) -> None:
        """The sequence of one that is whole is of use if that comes true."""
        if found.branch.is_seen and self._is_intact(found.branch):
            now.kept.append(found)
        else:
            self._engine.release(found.name)

    def _record_wanted(self, now: RoundAhead, branch: AutoregressiveDraft) -> None:
        if branch.request.session_id == now.session_id and self._is_intact(branch):
            run = (*now.committed, *branch.token_ids)
            now.num_recorded = self._table.record(now.session_id, run[now.num_recorded :])

    def _answer_wanted(self, now: RoundAhead, branch: AutoregressiveDraft) -> DraftAnswer:
        """Answers with the proposal that was waited for; the round is to be read then."""
        now.wanted = None
        name = branch.request.session_id
        if branch.error is not None:
            if name != now.session_id:
                self._engine.release(name)
            return refusal(now.item.head.key, branch.error)
        answer = self._answer(now, SealedProposal.of(branch.proposal), branch.deadline.has_cut)
        if branch.is_seen and self._is_intact(branch):
            now.basis = Basis(name, branch.rows[: len(now.drafted)])
        elif name != now.session_id:
            self._engine.release(name)
        elif branch.token_ids or not branch.deadline.has_cut:  # Else nothing was run.
            rewound = self._table.rewind(now.session_id)
            now.unseen = () if rewound is None else rewound.new_tokens
        return answer

    def _pushed(
        self, now: RoundAhead, assumed: tuple[int, ...], proposal: SealedProposal
    ) -> list[ProposalReply]:
        key, length = now.item.head.key, len(now.committed)
        reply = ProposalReply(
            key=ReplyKey(key.session_id, key.epoch, key.round + 1),
            proposal=proposal,
            base_length=length,
            cached_length=length + len(assumed) - 1,
            assumed=assumed,
        )
        if not proposal:
            return []
        now.finished[assumed] = proposal
        if reply.num_bytes > now.bytes_left:  # It is there when it is asked for.
            return []
        now.bytes_left -= reply.num_bytes
        return [reply]

    def _recover(self, wanted: Sequence[AutoregressiveDraft], error: Exception) -> bool:
        """A pass has failed: nothing is worked out ahead for now. False where the error may be the
        engine's own, and nobody's drawn tokens would be lost by that."""
        _log.info("a pass of the draft failed: %r", error)
        self.give_way()
        is_own = isinstance(error, OutriderError) and not isinstance(error, EngineLost)
        if not is_own and not any(branch.token_ids for branch in wanted):
            return False
        for branch in wanted:
            if is_own and not branch.token_ids:
                self._advance_alone(branch)
            else:
                self._drafter.end(branch, error)
        return True

    def _advance_alone(self, branch: AutoregressiveDraft) -> None:
        """Again for one of those whose pass has failed. That left the sequence as it was, or
        forgot it: then there is nothing to go on from."""
        if not self._is_intact(branch):
            branch.num_wanted = 0
            return
        try:
            self._drafter.advance([branch])
        except EngineLost:
            raise
        except OutriderError as error:
            self._drafter.end(branch, error)

    def _drop_evicted(self, now: RoundAhead) -> None:
        """Gives up what has lost its pages to somebody older; what was drawn stays proposed."""
        if now.wanted is not None and not self._is_intact(now.wanted):
            now.wanted.num_wanted = len(now.wanted.token_ids)
        now.outcomes = [found for found in now.outcomes if self._is_intact(found.branch)]

    def _is_intact(self, branch: AutoregressiveDraft) -> bool:
        held = len(branch.request.token_ids) + len(branch.token_ids) - len(branch.unseen)
        return self._engine.length(branch.request.session_id) == held

    def _release_kept(self) -> None:
        """What has been pushed goes before what has not been drafted."""
        self._release(self._stale)
        for found in self._rounds.values():
            self._release(found.kept)

    def _release(self, outcomes: list[Outcome]) -> None:
        for found in outcomes:
            self._engine.release(found.name)
        outcomes.clear()

    def _end(self, now: RoundAhead) -> None:
        """It is over: what it holds goes, its proposal as it grows included. What has been pushed
        goes after the next pass, which somebody may wait for."""
        if now.wanted is not None and now.wanted.request.session_id != now.session_id:
            self._engine.release(now.wanted.request.session_id)
        self._stale += now.kept
        now.kept.clear()
        self._drop(now)

    def _drop(self, now: RoundAhead) -> None:
        self._release(now.outcomes)
        self._release(now.kept)
        self._drop_basis(now)

    def _drop_basis(self, now: RoundAhead) -> None:
        if now.basis is not None and now.basis.name != now.session_id:
            self._engine.release(now.basis.name)
            now.basis = None

    def _outcome_model(self, now: RoundAhead) -> OutcomeModel:
        head = now.item.head
        return self._outcome_models.of(
            now.session_id, head.seed, head.rule, now.sampling.temperature
        )


def _assumed(now: RoundAhead, guesses: OutcomeGuesses, guess: LikelyOutcome) -> tuple[int, ...]:
    correction = guesses.corrections[guess.num_accepted][guess.rank]
    return (*now.drafted[: guess.num_accepted], correction)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One that is being drafted, or has been."""

    assumed: tuple[int, ...]
    chance: float
    branch: AutoregressiveDraft

    @property
    def name(self) -> str:
        return self.branch.request.session_id


@dataclass(frozen=True, slots=True)
class Basis:
    """A sequence that holds a round's committed tokens and x_1..x_{K-1}, for it drafted them, and
    what each x was drawn from."""

    name: str
    seen: Sequence[LikelyTokens]


class RoundAhead:
    """One session's newest round."""

    __slots__ = (
        "basis", "bytes_left", "committed", "drafted", "finished", "guesses", "is_read", "item",
        "kept", "num_recorded", "outcomes", "sampling", "unseen", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        item: DraftItem,
        committed: tuple[int, ...],
        unseen: tuple[int, ...],
        bytes_left: int,
    ) -> None:
        self.item = item
        self.sampling = item.head.params()
        self.committed = committed
        self.unseen = unseen
        """Of the committed tokens those at the end that the session's own sequence lacks."""
        self.bytes_left = bytes_left
        """Of what may be pushed."""
        self.num_recorded = len(committed) - len(unseen)
        """Tokens that its table has while its own proposal grows."""
        self.drafted: tuple[int, ...] = ()
        """x_1..x_K, once they are known."""
        self.wanted: AutoregressiveDraft | None = None
        """The proposal that is waited for, as it grows."""
        self.basis: Basis | None = None
        """Where outcomes can branch off before the round is read."""
        self.is_read = False
        self.guesses: OutcomeGuesses | None = None
        """What may come of it."""
        self.outcomes: list[Outcome] = []
        self.finished: dict[tuple[int, ...], SealedProposal] = {}
        """By what is assumed."""
        self.kept: list[Outcome] = []
        """Those whose sequences are left for the round that they turn out to be."""

    @property
    def session_id(self) -> str:
        return self.item.head.session_id

    @property
    def noise(self) -> RoundNoise:
        return self.item.head.noise

    @property
    def is_over(self) -> bool:
        return self.is_read and not self.outcomes

    @property
    def to_read(self) -> tuple[int, ...]:
        """What is still to be run of it on the session's own sequence."""
        if self.basis is not None and self.basis.name == self.session_id:
            return self.drafted[-1:]
        return (*self.unseen, *self.drafted)

    @property
    def reading(self) -> SequenceStep:
        """Runs it; a row for each outcome, or for the bonus alone where the others are known."""
        num_logits = 1 if self.basis is not None else len(self.drafted) + 1
        return SequenceStep(self.session_id, self.to_read, num_logits)

    def request(self, name: str, committed: tuple[int, ...]) -> DraftRequest:
        head = self.item.head
        return DraftRequest(
            session_id=name,
            tenant=head.tenant,
            token_ids=committed,
            prompt_length=head.prompt_length,
            num_draft_tokens=self.item.num_draft_tokens,
            sampling=self.sampling,
            rule=head.rule,
            noise=RoundNoise(head.seed, head.rule, len(committed)),
        )
