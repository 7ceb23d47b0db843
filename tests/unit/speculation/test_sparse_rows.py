"""Rows of few tokens, side by side, against the same work on full rows one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvariantError, OutriderError
from outrider.speculation.drafting import quantise
from outrider.speculation.noise import NoiseBatch, RoundNoise
from outrider.speculation.race import race
from outrider.speculation.sampling import Rule
from outrider.speculation.sparse_rows import SparseRows

R, V = 6, 400


def logits(seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.randn(R, V, generator=torch.Generator().manual_seed(seed)) * 6
    rows[2, 5:] = -torch.inf
    rows[3, 1:] = -torch.inf
    return rows.to(dtype)


def dense(rows: SparseRows) -> torch.Tensor:
    """[R, V], each summing to 1."""
    full = torch.zeros(len(rows), V, dtype=torch.float64)
    for row, (ids, start) in enumerate(zip(rows.split(rows.ids), rows.starts, strict=True)):
        full[row, ids] = torch.from_numpy(rows.mass[start : start + len(ids)])
    return full / full.sum(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_likeliest_have_the_mass_of_a_softmax(dtype: torch.dtype, temperature: float) -> None:
    """But for what is below the floor, which is left out."""
    values = logits(dtype=dtype)
    rows = SparseRows.likeliest(values, temperature, 1e-3)
    expected = (values.double() / temperature).softmax(1)
    expected[expected < 1e-3 * expected.amax(1, keepdim=True)] = 0
    torch.testing.assert_close(dense(rows), expected / expected.sum(1, keepdim=True))
    assert rows.sizes.sum() == len(rows.ids) == (expected > 0).sum()
    assert all(ids == sorted(ids) for ids in rows.split(rows.ids))


def test_rows_of_which_most_is_likely_are_not_sparse() -> None:
    shares = [SparseRows.likeliest(logits(), 1.0, floor, 1 / 8) for floor in (1e-30, 0.5)]
    assert [share is None for share in shares] == [True, False]


def test_rows_that_are_no_numbers_are_refused() -> None:
    values = logits()
    values[1, 7] = torch.nan
    with pytest.raises(OutriderError):
        SparseRows.likeliest(values, 1.0, 1e-7)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
def test_each_rows_race_has_the_winner_of_the_full_row(rule: Rule) -> None:
    rows = SparseRows.likeliest(logits(), 1.0, 1e-300)
    noises = [RoundNoise(seed, rule, 10 * seed) for seed in range(R)]
    keys = NoiseBatch.of(noises).draft_keys(range(R))
    assert rows.draw(keys) == race(dense(rows), keys).tolist()


@pytest.mark.parametrize("count", [1, 3, 64, V])
def test_the_largest_of_each_row(count: int) -> None:
    rows = SparseRows.likeliest(logits(), 1.0, 1e-7)
    kept = rows.largest(count)
    for row, (before, after) in enumerate(
        zip(rows.split(rows.ids), kept.split(kept.ids), strict=True)
    ):
        values = logits()[row]
        expected = sorted(sorted(before, key=lambda v: (-float(values[v]), v))[:count])
        assert after == expected


@settings(deadline=None)
@given(
    masses=st.lists(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=30), min_size=1, max_size=5)
)
def test_counts_are_those_of_rows_that_are_quantised_alone(masses: list[list[float]]) -> None:
    rows = SparseRows(
        np.concatenate([np.arange(len(mass)) for mass in masses]),
        np.concatenate([np.array(mass) for mass in masses]),
        np.array([len(mass) for mass in masses]),
    )
    found = rows.quantised()
    assert found.sizes.min() >= 1
    counts = found.split(found.mass.astype(np.int64))
    for mass, ids, row in zip(masses, found.split(found.ids), counts, strict=True):
        assert sum(row) == 2**16
        alone = quantise(torch.tensor(mass, dtype=torch.float64), len(mass))
        # Sums in another order may round a remainder the other way.
        shares = dict(zip(alone.token_ids, alone.counts, strict=True))
        assert all(abs(n - shares.get(v, 0)) <= 1 for v, n in zip(ids, row, strict=True))


def test_a_row_without_mass_is_no_distribution() -> None:
    with pytest.raises(InvariantError), np.errstate(all="ignore"):
        SparseRows(np.arange(2), np.array([np.nan, 1.0]), np.array([2])).quantised()
