"""The next round's proposal, drafted where the verdict is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from outrider.engine.trained_heads import LoadedHeads
from outrider.errors import OutriderError
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.drafting import DraftedToken, draw_from_logits
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import EMPTY_PROPOSAL, Proposal
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.transforms import TokenHistory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NextRound:
    """What is known of a round that has not begun."""

    features: torch.Tensor
    """[D]: what the target's head read at the token before the newest one."""
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


class SelfDrafter(Protocol):
    """Proposes for rounds of the target that it is a part of. As of any drafter, a proposal depends
    on nothing that was drafted and not committed, and on no numbers but its own round's."""

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """One proposal for each, in order; of K tokens or fewer."""
        ...


class HeadDrafter:
    """Drafts with heads: a token of every round at a time."""

    def __init__(self, heads: LoadedHeads, entries_max: int = DRAFT_SUPPORT_ENTRIES) -> None:
        """`entries_max` bounds the support of each draft distribution."""
        self._heads = heads.module
        self._vocabulary = ReducedVocabulary.of(heads.token_ids)
        self._entries_max = entries_max

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """See `SelfDrafter.propose`. A round whose logits cannot be drawn from has what was drawn
        so far."""
        growing = [_Growing(entry) for entry in rounds]
        for depth in range(len(self._heads.heads)):
            active = [entry for entry in growing if entry.wants_more]
            if not active:
                break
            features = torch.stack([entry.features for entry in active])
            newest = torch.tensor([entry.newest for entry in active], device=features.device)
            features = self._heads.advance(depth, features, newest)
            logits = self._heads.logits(features)
            for entry, row in zip(active, features, strict=True):
                entry.features = row
            for together in _drawn_together(active):
                self._draw([active[i] for i in together], logits[together], depth)
        return [entry.result() for entry in growing]

    def _draw(self, entries: Sequence[_Growing], logits: torch.Tensor, depth: int) -> None:
        """The next token of each, of rounds that share rule and parameters."""
        try:
            tokens, _ = draw_from_logits(
                logits,
                entries[0].round.sampling,
                [entry.round.noise for entry in entries],
                [depth] * len(entries),
                self._entries_max,
                entries[0].history,
                self._vocabulary,
            )
        except OutriderError as error:
            if len(entries) > 1:  # It is one's own: each then draws alone, the same tokens.
                for index, entry in enumerate(entries):
                    self._draw([entry], logits[index : index + 1], depth)
                return
            logger.info("a draft ends after %d tokens: %s", depth, error)
            entries[0].ended = True
        else:
            for entry, drawn in zip(entries, tokens, strict=True):
                entry.drawn.append(drawn)


class _Growing:
    """A proposal as it grows."""

    __slots__ = ("drawn", "ended", "features", "round")

    def __init__(self, of: NextRound) -> None:
        self.round = of
        self.features = of.features
        self.drawn: list[DraftedToken] = []
        self.ended = False

    @property
    def wants_more(self) -> bool:
        return not self.ended and len(self.drawn) < self.round.num_draft_tokens

    @property
    def newest(self) -> int:
        return self.drawn[-1][0] if self.drawn else self.round.newest

    @property
    def history(self) -> TokenHistory:
        """Penalties count what was drafted as if it were output."""
        if not self.round.sampling.penalised:
            return self.round.history
        drafted = tuple(token_id for token_id, _ in self.drawn)
        return replace(self.round.history, output_ids=(*self.round.history.output_ids, *drafted))

    def result(self) -> Proposal:
        """With q where the rule looks at it."""
        if not self.drawn:
            return EMPTY_PROPOSAL
        token_ids, q = zip(*self.drawn, strict=True)
        return Proposal(token_ids, q if self.round.rule.needs_q else ())


def _drawn_together(entries: Sequence[_Growing]) -> list[list[int]]:
    """Rounds, by index, of one rule and the same parameters; each alone where these look at its
    tokens."""
    groups: dict[tuple[Rule, SamplingParams, int], list[int]] = {}
    for index, entry in enumerate(entries):
        sampling = entry.round.sampling
        alone = index if sampling.penalised else -1
        groups.setdefault((entry.round.rule, sampling, alone), []).append(index)
    return list(groups.values())
