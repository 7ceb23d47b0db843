"""Proposals that grow a token at a time from logits, many rounds of one step side by side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider.drafters.drafter import NO_DEADLINE, DraftDeadline
from outrider.errors import OutriderError
from outrider.grammar.token_mask import Allowed, TokenMask
from outrider.speculation.draft_sampling import DraftedGroup, draw_from_logits, draw_siblings
from outrider.speculation.logits_processing import (
    DraftVocabulary,
    TokenHistory,
    draft_mask,
    masked_logits,
)
from outrider.speculation.proposal import EMPTY_PROPOSAL, Proposal, comb
from outrider.speculation.random_streams import RoundNoise
from outrider.speculation.sampling_params import Rule, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundWanted:
    """What is wanted of a round that has not begun."""

    newest: int
    """The last token that will be committed when it begins."""
    num_draft_tokens: int
    """K, at least 1."""
    sampling: SamplingParams
    rule: Rule
    noise: RoundNoise
    """Its own."""
    history: TokenHistory
    """What penalties count, the newest token included; nothing where there are none."""
    siblings: tuple[int, ...] = ()
    """Candidates that are wanted beside the first, second, ... token; none with penalties, which
    count tokens."""
    allowed: Allowed | None = None
    """What may follow the newest token; None = anything."""
    deadline: DraftDeadline = field(default=NO_DEADLINE, compare=False)
    """Asked before each draw."""


class GrowingRound:
    """A proposal as it grows."""

    __slots__ = ("drawn", "ended", "wanted")

    def __init__(self, wanted: RoundWanted) -> None:
        self.wanted = wanted
        self.drawn: list[DraftedGroup] = []
        """What stands at each place of the proposal; the next one follows its first token."""
        self.ended = False

    def goes_on(self) -> bool:
        """Whether a further token is to be drawn: asked once before each draw, which follows if so.
        A round without time for it ends with what it has."""
        if self.ended or len(self.drawn) >= self.wanted.num_draft_tokens:
            return False
        self.ended = not self.wanted.deadline.allows_draw()
        return not self.ended

    @property
    def newest(self) -> int:
        """The token that the next one follows."""
        return self.drawn[-1][0][0] if self.drawn else self.wanted.newest

    def siblings(self, depth: int) -> int:
        """That are wanted at a place."""
        wanted = self.wanted.siblings
        return wanted[depth] if depth < len(wanted) else 0

    @property
    def history(self) -> TokenHistory:
        """Penalties count what was drafted as if it were output."""
        if not self.wanted.sampling.penalised:
            return self.wanted.history
        drafted = tuple(group[0] for group, _ in self.drawn)
        history = self.wanted.history
        return replace(history, output_ids=(*history.output_ids, *drafted))

    def result(self) -> Proposal:
        """With q where the rule looks at it."""
        if not self.drawn:
            return EMPTY_PROPOSAL
        groups, q = zip(*self.drawn, strict=True)
        parents = comb([len(group) - 1 for group in groups])
        token_ids = tuple(token_id for group in groups for token_id in group)
        return Proposal(token_ids, q if self.wanted.rule.needs_q else (), parents)


class RoundDraws:
    """Draws the next token of many rounds from a model's logits."""

    def __init__(self, vocabulary: DraftVocabulary | None, entries_max: int) -> None:
        """The logits are of `vocabulary`; `entries_max` bounds the support of each draft
        distribution."""
        self._vocabulary = vocabulary
        self._entries_max = entries_max

    def draw(self, rounds: Sequence[GrowingRound], logits: torch.Tensor, depth: int) -> None:
        """The next token of each, at the same place `depth` of all, from its row of [R, N]. One
        whose row cannot be drawn from, or whose completion ends, ends there."""
        rounds, logits = self._masked(rounds, logits)
        for together in _drawn_together(rounds):
            self._draw([rounds[i] for i in together], logits[together], depth)

    def _masked(
        self, rounds: Sequence[GrowingRound], logits: torch.Tensor
    ) -> tuple[Sequence[GrowingRound], torch.Tensor]:
        """Those that go on, and what they may draw."""
        if all(entry.wanted.allowed is None for entry in rounds):
            return rounds, logits
        masks: list[TokenMask | None] = []
        kept: list[int] = []
        for index, entry in enumerate(rounds):
            mask = None
            if entry.wanted.allowed is not None:
                drafted = [group[0] for group, _ in entry.drawn]
                mask = draft_mask(entry.wanted.allowed, drafted, self._vocabulary)
                entry.ended = mask is None
            if not entry.ended:
                kept.append(index)
                masks.append(mask)
        going_on = [rounds[index] for index in kept]
        return going_on, masked_logits(logits[kept], masks, self._vocabulary)

    def _draw(self, rounds: Sequence[GrowingRound], logits: torch.Tensor, depth: int) -> None:
        """Of rounds that share rule and parameters."""
        try:
            groups = self._drawn(rounds, logits, depth)
        except OutriderError as error:
            if len(rounds) > 1:  # It is one's own: each then draws alone, the same tokens.
                for index, entry in enumerate(rounds):
                    self._draw([entry], logits[index : index + 1], depth)
                return
            logger.info("a draft ends after %d tokens: %s", depth, error)
            rounds[0].ended = True
        else:
            for entry, group in zip(rounds, groups, strict=True):
                entry.drawn.append(group)

    def _drawn(
        self, rounds: Sequence[GrowingRound], logits: torch.Tensor, depth: int
    ) -> list[DraftedGroup]:
        sampling = rounds[0].wanted.sampling
        noises, depths = [entry.wanted.noise for entry in rounds], [depth] * len(rounds)
        counts = [1 + entry.siblings(depth) for entry in rounds]
        if max(counts) > 1:
            return draw_siblings(
                logits, sampling, noises, depths, counts, self._entries_max, self._vocabulary
            )
        tokens, _ = draw_from_logits(
            logits, sampling, noises, depths, self._entries_max, rounds[0].history,
            self._vocabulary,
        )  # fmt: skip
        return [((token_id,), q) for token_id, q in tokens]


def _drawn_together(rounds: Sequence[GrowingRound]) -> list[list[int]]:
    """Rounds, by index, of one rule and the same parameters; each alone where these look at its
    tokens."""
    groups: dict[tuple[Rule, SamplingParams, int], list[int]] = {}
    for index, entry in enumerate(rounds):
        sampling = entry.wanted.sampling
        alone = index if sampling.penalised else -1
        groups.setdefault((entry.wanted.rule, sampling, alone), []).append(index)
    return list(groups.values())
