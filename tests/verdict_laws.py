"""The laws of the product's verdicts and draws, before any noise or by rows of probabilities, for
tests that compare them with their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from outrider.speculation.logits_processing import DraftVocabulary, row_sums
from outrider.speculation.proposal import Proposal
from outrider.speculation.random_streams import (
    NO_ACCEPT_NOISE,
    SIBLING_SHIFT,
    NoiseBatch,
    RoundNoise,
    Stream,
)
from outrider.speculation.sampling_params import Rule
from outrider.speculation.verification import (
    DraftRows,
    chain_law,
    check_parts,
    verdicts_from_weights,
)
from outrider.speculation.verification import (
    tree_law as tree_law_in_place,
)


@dataclass(frozen=True)
class VerdictLaw:
    """`accept` [B, K], and `weights` [B, K+1, V]: correction n of proposal b is token v with
    probability weights[b, n, v] / weights[b, n].sum()."""

    accept: torch.Tensor
    weights: torch.Tensor


class NoiseRows(NoiseBatch):
    """With the uniforms of acceptance, too."""

    def accept_uniforms(self, num_draft_tokens: int, sibling: int = 0) -> torch.Tensor:
        """`RoundNoise.accept_uniforms` of every session: [B, K]."""
        shape = (len(self), num_draft_tokens)
        if self.rule.absolute_noise or num_draft_tokens == 0:
            return torch.full(shape, NO_ACCEPT_NOISE, dtype=torch.float64)
        indices = np.arange(num_draft_tokens, dtype=np.uint64)[None].repeat(len(self), axis=0)
        keys = self.keys(indices, np.full(shape, int(Stream.ACCEPT), dtype=np.uint64))
        words = replace(keys, b=keys.b | np.uint64(sibling << SIBLING_SHIFT)).words()[0]
        return torch.from_numpy((words + 0.5) * 2.0**-32).view(shape)


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
    probabilities: torch.Tensor, drafts: DraftRows, noise: NoiseBatch
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
    batch = NoiseBatch.of(noises)
    if batch.rule is Rule.GREEDY:
        return one_hot(probabilities.argmax(dim=1).tolist(), vocabulary)
    keys = batch.draft_keys(indices)
    if batch.rule is Rule.COUPLED:
        return raced(probabilities, keys, vocabulary)
    return quantised_draws(
        likely_by_weight(probabilities, entries_max, vocabulary), keys, entries_max
    )
