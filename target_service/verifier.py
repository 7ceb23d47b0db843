"""One step of a target: one forward pass over all items, then a verdict for each. Between the
launch of the pass and its end, the thread of the steps does other work.

stage of an item                                        answer if the stage fails
validate the item; let the look-up propose              `Refused`
find the item's prefix in the cache                     `Resync`
find room in the step for the new tokens                `Unfinished`
run the new tokens and the proposal in the pass         `Refused`
compute the verdict, on the device of the logits        `Refused`
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.autoregressive_draft import AutoregressiveDraft, DraftSampler
from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline, DraftRequest
from outrider.drafters.features import BYTES_OF_A_NUMBER, Features, rows_max
from outrider.errors import BadRequest, InvariantError, OutriderError, check
from outrider.foundation.tokens import digest_after, extend_digest
from outrider.grammar.compiler import Grammars
from outrider.grammar.token_mask import AllowedTokens, TokenMask
from outrider.interfaces.engine import DraftingEngine, Engine, FeatureKeeper, SequenceStep
from outrider.interfaces.messages import PositionLogprobs, Prefix, VerdictReply, VerifyItem
from outrider.kernels.threads import on_threads
from outrider.limits import FEATURES_STEP_BYTES_MAX
from outrider.models.draft_head import LoadedDraftHead
from outrider.replica.admission import (
    Admission,
    Admitted,
    EngineWorker,
    SlotDemand,
    Work,
    draft_request,
)
from outrider.replica.step_request import StepAnswer, StepRequest, Unfinished
from outrider.replica.token_budget import TokenBudget
from outrider.speculation.accept_reject import Outcome, Verdict, decide, ending_before
from outrider.speculation.audit import audit
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    masked_logits,
    raw_logprobs,
    row_masks,
)
from outrider.speculation.proposal import EncodedProposal, Proposal, require_q
from outrider.speculation.sampling_params import NO_HISTORY, TokenHistory
from outrider.speculation.verification import VerifyInput, verdicts_from_logits
from target_service.lookups import TargetLookups

logger = logging.getLogger(__name__)

_REPLACEMENT = 0
"""The token that runs in place of a draft token outside the target's vocabulary. Such a draft token
has p = 0, so it is never accepted, and the logits after it are never used."""

_ROWS_AT_ONCE = {"cpu": 64, "cuda": 256}
"""Largest number of rows of logits from which verdicts are computed together, by type of device.
More rows are no faster, and take more memory. On a GPU, 256 rows of 128,000 tokens take 125 MiB,
and up to twice this if the rows of several sessions are copied into one tensor."""


class _Round(Work[VerifyItem]):
    proposal: Proposal
    has_looked_up = False
    probed: tuple[int, ...] = ()
    step: SequenceStep  # asks for 0 logits if the step runs only a part of the prefix
    verify_input: VerifyInput
    history = NO_HISTORY
    allowed: AllowedTokens | None = None  # tokens that may follow the committed tokens; None = all
    first_without_mask: int | None = None  # see `RowMasks`

    @property
    def demand(self) -> SlotDemand:
        """A next proposal without a time limit must not become shorter for lack of pages
        (`AutoregressiveDraft.lose_pages`)."""
        num_drafted, item = len(self.proposal), self.item
        num_reserved = 0 if item.next_budget_us else item.num_next_draft_tokens
        return SlotDemand(self.head, num_drafted, num_drafted + 1, num_reserved=num_reserved)

    def ask(self, logits: Tensor) -> None:
        """Makes the `VerifyInput` from the logits of the pass. Raises the errors of `row_masks`."""
        masks: Sequence[TokenMask | None] = ()
        if self.allowed is not None:
            rows = row_masks(self.allowed, self.proposal)
            masks, self.first_without_mask = rows.masks, rows.first_without_mask
        self.verify_input = VerifyInput(
            logits, self.sampling, self.history, self.proposal, self.head.noise, masks
        )

    def outcome(self, verdict: Verdict) -> Outcome:
        """Returns the outcome that the coordinator will derive from a verdict."""
        proposal, head = self.proposal, self.head
        uniforms = head.noise.accept_uniforms(len(proposal))
        return decide(verdict, proposal.token_ids, head.rule, uniforms)

    def within(self, verdict: Verdict) -> Verdict:
        """Returns `verdict` if its outcome reaches no row that the round cannot use: the row
        `first_without_mask`, whose mask could not be computed, and with log-probabilities a row
        without them. (A mask may make a row usable whose raw logits are not.) Otherwise returns a
        verdict that ends with the draft token before this row. The next round then begins at this
        row, and the session fails, as in plain decoding. Raises `InvariantError` if it is the first
        row."""
        rows = [] if self.first_without_mask is None else [self.first_without_mask]
        if self.item.num_logprobs is not None:
            is_missing = ~self.verify_input.logits.amax(dim=1).isfinite()
            rows += is_missing.nonzero()[:1, 0].tolist()
        if not rows:
            return verdict
        check(min(rows) > 0, "logits of row 0 have no log-probabilities: NaN, +inf, or only -inf")
        head, drafted = self.head, self.proposal.token_ids
        uniforms = head.noise.accept_uniforms(len(drafted))
        return ending_before(verdict, min(rows), drafted, head.rule, uniforms)


class SelfDrafter:
    """Drafts with an EAGLE-3 head or an MTP layer on the target's pages. Each pass of the head
    drafts one token of every proposal."""

    def __init__(self, layer: LoadedDraftHead, engine: DraftingEngine) -> None:
        self.engine = engine
        self._head = layer.module
        self._sampler = DraftSampler(DraftVocabulary.of(layer.token_ids))

    def propose(
        self, requests: Sequence[DraftRequest], features: Sequence[Tensor]
    ) -> list[Proposal]:
        """Returns a proposal for each request, of at most the requested number of tokens. The
        engine must hold all committed tokens of a request except the newest. If a request has no
        penalties, its `token_ids` may contain the newest token alone. For each request,
        `features` has the feature [D] of the token before the newest. The engine's sequences
        stay unchanged.

        If a pass fails, or if no token can be drawn from its logits, the tokens drawn so far are
        proposed. Dropping them could bias the output, because the failure may depend on their
        values."""
        drafts, engine = [AutoregressiveDraft(request) for request in requests], self.engine
        lengths = {draft.sequence_id: engine.length(draft.sequence_id) for draft in drafts}

        def free_ended() -> None:
            for draft in drafts:
                if draft.is_whole:
                    engine.keep(draft.sequence_id, lengths[draft.sequence_id])

        for draft, row in zip(drafts, features, strict=True):
            draft.carried = row
            if lengths[draft.sequence_id] != draft.request.noise.committed_length - 1:
                draft.stop()
        try:
            while active := [draft for draft in drafts if draft.goes_on()]:
                # Drafts without a time limit come first, because they end last if pages are few.
                active.sort(key=lambda draft: draft.deadline is not NO_DEADLINE)
                self._draw(active, free_ended)
        except Exception:
            logger.exception("drafts of %d sessions end early", len(drafts))
        for name, length in lengths.items():
            engine.keep(name, length)
        return [draft.proposal for draft in drafts]

    def _draw(self, drafts: list[AutoregressiveDraft], free_ended: Callable[[], None]) -> None:
        """Draws a token for each draft. If pages are too few, ends the last drafts of the list.
        `free_ended` frees the pages of drafts that have ended."""
        steps = [SequenceStep(draft.sequence_id, (draft.newest,), 1) for draft in drafts]
        if not self.engine.can_hold(steps):
            free_ended()
        while not self.engine.can_hold(steps):
            steps.pop()
            drafts.pop().stop()
            free_ended()
        if not drafts:
            return
        hidden = self.engine.forward_draft(steps, [draft.carried for draft in drafts])
        for draft, row in zip(drafts, self._head.carry(hidden), strict=True):
            draft.carried = row
        self._sampler.draw(drafts, torch.split(self._head.logits(hidden), 1))


class Verifier(EngineWorker[VerifyItem, _Round]):
    """Runs the steps of a target. See `TargetService` for the parameters."""

    def __init__(
        self,
        engine: Engine,
        budget: TokenBudget,
        self_drafter: SelfDrafter | None,
        clock: Callable[[], float],
        grammars: Grammars | None,
        lookups: TargetLookups | None = None,
    ) -> None:
        forget = (lambda session_id: None) if lookups is None else lookups.forget
        super().__init__(budget, Admission(engine, budget, grammars, forget=forget))
        self._lookups = lookups
        self._engine = engine
        self._clock: Callable[[], float] = lambda: clock() + engine.stated_seconds
        self.keeper: FeatureKeeper | None = None  # the engine, if it keeps features for drafts
        if isinstance(engine, FeatureKeeper) and engine.feature_width:
            self.keeper = engine
        self._self_drafter = self_drafter
        self._expected: dict[int, _Round] = {}  # by the id of the item

    def expect(self, item: VerifyItem) -> None:
        if item.num_lookup_tokens or item.num_probe_tokens:
            return  # A look-up reads the engine's tokens, and the engine runs a pass.
        work = _Round(item)
        self._admission.validate(work, self._validate)
        self._expected[id(item)] = work

    def prepare(self, requests: Sequence[StepRequest[VerifyItem]]) -> list[_Round]:
        expected, self._expected = self._expected, {}
        rounds = []
        for request in requests:
            work = expected.get(id(request.item)) or _Round(request.item)
            work.grammar = request.grammar
            rounds.append(work)
        self._admission.admit(rounds, self._validate, self._prepare)
        return rounds

    def launch(self, prepared: Sequence[_Round]) -> Callable[[], list[StepAnswer]]:
        admitted = [work for work in prepared if work.answer is None]
        with torch.inference_mode():
            passes = self._admission.passes(admitted, self._launch)

        def wait() -> list[StepAnswer]:
            if self._lookups is not None:
                texts = [(work.head, work.sampling) for work in admitted if work.item.indexes]
                self._lookups.index(texts, self._engine.tokens)
            with torch.inference_mode():
                for rounds, logits in passes:
                    self._finish(rounds, logits)
            self._admission.note_pages()
            return [work.result for work in prepared]

        return wait

    def learn(self, session_id: str, learned: Prefix) -> None:
        if self._lookups is not None:
            self._lookups.learn(session_id, self._engine.tokens(session_id), learned)

    def _validate(self, work: _Round) -> None:
        info, item, head = self._engine.info, work.item, work.head
        sampling, size = work.sampling, info.vocab_size
        for key, token_ids in (
            ("head.append", head.append),
            ("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
            ("sampling.stop_token_ids", sampling.stop_token_ids),
        ):
            if token_ids and (largest := max(token_ids)) >= size:
                raise BadRequest(key, f"token {largest} is outside the vocabulary of {size}")
        length, num_drafted = head.committed_length, len(item.proposal)
        if length + num_drafted > info.max_model_len:
            raise BadRequest(
                "head.append" if length > info.max_model_len else "proposal",
                f"{length} committed and {num_drafted} draft tokens are more than max_model_len "
                f"{info.max_model_len}",
            )
        if sampling.top_k > size:
            reason = f"got {sampling.top_k}; the vocabulary has {size} tokens"
            raise BadRequest("sampling.top_k", reason)
        require_q(item.proposal, head.rule)
        work.proposal = item.proposal.decode()
        if not work.proposal.token_ids:
            self._look_up(work)

    def _look_up(self, work: _Round) -> None:
        """Lets the look-up propose or show tokens, if there is a look-up and the item asks."""
        item, head = work.item, work.head
        num_wanted = item.num_lookup_tokens or item.num_probe_tokens
        if num_wanted == 0 or self._lookups is None:
            return
        held = self._engine.tokens(head.session_id)
        room = min(num_wanted, self._engine.info.max_model_len - head.committed_length)
        if item.num_tokens_left:
            room = min(room, item.num_tokens_left - 1)  # The round ends with another token.
        found = self._lookups.propose(head, work.sampling, held, room, item.lookup_min_chance)
        work.has_looked_up = found is not None
        if found is not None and item.num_lookup_tokens:
            work.proposal = found
        elif found is not None:
            work.probed = found.token_ids

    def _prepare(self, work: _Round, admitted: Admitted) -> None:
        head, proposal, aligned = work.head, work.proposal, admitted.aligned
        new_tokens = aligned.new_tokens
        if not admitted.is_whole:
            work.step = SequenceStep(head.session_id, new_tokens[: admitted.num_granted], 0)
            return
        work.allowed = self._admission.allowed(work, aligned)
        vocab_size = self._engine.info.vocab_size
        drafted = tuple([v if v < vocab_size else _REPLACEMENT for v in proposal.token_ids])
        work.step = SequenceStep(head.session_id, (*new_tokens, *drafted), len(drafted) + 1)
        if work.sampling.penalised:  # Only penalties read the history, and a copy is O(length).
            committed, num = aligned.committed, head.prompt_length
            work.history = TokenHistory(committed[:num], committed[num:], proposal.token_ids)

    def _launch(self, rounds: Sequence[_Round]) -> Callable[[], list[Tensor]]:
        return self._engine.launch([work.step for work in rounds])

    def _finish(self, rounds: Sequence[_Round], logits: Sequence[Tensor]) -> None:
        # Verdicts take little time. With more threads, the step might wait for a busy core.
        with on_threads(1):
            self._judge(rounds, logits)
        if self.keeper is not None:
            self._add_features(rounds, self.keeper)
        if self._self_drafter is not None:
            self._add_proposals(rounds, self._self_drafter)

    def _judge(self, rounds: Sequence[_Round], logits: Sequence[Tensor]) -> None:
        for work, rows in zip(rounds, logits, strict=True):
            if work.step.num_logits == 0:
                work.answer = Unfinished.CONTINUES
                continue
            try:
                work.ask(rows)
            except OutriderError as error:
                self._admission.fail(work, error)
        judged = [work for work in rounds if work.answer is None]
        verdicts = _verdicts([work.verify_input for work in judged])
        for work, verdict in zip(judged, verdicts, strict=True):
            try:
                work.answer = self._reply(work, verdict)
            except OutriderError as error:
                self._admission.fail(work, error)

    def _reply(self, work: _Round, verdict: Verdict | OutriderError) -> VerdictReply:
        if isinstance(verdict, OutriderError):
            raise verdict
        item, proposal = work.item, work.proposal
        verdict = work.within(verdict)
        logits, logprobs = work.verify_input.logits, tuple[PositionLogprobs, ...]()
        if item.num_logprobs is not None:
            logprobs = _logprobs(logits, proposal, item.num_logprobs, verdict)
        audited = None
        if item.audit:
            rows = masked_logits(logits[:-1].cpu(), work.verify_input.masks[:-1])
            audited = audit(rows, proposal.token_ids, work.sampling, work.history)
        head = item.head
        held, length = self._engine.tokens(head.session_id), head.committed_length
        cached_length, prefix_digest = len(held), held.digest(length)
        expected = length + len(proposal)
        if cached_length != expected:
            raise InvariantError(f"{cached_length} slots are held, not {expected}")
        return VerdictReply(
            head.key,
            verdict,
            cached_length,
            logprobs,
            looked_up=() if item.proposal.token_ids else proposal.token_ids,
            has_looked_up=work.has_looked_up,
            probed=work.probed,
            committed_length=length,
            prefix_digest=prefix_digest,
            proposal_digest=digest_after(prefix_digest, proposal.token_ids),
            audit=audited,
        )

    def _add_features(self, rounds: Sequence[_Round], keeper: FeatureKeeper) -> None:
        """Adds features of committed tokens to verdicts whose items ask for features. If
        the copy from the device fails, later verdicts contain these features."""
        width = keeper.feature_width
        wanting: list[tuple[_Round, int, int]] = []
        try:
            wanting = _features_wanted(rounds, width)
            if not wanting:
                return
            ranges = [(work.head.session_id, first, end) for work, first, end in wanting]
            kept = keeper.held_features(ranges).to("cpu", torch.bfloat16)
        except Exception:
            logger.exception("%d verdicts are sent without features", len(wanting))
            return
        ends = np.cumsum([end - first for _, first, end in wanting])[:-1]
        parts = np.split(kept.view(torch.uint8).numpy(), ends)
        for (work, first, _), rows in zip(wanting, parts, strict=True):
            if isinstance(work.answer, VerdictReply):
                features = Features(first, width, rows.tobytes())
                work.answer = replace(work.answer, features=features)

    def _add_proposals(self, rounds: Sequence[_Round], drafter: SelfDrafter) -> None:
        """Adds the next proposal to verdicts whose items ask for it. If drafting fails, these
        verdicts are sent without proposals."""
        wanting: list[tuple[_Round, VerdictReply]] = []
        requests: list[DraftRequest] = []
        features: list[Tensor] = []
        try:
            for work, rows in zip(rounds, drafter.engine.features(), strict=True):
                answer = work.answer
                if not (isinstance(answer, VerdictReply) and work.item.num_next_draft_tokens):
                    continue
                outcome = work.outcome(answer.verdict)
                request = self._next_request(work, outcome)
                if request is None:
                    continue
                held = self._engine.keep(request.session_id, request.noise.committed_length - 1)
                work.answer = answer = replace(answer, cached_length=held)
                wanting.append((work, answer))
                requests.append(request)
                features.append(rows[outcome.num_accepted])
            if not requests:
                return
            began = self._clock()
            proposals = drafter.propose(requests, features)
            draft_ms = (self._clock() - began) * 1e3
        except Exception:
            logger.exception("%d verdicts are sent without proposals", len(requests))
            return
        for (work, answer), request, proposal in zip(wanting, requests, proposals, strict=True):
            work.answer = replace(
                answer,
                next_proposal=EncodedProposal.of(proposal),
                next_base_length=request.noise.committed_length,
                next_draft_ms=draft_ms,
                next_work_ms=draft_ms / len(requests),
                next_out_of_time=request.deadline.has_cut,
            )

    def _next_request(self, work: _Round, outcome: Outcome) -> DraftRequest | None:
        item, history = work.item, work.history
        length = work.head.committed_length + len(outcome.token_ids)
        room = min(self._engine.info.max_model_len, self._admission.num_slots) - length
        if room <= 0:
            return None
        token_ids = outcome.token_ids[-1:]
        if work.sampling.penalised:
            token_ids = (*history.prompt_ids, *history.output_ids, *outcome.token_ids)
        newest = outcome.token_ids[-1]
        digest = extend_digest(self._engine.tokens(work.head.session_id).digest(length - 1), newest)
        return draft_request(
            work.head,
            work.sampling,
            token_ids,
            length,
            digest,
            num_draft_tokens=min(item.num_next_draft_tokens, room),
            allowed=None if work.allowed is None else work.allowed.advanced(outcome.token_ids),
            deadline=DraftDeadline.after(item.next_budget_us, self._clock),
        )


def _features_wanted(rounds: Sequence[_Round], width: int) -> list[tuple[_Round, int, int]]:
    """Returns the rounds whose verdicts get features, each with the range (first, end) of
    positions. The bytes of a step's features are limited. Rounds that lack the fewest positions
    come first, so that more sessions get all features. A draft needs all features to propose."""
    lacking: list[tuple[_Round, int, int]] = []
    for work in rounds:
        first = work.item.features_from
        if first is None or not isinstance(work.answer, VerdictReply):
            continue
        # The correction has not run yet, so it has no features.
        end = work.head.committed_length + work.outcome(work.answer.verdict).num_accepted
        if first < end:
            lacking.append((work, first, end))
    wanted: list[tuple[_Round, int, int]] = []
    num_left = FEATURES_STEP_BYTES_MAX // (width * BYTES_OF_A_NUMBER)
    for work, first, end in sorted(lacking, key=lambda entry: entry[2] - entry[1]):
        num = min(end - first, rows_max(width), num_left)
        if num > 0:
            wanted.append((work, first, first + num))
            num_left -= num
    return wanted


def _verdicts(inputs: Sequence[VerifyInput]) -> list[Verdict | OutriderError]:
    if not inputs:
        return []
    num, num_rows = len(inputs), sum([len(each.proposal) + 1 for each in inputs])
    if num_rows <= _ROWS_AT_ONCE[inputs[0].logits.device.type] or num == 1:
        try:
            return [*verdicts_from_logits(inputs)]
        except OutriderError as error:
            if num == 1:
                return [error]
    return [*_verdicts(inputs[: num // 2]), *_verdicts(inputs[num // 2 :])]


def _logprobs(
    logits: Tensor, proposal: Proposal, num_logprobs: int, verdict: Verdict
) -> tuple[PositionLogprobs, ...]:
    """Returns 2K+1 log-probabilities from the raw logits [K+1, V]. The first K are those of the
    draft tokens (token i from row i), the others those of the corrections (n from row n)."""
    token_ids = (*proposal.token_ids, *verdict.correction)
    rows = (*range(len(proposal)), *range(len(proposal) + 1))
    entries = raw_logprobs(logits, token_ids, num_logprobs, rows=rows)
    return tuple(PositionLogprobs(logprob, top) for logprob, top in entries)
