"""The laws of the product's verdicts and draws, before any noise or by rows of probabilities, for
tests that compare them with their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.errors import check
from outrider.limits import DRAFT_SUPPORT_ENTRIES
from outrider.speculation.accept_reject import Verdict
from outrider.speculation.draft_sampling import (
    DraftedToken,
    likely_by_weight,
    one_hot,
    quantised_draws,
    raced,
)
from outrider.speculation.gumbel_max import BLOCK, race
from outrider.speculation.logits_processing import DraftVocabulary, TokenHistory, row_sums
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import (
    INDEX_TAG,
    NO_ACCEPT_NOISE,
    SIBLING_SHIFT,
    WORD_MASK,
    RoundNoise,
    RowKeys,
    Stream,
    WordArray,
    draft_keys,
    row_words,
)
from outrider.speculation.sampling_params import Rule, SamplingParams
from outrider.speculation.verification import (
    DraftRows,
    Question,
    chain_law,
    check_parts,
    verdicts_from_logits,
    verdicts_from_weights,
)
from outrider.speculation.verification import tree_law as tree_law_in_place


@dataclass(frozen=True)
class VerdictLaw:
    """`accept` [B, K], and `weights` [B, K+1, V]: correction n of proposal b is token v with
    probability weights[b, n, v] / weights[b, n].sum()."""

    accept: torch.Tensor
    weights: torch.Tensor


class NoiseRows:
    """The noise of one round in each of B sessions of one rule, as arrays."""

    def __init__(self, seeds: WordArray, rule: Rule, committed_lengths: WordArray) -> None:
        self.seeds, self.rule, self.committed_lengths = seeds, rule, committed_lengths

    @classmethod
    def of(cls, noises: Sequence[RoundNoise]) -> NoiseRows:
        [rule] = {noise.rule for noise in noises}
        lengths = np.array([noise.committed_length for noise in noises], dtype=np.uint64)
        return cls(np.array([noise.seed for noise in noises], dtype=np.uint64), rule, lengths)

    def __len__(self) -> int:
        return len(self.seeds)

    def draft_keys(self, indices: WordArray) -> RowKeys:
        """Of the draft's draw in session b at depth indices[b]: B rows."""
        return self.keys(indices[:, None], RoundNoise(0, self.rule, 0).draft_stream)

    def correction_keys(self, num_draft_tokens: int) -> RowKeys:
        """Of the corrections n = 0..K of every session: B * (K + 1) rows, session by session."""
        width = num_draft_tokens + 1
        keys = self.keys(self._depths(width), RoundNoise(0, self.rule, 0).residual_stream)
        keys[width - 1 :: width, 2] = int(Stream.TARGET)
        return keys

    def accept_uniforms(self, num_draft_tokens: int, sibling: int = 0) -> torch.Tensor:
        """`RoundNoise.accept_uniforms` of every session: [B, K]."""
        shape = (len(self), num_draft_tokens)
        if self.rule.absolute_noise or num_draft_tokens == 0:
            return torch.full(shape, NO_ACCEPT_NOISE, dtype=torch.float64)
        keys = self.keys(self._depths(num_draft_tokens), Stream.ACCEPT)
        keys[:, 1] |= np.uint64(sibling << SIBLING_SHIFT)
        return torch.from_numpy((row_words(keys)[0] + 0.5) * 2.0**-32).view(shape)

    def keys(self, indices: WordArray, stream: Stream) -> RowKeys:
        """Of the places of `indices` [B, N] in every session, row-major."""
        a, b = self._places(self.committed_lengths[:, None], indices)
        seeds = self.seeds[:, None]
        words = (a, b, np.uint64(stream), seeds & np.uint64(WORD_MASK), seeds >> np.uint64(32))
        return np.stack([np.broadcast_to(word, indices.shape).ravel() for word in words], axis=1)

    def _depths(self, num: int) -> WordArray:
        return np.arange(num, dtype=np.uint64)[None].repeat(len(self), axis=0)

    def _places(self, lengths: WordArray, indices: WordArray) -> tuple[WordArray, WordArray]:
        """`RoundNoise.place` for many: (a, b)."""
        if self.rule.absolute_noise:
            positions = lengths + indices
            return positions & np.uint64(WORD_MASK), positions >> np.uint64(32)
        return lengths, indices | np.uint64(INDEX_TAG)


def verdict_from_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    history: TokenHistory,
    proposal: Proposal,
    noise: RoundNoise,
) -> Verdict:
    """The verdict on one proposal."""
    return verdicts_from_logits([Question(logits, params, history, proposal, noise)])[0]


def draft_rows(token_ids: torch.Tensor, support: torch.Tensor, mass: torch.Tensor) -> DraftRows:
    return DraftRows(*(each.cpu().numpy() for each in (token_ids, support, mass)))


def score(probabilities: torch.Tensor, proposal: Proposal, noise: RoundNoise) -> Verdict:
    """The verdict on one proposal. `probabilities` [N + 1, V], rows summing to 1; unchanged."""
    check_parts(probabilities, proposal, noise.rule)
    width = -probabilities.shape[1] % BLOCK
    weights = torch.nn.functional.pad(probabilities, (0, width)).contiguous()
    return verdicts_from_weights(weights, row_sums(weights).cpu().numpy(), [(proposal, noise)])[0]


def tree_law(
    probabilities: torch.Tensor, proposal: Proposal
) -> tuple[tuple[float, ...], torch.Tensor]:
    """Of a tree under token: accept [N], and weights [N + 1, V] of what follows."""
    weights = probabilities.clone()
    return tree_law_in_place(weights, row_sums(weights).cpu().numpy(), proposal), weights


def score_rows(
    probabilities: torch.Tensor, drafts: DraftRows, noise: NoiseRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verdicts on B proposals of K tokens: accept [B, K] and correction [B, K+1].
    `probabilities` [B, K+1, V], unchanged."""
    shape = probabilities.shape[:2]
    token_ids = torch.from_numpy(drafts.token_ids).to(probabilities.device)
    if noise.rule is Rule.GREEDY:
        own = probabilities.argmax(dim=2)
        return (own[:, :-1] == token_ids).double(), own
    keys = noise.correction_keys(shape[1] - 1)
    if noise.rule.needs_q:
        law = verdict_law(noise.rule, probabilities, drafts)
        return law.accept, race(law.weights.flatten(0, 1), keys).view(shape)
    own = race(probabilities.flatten(0, 1), keys).view(shape)
    return (own[:, :-1] == token_ids).double(), own


def verdict_law(rule: Rule, probabilities: torch.Tensor, drafts: DraftRows) -> VerdictLaw:
    """The verdict under token or block. `probabilities` [B, K+1, V] unchanged."""
    check(rule.needs_q, f"under rule {rule.value} a verdict is not a law but a draw")
    num, width = probabilities.shape[:2]
    weights = probabilities.flatten(0, 1).clone()
    rows = np.arange(num * width).reshape(num, width)[:, :-1]
    accept = chain_law(rule, weights, row_sums(weights).cpu().numpy(), rows, drafts)
    return VerdictLaw(
        torch.from_numpy(accept).to(weights.device), weights.view(probabilities.shape)
    )


def draft_token(
    probabilities: torch.Tensor,
    noise: RoundNoise,
    index: int,
    entries_max: int = DRAFT_SUPPORT_ENTRIES,
) -> DraftedToken:
    """Draft token `index` (from 0) of a round, from the draft's `probabilities` [V]."""
    return draft_tokens(probabilities[None], [noise], [index], entries_max)[0]


def draft_tokens(
    probabilities: torch.Tensor,
    noises: Sequence[RoundNoise],
    indices: Sequence[int],
    entries_max: int = DRAFT_SUPPORT_ENTRIES,
    vocabulary: DraftVocabulary | None = None,
) -> list[DraftedToken]:
    """`draft_token` of B sessions of one rule."""
    if not noises:
        return []
    rule = noises[0].rule
    if rule is Rule.GREEDY:
        return one_hot(probabilities.argmax(dim=1).tolist(), vocabulary)
    keys = draft_keys(noises, indices)
    if rule is Rule.COUPLED:
        return raced(probabilities, keys, vocabulary)
    return quantised_draws(likely_by_weight(probabilities, entries_max, vocabulary), keys)
