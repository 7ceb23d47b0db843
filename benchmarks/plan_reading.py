"""The first part of `outrider plan`: the target writes, the draft's model reads.

Each prompt is answered at each temperature, with the noise of the coupled rule: its tokens are then
what the services say to the same seed under that rule, whoever drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.interface import Engine
from outrider.errors import SettingError
from outrider.limits import SEED_MAX
from outrider.planning.hits import Guessing, race_rank
from outrider.planning.survival import DraftedPlace, matched
from outrider.speculation.proposal import COUNT_TOTAL, DraftDistribution
from outrider.speculation.sampling_params import Rule, SamplingParams, resolve_rule

from .acceptance_reading import Asked, Encode, ModelReader, write
from .measurement import Progress
from .prompts import BenchPrompt

_NOT_DRAFTED: Final = DraftedPlace(0.0, 0.0)
SAMPLED_RULES: Final = (Rule.TOKEN, Rule.BLOCK, Rule.COUPLED)


@dataclass(frozen=True, slots=True)
class Text:
    """One answer of the target."""

    category: str
    seed: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """With the EOS, if there is one."""
    max_tokens: int
    """That were allowed."""
    places: tuple[DraftedPlace, ...] = ()
    """[token_ids], as the draft's model sees them; empty where no model drafts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All answers at one temperature."""

    temperature: float
    texts: tuple[Text, ...]
    guessing: Mapping[Rule, Guessing]
    """How well corrections are guessed; of use where a model alone drafts."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """That may be chosen from."""
        return rules_at(self.temperature)


def rules_at(temperature: float) -> tuple[Rule, ...]:
    """The rules of a temperature."""
    return (Rule.GREEDY,) if _params(temperature).greedy else SAMPLED_RULES


def _params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature)


class Reading:
    """Lets a target write, and a model read."""

    def __init__(
        self, target: Engine, draft: ModelReader | None, max_model_len: int, max_tokens: int
    ) -> None:
        """`max_model_len` is what both take; `max_tokens` bounds an answer."""
        self._target = target
        self._draft = draft
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._generator = np.random.default_rng(0)

    def sample(
        self,
        prompts: Sequence[BenchPrompt],
        encode: Encode,
        temperature: float,
        first_seed: int,
        progress: Progress,
    ) -> Sample:
        """All prompts' answers. Raises `SettingError` for prompts that are too long."""
        guessing = {rule: Guessing() for rule in Rule}
        texts = []
        for index, prompt in enumerate(prompts):
            progress(
                f"temperature {temperature:g}, prompt {index + 1} of {len(prompts)}: "
                f"{prompt.category}"
            )
            ids = tuple(encode(prompt.text))
            room = self._max_model_len - len(ids)
            if not ids or room < 1:
                raise SettingError(
                    "prompts",
                    f"number {index + 1} has {len(ids)} tokens; 1 to {self._max_model_len - 1} "
                    "leave room for a completion",
                )
            seed = (first_seed + index) & SEED_MAX
            with torch.inference_mode():
                texts.append(self._text(temperature, guessing, prompt, ids, seed, room))
        return Sample(temperature, tuple(texts), guessing)

    def _text(
        self,
        temperature: float,
        guessing: Mapping[Rule, Guessing],
        prompt: BenchPrompt,
        ids: tuple[int, ...],
        seed: int,
        room: int,
    ) -> Text:
        params = _params(temperature)
        rule = resolve_rule(params, Rule.COUPLED, seeded=True)
        max_tokens = min(self._max_tokens, room)
        [(written, rows)] = write(self._target, [Asked(ids, seed, max_tokens)], params, rule)
        places: list[DraftedPlace] = []
        if self._draft is not None and params.greedy:
            ranks = self._draft.ranks((*ids, *written), len(ids))
            places = [_greedy_place(rank, guessing[Rule.GREEDY]) for rank in ranks]
        elif self._draft is not None:
            supports = self._draft.drawn_from((*ids, *written), len(ids), params)
            places = [
                self._place(guessing, row, token_id, q)
                for row, token_id, q in zip(rows, written, supports, strict=True)
            ]
        return Text(prompt.category, seed, ids, tuple(written), max_tokens, tuple(places))

    def _place(
        self,
        guessing: Mapping[Rule, Guessing],
        row: torch.Tensor,
        token_id: int,
        q: DraftDistribution | None,
    ) -> DraftedPlace:
        """One place at a temperature above 0; `row` is p [V]."""
        if q is None:
            return _NOT_DRAFTED
        p = row.double().cpu().numpy()
        mass = [number / COUNT_TOTAL for number in q.counts]
        drafted = dict(zip(q.token_ids, mass, strict=True)).get(token_id, 0.0)
        place = DraftedPlace(drafted / float(p[token_id]), matched(p, q.token_ids, mass, token_id))
        self._note_guesses(guessing, p, q, token_id, place)
        return place

    def _note_guesses(
        self,
        guessing: Mapping[Rule, Guessing],
        p: npt.NDArray[np.float64],
        q: DraftDistribution,
        token_id: int,
        place: DraftedPlace,
    ) -> None:
        """Which guess of this token would have been right, after a refusal and as a bonus."""
        ids = np.array([v for v in {*q.token_ids, token_id} if v < len(p)], dtype=np.int64)
        listed = dict(zip(q.token_ids, q.counts, strict=True))
        ours = p[ids]
        theirs = np.array([listed.get(int(v), 0) / COUNT_TOTAL for v in ids])
        own = int(np.flatnonzero(ids == token_id)[0])
        rank = race_rank(ours, theirs, own, self._generator)
        for rule in SAMPLED_RULES:
            guessing[rule].bonus.note(rank)
        if rank != 0:  # What the draft drew is refused under coupled.
            after = None if rank is None else rank - 1
            guessing[Rule.COUPLED].recovery.note(after)
        weight = 1.0 - min(1.0, place.ratio)
        if weight <= 0.0:
            return
        residual = np.maximum(ours - theirs, 0.0)
        lost = np.maximum(theirs - ours, 0.0)
        missed = lost.sum()
        if missed <= 0.0 or residual[own] <= 0.0:
            return
        refused = int(self._generator.choice(len(ids), p=lost / missed))
        # What is not accepted, 1 - sum min(p, q), is the residual's whole mass.
        all_mass = 1.0 - float(np.minimum(ours, theirs).sum())
        rank = race_rank(residual / all_mass, theirs, own, self._generator, refused)
        for rule in (Rule.TOKEN, Rule.BLOCK):
            guessing[rule].recovery.note(rank, weight)


def _greedy_place(rank: int | None, guessing: Guessing) -> DraftedPlace:
    guessing.bonus.note(rank)
    if rank != 0:
        guessing.recovery.note(None if rank is None else rank - 1)
    hit = float(rank == 0)
    return DraftedPlace(hit, hit)
