"""Faults of real implementations, planted and found by the statistic that passes without them
(`test_sequences_have_the_targets_law`). False alarm <= 1e-6 each."""

import numpy as np
import pytest
import torch
from core_rounds import (
    K_MAX,
    PROMPT_LENGTH,
    Broken,
    Controller,
    Plan,
    Seen,
    cells_of,
    fixed,
    generate,
    seeds_of,
    stops_after_a_weak_slot,
)
from core_toys import RATIO_RULES, ToyPair, flat_pair, sampling_pair
from exactness.law import Fit, chi_square
from verdict_laws import NoiseRows

from outrider.errors import InvariantError
from outrider.speculation import verification
from outrider.speculation.accept_reject import Verdict, decide
from outrider.speculation.draft_sampling import count_levels, draw_quantised
from outrider.speculation.random_streams import RowKeys, Stream, WordArray
from outrider.speculation.sampling_params import Rule

NUM_SEQUENCES = 90_000
EXACT = Broken()
THREE_DRAFTS = fixed(3)
WEAK_SLOT_PAIR = flat_pair([0.2, 0.3, 0.5], [0.6, 0.3, 0.1])


def run(
    rule: Rule,
    broken: Broken = EXACT,
    pair: ToyPair | None = None,
    controller: Controller = THREE_DRAFTS,
    num_tokens: int = 3,
) -> Fit:
    pair = pair or sampling_pair()
    tokens = generate(pair, rule, controller, seeds_of(NUM_SEQUENCES, 7), num_tokens, broken)
    return chi_square(cells_of(tokens, pair.vocab_size), pair.law(num_tokens))


class DraftNoiseForResiduals(NoiseRows):
    """The token after a rejection uses the noise that drew the rejected token."""

    def correction_keys(self, num_draft_tokens: int) -> RowKeys:
        keys = super().correction_keys(num_draft_tokens)
        keys[keys[:, 2] == int(Stream.RESIDUAL), 2] = int(Stream.DRAFT)
        return keys


class AbsolutePlaces(NoiseRows):
    """Every draw is keyed by its absolute position, discarded slots included."""

    def _places(self, lengths: WordArray, indices: WordArray) -> tuple[WordArray, WordArray]:
        return lengths + indices, np.uint64(0) * indices


class AlwaysZero(NoiseRows):
    """u = 0: everything passes, even what the target cannot say."""

    def accept_uniforms(self, num_draft_tokens: int, sibling: int = 0) -> torch.Tensor:
        return torch.zeros(len(self), num_draft_tokens, dtype=torch.float64)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_mutant_shared_noise_for_draft_and_residual(rule):
    assert run(rule, Broken(noise=DraftNoiseForResiduals)).rejects
    assert not run(rule).rejects


def test_mutant_absolute_keys_under_block():
    """Even with K fixed: block reads beyond the slot where it stops."""
    assert run(Rule.BLOCK, Broken(noise=AbsolutePlaces), num_tokens=4).rejects
    assert not run(Rule.BLOCK, num_tokens=4).rejects


def test_mutant_absolute_keys_under_token():
    """Exact with K fixed, biased with a controller that has read a discarded slot."""
    broken = Broken(noise=AbsolutePlaces)
    assert not run(Rule.TOKEN, broken, WEAK_SLOT_PAIR).rejects
    assert run(Rule.TOKEN, broken, WEAK_SLOT_PAIR, stops_after_a_weak_slot).rejects
    assert not run(Rule.TOKEN, EXACT, WEAK_SLOT_PAIR, stops_after_a_weak_slot).rejects


class ReadsItsOwnRound:
    """A `Controller` that drafts nothing if the round's first uniform is high, or if its first
    draft token would be 0."""

    def __init__(self, rule: Rule, seeds: np.ndarray, pair: ToyPair, *, by_token: bool) -> None:
        self._rule, self._seeds, self._by_token = rule, seeds, by_token
        self._mass = pair.mass[0, 0].expand(len(seeds), -1)
        self._begun_at = np.full(len(seeds), PROMPT_LENGTH, dtype=np.uint64)

    def __call__(self, seen: Seen) -> Plan:
        if seen.round > 0:
            self._begun_at = self._begun_at + (seen.num_accepted.numpy() + 1).astype(np.uint64)
        noise = NoiseRows(self._seeds, self._rule, self._begun_at)
        if self._by_token:
            every = torch.arange(3).expand(len(self._seeds), -1)
            first = np.zeros(len(self._seeds), dtype=np.uint64)
            keys = noise.draft_keys(first)
            levels = count_levels(self._mass.numpy())
            is_bad = torch.from_numpy(draw_quantised(every.numpy(), levels, keys) == 0)
        else:
            is_bad = noise.accept_uniforms(1)[:, 0] > 0.5
        return torch.where(is_bad, 0, K_MAX), torch.zeros_like(seen.num_accepted)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_mutant_k_reads_its_own_round(rule, by_token):
    seeds = seeds_of(20_000, 8)
    controller = ReadsItsOwnRound(rule, seeds, WEAK_SLOT_PAIR, by_token=by_token)
    tokens = generate(WEAK_SLOT_PAIR, rule, controller, seeds, 2)
    assert chi_square(cells_of(tokens, 3), WEAK_SLOT_PAIR.law(2)).rejects


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_mutant_raw_q(rule):
    """Drafts drawn from the truncated distribution but verified against the raw one. The other way
    round, a token outside its q is refused."""
    pair = flat_pair([0.2, 0.3, 0.5], [0.45, 0.35, 0.2], entries_max=2)
    assert not run(rule, EXACT, pair).rejects
    raw = ToyPair(pair.p, pair.q, pair.q, pair.step)
    assert run(rule, Broken(drawn_from=pair.mass), raw).rejects
    with pytest.raises(InvariantError, match="outside the distribution"):
        run(rule, Broken(drawn_from=pair.q), pair)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_mutant_uniform_zero(rule):
    assert run(rule, Broken(noise=AlwaysZero)).rejects
    with pytest.raises(InvariantError):
        decide(Verdict((0.0,), (1, 2)), (0,), rule, (0.0,))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_mutant_bonus_from_p_of_the_last_draft_token(rule):
    def last_row_twice(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:, :-1], rows[:, -2:-1]], dim=1) if rows.shape[1] > 1 else rows

    assert run(rule, Broken(rows=last_row_twice), num_tokens=4).rejects


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_mutant_residual_without_the_padded_vocabulary(rule, monkeypatch):
    """The draft knows two of three tokens; a residual over those two loses the third."""
    pair = flat_pair([0.5, 0.3, 0.2], [0.7, 0.3, 0.0])
    assert not run(rule, EXACT, pair).rejects
    whole = verification._Places.subtract

    def narrow(places, weights: torch.Tensor, sums: np.ndarray, rows: np.ndarray, amounts):
        left = whole(places, weights, sums, rows, amounts)
        weights[torch.from_numpy(rows.ravel()), 2:] = 0.0
        return left

    monkeypatch.setattr(verification._Places, "subtract", narrow)
    assert run(rule, EXACT, pair).rejects
