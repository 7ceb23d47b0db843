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
from outrider.speculation.drafting import DraftedGroup, draw_from_logits, draw_siblings
from outrider.speculation.noise import RoundNoise
from outrider.speculation.proposal import EMPTY_PROPOSAL, Proposal
from outrider.speculation.reduced import ReducedVocabulary
from outrider.speculation.sampling import Rule, SamplingParams
from outrider.speculation.transforms import TokenHistory
from outrider.speculation.trees import comb

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
    siblings: tuple[int, ...] = ()
    """Candidates that are wanted beside the first, second, ... token; none with penalties, which
    count tokens."""


class SelfDrafter(Protocol):
    """Proposes for rounds of the target that it is a part of. As of any drafter, a proposal depends
    on nothing that was drafted and not committed, and on no numbers but its own round's."""

    def propose(self, rounds: Sequence[NextRound]) -> list[Proposal]:
        """One proposal for each, in order; of what is wanted or less."""
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
            groups = self._drawn(entries, logits, depth)
        except OutriderError as error:
            if len(entries) > 1:  # It is one's own: each then draws alone, the same tokens.
                for index, entry in enumerate(entries):
                    self._draw([entry], logits[index : index + 1], depth)
                return
            logger.info("a draft ends after %d tokens: %s", depth, error)
            entries[0].ended = True
        else:
            for entry, group in zip(entries, groups, strict=True):
                entry.drawn.append(group)

    def _drawn(
        self, entries: Sequence[_Growing], logits: torch.Tensor, depth: int
    ) -> list[DraftedGroup]:
        sampling = entries[0].round.sampling
        noises, depths = [entry.round.noise for entry in entries], [depth] * len(entries)
        counts = [1 + entry.siblings(depth) for entry in entries]
        if max(counts) > 1:
            return draw_siblings(
                logits, sampling, noises, depths, counts, self._entries_max, self._vocabulary
            )
        tokens, _ = draw_from_logits(
            logits, sampling, noises, depths, self._entries_max, entries[0].history,
            self._vocabulary,
        )  # fmt: skip
        return [((token_id,), q) for token_id, q in tokens]


class _Growing:
    """A proposal as it grows."""

    __slots__ = ("drawn", "ended", "features", "round")

    def __init__(self, of: NextRound) -> None:
        self.round = of
        self.features = of.features
        self.drawn: list[DraftedGroup] = []
        """What stands at each place of the proposal; the next one follows its first token."""
        self.ended = False

    @property
    def wants_more(self) -> bool:
        return not self.ended and len(self.drawn) < self.round.num_draft_tokens

    @property
    def newest(self) -> int:
        return self.drawn[-1][0][0] if self.drawn else self.round.newest

    def siblings(self, depth: int) -> int:
        """That are wanted at a place."""
        wanted = self.round.siblings
        return wanted[depth] if depth < len(wanted) else 0

    @property
    def history(self) -> TokenHistory:
        """Penalties count what was drafted as if it were output."""
        if not self.round.sampling.penalised:
            return self.round.history
        drafted = tuple(group[0] for group, _ in self.drawn)
        return replace(self.round.history, output_ids=(*self.round.history.output_ids, *drafted))

    def result(self) -> Proposal:
        """With q where the rule looks at it."""
        if not self.drawn:
            return EMPTY_PROPOSAL
        groups, q = zip(*self.drawn, strict=True)
        parents = comb([len(group) - 1 for group in groups])
        token_ids = tuple(token_id for group in groups for token_id in group)
        return Proposal(token_ids, q if self.round.rule.needs_q else (), parents)


def _drawn_together(entries: Sequence[_Growing]) -> list[list[int]]:
    """Rounds, by index, of one rule and the same parameters; each alone where these look at its
    tokens."""
    groups: dict[tuple[Rule, SamplingParams, int], list[int]] = {}
    for index, entry in enumerate(entries):
        sampling = entry.round.sampling
        alone = index if sampling.penalised else -1
        groups.setdefault((entry.round.rule, sampling, alone), []).append(index)
    return list(groups.values())
