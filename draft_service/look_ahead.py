"""Work on rounds whose outcome nobody knows yet, beside proposals that somebody waits for.

    a round       C = committed tokens, x_1..x_K = its proposal
    read          C x_1..x_K is run in one pass; its rows say how each outcome may go on
    outcomes      C x_1..x_n y for likely n and y: forks of the session, all drafted together
    pushed        each finished proposal, with the tokens x_1..x_n y that it assumes

A round is begun by its item: with the proposal, where the coordinator holds one; or with an outcome
of the round before that has come true and is still being drafted; or with nothing, and the session
itself is drafted. Everything advances a token a pass. What somebody waits for goes first, then the
likeliest outcomes of all sessions, as many as the engine takes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from draft_service.model_drafter import Branch, ModelDrafter
from outrider.drafting.drafter import DraftRequest
from outrider.engine.interface import Engine, SequenceStep
from outrider.engine.sequences import SequenceTable
from outrider.errors import EngineLost, OutOfPages, OutriderError
from outrider.messages import DraftAnswer, DraftItem, ProposalReply, Refused, ReplyKey
from outrider.speculation.fan_out import FanOut
from outrider.speculation.guesses import ranked_corrections
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import NOTHING_SEALED, Proposal, SealedProposal
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.work import Answers, refusal

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """One that is being drafted."""

    assumed: tuple[int, ...]
    chance: float
    branch: Branch

    @property
    def name(self) -> str:
        """Of its sequence."""
        return self.branch.request.session_id


class _Round:
    """One session's newest round."""

    __slots__ = (
        "bytes_left", "committed", "corrections", "drafted", "finished", "is_read", "item",
        "num_recorded", "outcomes", "sampling", "unseen", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        item: DraftItem,
        sampling: SamplingParams,
        committed: tuple[int, ...],
        unseen: tuple[int, ...],
        bytes_left: int,
    ) -> None:
        self.item = item
        self.sampling = sampling
        self.committed = committed
        self.unseen = unseen
        """Of the committed tokens those at the end that the session's own sequence lacks."""
        self.num_recorded = len(committed) - len(unseen)
        """Tokens that its table has while its own proposal grows."""
        self.drafted: tuple[int, ...] = ()
        """x_1..x_K, once they are known."""
        self.wanted: Branch | None = None
        """The proposal that is waited for, as it grows."""
        self.is_read = False
        self.corrections: list[list[int]] = []
        """Guesses for n = 0..K, once it is read."""
        self.outcomes: list[_Outcome] = []
        self.finished: dict[tuple[int, ...], SealedProposal] = {}
        """By what is assumed."""
        self.bytes_left = bytes_left

    @property
    def session_id(self) -> str:
        """Whose round it is."""
        return self.item.head.session_id

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_read and not self.outcomes


@dataclass(frozen=True, slots=True)
class LookAheadLimits:
    """How much is worked out ahead."""

    max_num_seqs: int
    """Sequences that share a pass."""
    bytes_max: int
    """Of what is pushed of one round of a session."""


class LookAhead:
    """The rounds of a draft's sessions, over one engine, on the executor's side."""

    def __init__(
        self, engine: Engine, table: SequenceTable, drafter: ModelDrafter, limits: LookAheadLimits
    ) -> None:
        """The drafter is the engine's, and the table has the tokens of its sessions."""
        self._engine = engine
        self._table = table
        self._drafter = drafter
        self._limits = limits
        self._rounds: dict[str, _Round] = {}
        self._fan_outs: dict[Rule, FanOut] = {}
        self._numbers = count()

    def works_on(self, item: DraftItem) -> bool:
        """Whether this very item's round has begun."""
        found = self._rounds.get(item.head.session_id)
        return found is not None and found.item is item

    def standing(self, item: DraftItem) -> Answers[DraftAnswer]:
        """No answer, of a round that it `works_on`."""
        return self._advanced(self._rounds[item.head.session_id], ())

    def begin(
        self,
        item: DraftItem,
        sampling: SamplingParams,
        committed: tuple[int, ...],
        unseen: tuple[int, ...],
    ) -> Answers[DraftAnswer]:
        """Begins the round of `item`, whose session is aligned and lacks `unseen`; it ends the one
        before. Answers at once what is known already."""
        before = self._rounds.pop(item.head.session_id, None)
        now = self._rounds[item.head.session_id] = _Round(
            item,
            sampling,
            committed,
            unseen,
            self._limits.bytes_max,
        )
        come_true = None if before is None else self._come_true(before, committed)
        answers: list[DraftAnswer] = []
        if item.held is not None:
            now.drafted = item.held
        elif before is not None and come_true in before.finished:
            answers.append(self._answer(now, before.finished[come_true]))
        else:
            now.wanted = self._taken(
                before, come_true, item.num_draft_tokens
            ) or self._drafter.begin(self._request(now))
            if now.wanted is None or now.wanted.num_wanted == 0:
                now.wanted = None
                answers.append(self._answer(now, NOTHING_SEALED))
        if before is not None:
            self._drop_outcomes(before)
        return self._advanced(now, answers)

    def advance(self, items: Sequence[DraftItem]) -> list[Answers[DraftAnswer]]:
        """One pass for these rounds, all of which it `works_on`. Raises what the engine does."""
        rounds = [self._rounds[item.head.session_id] for item in items]
        for now in rounds:
            self._drop_evicted(now)
        room = self._limits.max_num_seqs
        waiting = [now.wanted for now in rounds if now.wanted is not None]
        wanted = [branch for branch in waiting if not branch.is_whole][:room]
        room -= len(wanted)
        unread = [now for now in rounds if now.wanted is None and not now.is_read]
        read = [now for now in unread if self._is_readable(now)][:room]
        outcomes = [found for now in rounds for found in now.outcomes]
        outcomes.sort(key=lambda found: -found.chance)
        chosen = outcomes[: room - len(read)]
        try:
            branches = [*wanted, *(found.branch for found in chosen)]
            logits = self._drafter.advance(branches, [_reading(now) for now in read])
        except Exception as error:
            if not self._recover(wanted, error):
                raise
        else:
            for now, rows in zip(read, logits, strict=True):
                self._begin_outcomes(now, rows)
        for now in unread:
            now.is_read = now.is_read or now in read or not self._is_readable(now)
        return [self._advanced(now, self._harvest(now)) for now in rounds]

    def forget(self, session_id: str) -> None:
        """Nobody waits for the session any more; unknown ones are ignored."""
        found = self._rounds.pop(session_id, None)
        if found is not None:
            self._drop_outcomes(found)

    def give_way(self) -> None:
        """Gives back the pages of all that nobody waits for."""
        for found in self._rounds.values():
            self._drop_outcomes(found)

    def _advanced(self, now: _Round, answers: Sequence[DraftAnswer]) -> Answers[DraftAnswer]:
        if any(isinstance(answer, Refused) for answer in answers):
            self.forget(now.session_id)
            return Answers(tuple(answers), more=False)
        # The round stays, for its finished proposals, until the session's next item.
        return Answers(tuple(answers), not now.is_over, now.wanted is not None)

    def _come_true(self, before: _Round, committed: tuple[int, ...]) -> tuple[int, ...] | None:
        """What was committed since the round before began; learned from. None where the two do not
        follow each other."""
        length = len(before.committed)
        if committed[:length] != before.committed or not before.is_read:
            return None
        outcome = committed[length:]
        num_accepted = len(outcome) - 1
        if not 0 <= num_accepted < len(before.corrections):
            return None
        if outcome[:-1] != before.drafted[:num_accepted]:
            return None
        ranked = before.corrections[num_accepted]
        rank = ranked.index(outcome[-1]) if outcome[-1] in ranked else None
        self._fan_out(before).note(len(before.drafted), num_accepted, rank)
        return outcome

    def _taken(
        self, before: _Round | None, outcome: tuple[int, ...] | None, num_wanted: int
    ) -> Branch | None:
        """The branch of an outcome of the round before, out of its hands, for so many tokens."""
        if before is None:
            return None
        for found in before.outcomes:
            if found.assumed == outcome:
                before.outcomes.remove(found)
                found.branch.num_wanted = min(found.branch.num_wanted, num_wanted)
                return found.branch
        return None

    def _request(self, now: _Round) -> DraftRequest:
        """Asks for the proposal of the round itself."""
        return self._request_for(now, now.session_id, now.committed)

    def _request_for(self, now: _Round, name: str, committed: tuple[int, ...]) -> DraftRequest:
        head = now.item.head
        return DraftRequest(
            session_id=name,
            tenant=head.tenant,
            token_ids=committed,
            prompt_length=head.prompt_length,
            num_draft_tokens=now.item.num_draft_tokens,
            sampling=now.sampling,
            rule=head.rule,
            noise=RoundNoise(head.seed, head.rule, len(committed)),
        )

    def _answer(self, now: _Round, proposal: SealedProposal) -> ProposalReply:
        """What was waited for is there; it may have been drafted for a larger K."""
        proposal = proposal.cut(now.item.num_draft_tokens)
        now.drafted = proposal.token_ids
        held = self._engine.length(now.session_id)
        return ProposalReply(now.item.head.key, proposal, len(now.committed), held)

    def _is_readable(self, now: _Round) -> bool:
        """Whether the session still stands where it was aligned, and the model can go on."""
        info = self._engine.info
        held = len(now.committed) - len(now.unseen)
        return (
            self._engine.length(now.session_id) == held
            and now.item.num_draft_tokens > 0
            and now.item.look_ahead > 0
            and not now.sampling.penalised
            and len(now.committed) + len(now.drafted) < info.max_model_len
            and max((*now.unseen, *now.drafted)) < info.vocab_size
        )

    def _begin_outcomes(self, now: _Round, logits: torch.Tensor) -> None:
        """Notes that a round was read, and forks the session for each outcome that is worth it, as
        long as there are pages."""
        self._table.record(now.session_id, (*now.unseen, *now.drafted))
        now.is_read = True
        head = now.item.head
        plan = self._fan_out(now).plan(len(now.drafted), now.item.look_ahead)
        try:
            now.corrections = ranked_corrections(
                logits,
                now.sampling,
                RoundNoise(head.seed, head.rule, len(now.committed)),
                now.drafted,
                1 + max(guess.rank for guess in plan),
                self._drafter.vocabulary,
            )
        except OutriderError as error:
            _log.info("the outcomes of a round cannot be guessed: %s", error)
            return
        for guess in plan:
            ranked = now.corrections[guess.num_accepted]
            if guess.rank >= len(ranked):
                continue
            assumed = (*now.drafted[: guess.num_accepted], ranked[guess.rank])
            name = f"{now.session_id}/{next(self._numbers)}"
            try:
                self._engine.fork(now.session_id, name)
            except OutOfPages:
                return
            self._engine.keep(name, len(now.committed) + guess.num_accepted)
            request = self._request_for(now, name, (*now.committed, *assumed))
            branch = self._drafter.begin(request)
            if branch is None or branch.num_wanted == 0:
                self._engine.release(name)
            else:
                now.outcomes.append(_Outcome(assumed, guess.chance, branch))

    def _harvest(self, now: _Round) -> list[DraftAnswer]:
        """The proposals that are whole now."""
        answers: list[DraftAnswer] = []
        if now.wanted is not None:
            self._record_wanted(now, now.wanted)
            if now.wanted.is_whole:
                answers.append(self._answer_wanted(now, now.wanted))
        for found in [one for one in now.outcomes if one.branch.is_whole]:
            now.outcomes.remove(found)
            self._engine.release(found.name)
            result = found.branch.result()
            if isinstance(result, Proposal):
                answers += self._pushed(now, found.assumed, SealedProposal.of(result))
        return answers

    def _record_wanted(self, now: _Round, branch: Branch) -> None:
        """Notes what the session's own sequence has run."""
        if branch.request.session_id == now.session_id and self._stands(branch):
            run = (*now.committed, *branch.token_ids)
            now.num_recorded = self._table.record(now.session_id, run[now.num_recorded :])

    def _answer_wanted(self, now: _Round, branch: Branch) -> DraftAnswer:
        """Answers with the proposal that was waited for; the round is to be read then."""
        now.wanted = None
        if branch.request.session_id == now.session_id:
            rewound = self._table.rewind(now.session_id)
            now.unseen = () if rewound is None else rewound.new_tokens
        else:
            self._engine.release(branch.request.session_id)
        result = branch.result()
        if not isinstance(result, Proposal):
            return refusal(now.item.head.key, result)
        return self._answer(now, SealedProposal.of(result))

    def _pushed(
        self, now: _Round, assumed: tuple[int, ...], proposal: SealedProposal
    ) -> list[ProposalReply]:
        key, length = now.item.head.key, len(now.committed)
        reply = ProposalReply(
            key=ReplyKey(key.session_id, key.epoch, key.round + 1),
            proposal=proposal,
            base_length=length,
            cached_length=length + len(assumed) - 1,
            assumed=assumed,
        )
        if not proposal or reply.num_bytes > now.bytes_left:
            return []
        now.bytes_left -= reply.num_bytes
        now.finished[assumed] = proposal
        return [reply]

    def _recover(self, wanted: Sequence[Branch], error: Exception) -> bool:
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

    def _advance_alone(self, branch: Branch) -> None:
        try:
            self._drafter.advance([branch])
        except EngineLost:
            raise
        except OutriderError as error:
            self._drafter.end(branch, error)

    def _drop_evicted(self, now: _Round) -> None:
        """Gives up what has lost its pages to somebody older; what was drawn stays proposed."""
        if now.wanted is not None and not self._stands(now.wanted):
            now.wanted.num_wanted = len(now.wanted.token_ids)
        now.outcomes = [found for found in now.outcomes if self._stands(found.branch)]

    def _stands(self, branch: Branch) -> bool:
        held = len(branch.request.token_ids) + len(branch.token_ids) - len(branch.unseen)
        return self._engine.length(branch.request.session_id) == held

    def _drop_outcomes(self, now: _Round) -> None:
        for found in now.outcomes:
            self._engine.release(found.name)
        now.outcomes.clear()

    def _fan_out(self, now: _Round) -> FanOut:
        return self._fan_outs.setdefault(now.item.head.rule, FanOut())


def _reading(now: _Round) -> SequenceStep:
    """Runs a round's proposal; a row for each outcome."""
    tokens = (*now.unseen, *now.drafted)
    return SequenceStep(now.session_id, tokens, num_logits=len(now.drafted) + 1)
