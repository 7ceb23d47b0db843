"""The rounds behind `bench hits`: draft and target in one process, one session at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from draft_service.model_drafter import ModelDrafter, Unended
from outrider.drafters.drafter import DraftRequest
from outrider.engine.interface import Engine, SequenceStep
from outrider.errors import InvariantError, OutriderError, SettingError
from outrider.limits import LOOK_AHEAD_MAX, SEED_MAX
from outrider.speculation.accept_reject import Outcome, decide
from outrider.speculation.logits_processing import NO_HISTORY, DraftVocabulary
from outrider.speculation.outcome_prediction import RANKS_MAX, FanOut, RoundGuesses, guess_round
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import SamplingParams
from outrider.speculation.verification import verdict_from_logits

from .acceptance_reading import Encode
from .hits import WAYS, GuessedRound, HitOptions, HitReport, Way, way_figures
from .measurement import Progress

_SEQUENCE = "bench"


def measure(
    options: HitOptions,
    target: Engine,
    draft: Engine,
    encode: Encode,
    *,
    draft_model: str,
    progress: Progress,
) -> HitReport:
    """Decodes every prompt in every way. Raises `SettingError` for prompts that are wrong or too
    long."""
    prompts = [tuple(encode(prompt.text)) for prompt in options.load_prompts()]
    room = min(target.info.max_model_len, draft.info.max_model_len) - options.max_tokens
    for index, ids in enumerate(prompts):
        if not 0 < len(ids) < room - options.num_draft_tokens:
            raise SettingError("prompts", f"number {index + 1} has {len(ids)} tokens; 1 to {room}")
    figures = []
    for way in WAYS:
        fan_out = FanOut()
        rounds: list[GuessedRound] = []
        for index, ids in enumerate(prompts):
            progress(
                f"{way.rule.value} at {way.temperature:g}, prompt {index + 1} of {len(prompts)}"
            )
            seed = (options.seed + index) & SEED_MAX
            session = _Session(target, draft, ids, way, seed, options.num_draft_tokens)
            with torch.inference_mode():
                rounds += session.rounds(options.max_tokens, fan_out)
        figures.append(way_figures(way, rounds))
    return HitReport(
        model=target.info.name,
        draft_model=draft_model,
        num_prompts=len(prompts),
        max_tokens=options.max_tokens,
        num_draft_tokens=options.num_draft_tokens,
        ways=figures,
    )


class _Session:
    """One prompt's completion in one way."""

    def __init__(
        self,
        target: Engine,
        draft: Engine,
        prompt_ids: tuple[int, ...],
        way: Way,
        seed: int,
        num_draft_tokens: int,
    ) -> None:
        self._target = target
        self._draft = draft
        self._drafter = ModelDrafter(draft)
        self._vocabulary = DraftVocabulary.of(draft.info.logit_token_ids)
        self._prompt_length = len(prompt_ids)
        self._committed = prompt_ids
        self._way = way
        self._seed = seed
        self._num_draft_tokens = num_draft_tokens
        self._sampling = SamplingParams(temperature=way.temperature)

    def rounds(self, max_tokens: int, fan_out: FanOut) -> Iterator[GuessedRound]:
        """Decodes up to so many tokens or an EOS; each round is guessed by what `fan_out` has
        learned so far, and then teaches it."""
        eos = frozenset(self._target.info.eos_token_ids)
        try:
            while len(self._committed) < self._prompt_length + max_tokens:
                noise = RoundNoise(self._seed, self._way.rule, len(self._committed))
                proposal = self._propose(noise)
                rows = self._run(self._draft, proposal)
                guesses = guess_round(
                    rows, self._sampling, noise, proposal.token_ids, RANKS_MAX, self._vocabulary
                )
                outcome = self._outcome(proposal, noise)
                yield self._guessed(guesses, rows, proposal, outcome, fan_out)
                self._committed = (*self._committed, *outcome.token_ids)
                if eos.intersection(outcome.token_ids):
                    return
        finally:
            for engine in (self._target, self._draft):
                engine.release(_SEQUENCE)

    def _propose(self, noise: RoundNoise) -> Proposal:
        self._draft.keep(_SEQUENCE, min(self._draft.length(_SEQUENCE), len(self._committed) - 1))
        request = DraftRequest(
            session_id=_SEQUENCE,
            tenant="",
            token_ids=self._committed,
            prompt_length=self._prompt_length,
            num_draft_tokens=self._num_draft_tokens,
            sampling=self._sampling,
            rule=self._way.rule,
            noise=noise,
        )
        [proposal] = self._drafter.propose([request])
        if isinstance(proposal, OutriderError):
            raise proposal
        if isinstance(proposal, Unended):
            raise InvariantError("a proposal without a deadline ends in its call")
        return proposal

    def _run(self, engine: Engine, proposal: Proposal) -> torch.Tensor:
        """The model's logits after the committed tokens and after each draft token: [K + 1, N]."""
        engine.keep(_SEQUENCE, min(engine.length(_SEQUENCE), len(self._committed) - 1))
        tokens = (*self._committed[engine.length(_SEQUENCE) :], *proposal.token_ids)
        [logits] = engine.forward([SequenceStep(_SEQUENCE, tokens, len(proposal) + 1)])
        return logits

    def _outcome(self, proposal: Proposal, noise: RoundNoise) -> Outcome:
        verdict = verdict_from_logits(
            self._run(self._target, proposal), self._sampling, NO_HISTORY, proposal, noise
        )
        uniforms = noise.accept_uniforms(len(proposal))
        return decide(verdict, proposal.token_ids, self._way.rule, uniforms)

    def _guessed(
        self,
        guesses: RoundGuesses,
        rows: torch.Tensor,
        proposal: Proposal,
        outcome: Outcome,
        fan_out: FanOut,
    ) -> GuessedRound:
        num_accepted, correction = outcome.num_accepted, outcome.token_ids[-1]
        by_noise = guesses.rank(num_accepted, correction)
        plan = fan_out.plan(guesses, LOOK_AHEAD_MAX)
        places: list[tuple[int, int | None]] = [(one.num_accepted, one.rank) for one in plan]
        place = (num_accepted, by_noise)
        fan_out.note(guesses, num_accepted, by_noise)
        refused = proposal.token_ids[num_accepted : num_accepted + 1]
        return GuessedRound(
            num_drafted=len(proposal),
            num_accepted=num_accepted,
            by_noise=by_noise,
            by_q=self._rank_by_q(rows[num_accepted], correction, refused),
            planned=places.index(place) if place in places else None,
        )

    def _rank_by_q(self, row: torch.Tensor, correction: int, refused: Sequence[int]) -> int | None:
        """The place of a token among those with the largest logits [N], without a refused one."""
        known, columns = [0], [correction]
        if self._vocabulary is not None:
            found, at = self._vocabulary.columns([correction])
            known, columns = found.tolist(), at.tolist()
        if not known or columns[0] >= len(row):
            return None
        larger = row > row[columns[0]]
        rank = int(larger.count_nonzero())
        for token_id in refused:
            place = [token_id]
            if self._vocabulary is not None:
                place = self._vocabulary.columns([token_id])[1].tolist()
            rank -= sum(int(larger[column]) for column in place)
        return rank
