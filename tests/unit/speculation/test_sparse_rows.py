"""Rows of few tokens, side by side, against the same work on full rows one by one."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvariantError, OutriderError
from outrider.speculation.drafting import draft_rows
from outrider.speculation.noise import RoundNoise
from outrider.speculation.noise_rows import NoiseBatch
from outrider.speculation.proposal import COUNT_TOTAL
from outrider.speculation.race import race
from outrider.speculation.sampling import Rule, SamplingParams
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
    rows, _ = SparseRows.likeliest(values, temperature, 1e-3)
    expected = (values.double() / temperature).softmax(1)
    expected[expected < 1e-3 * expected.amax(1, keepdim=True)] = 0
    torch.testing.assert_close(dense(rows), expected / expected.sum(1, keepdim=True))
    assert rows.sizes.sum() == len(rows.ids) == (expected > 0).sum()
    assert all(ids == sorted(ids) for ids in rows.split(rows.ids))


def test_flat_rows_are_left_out() -> None:
    rows, flat = SparseRows.likeliest(logits(), 1.0, 1e-30, 1 / 8)
    assert flat.tolist() == [True, True, False, False, True, True]
    assert rows.sizes.tolist() == [5, 1]
    rows, flat = SparseRows.likeliest(logits(), 1.0, 0.5, 1 / 8)
    assert len(rows) == R
    assert not flat.any()


def test_a_row_is_the_same_beside_any_others() -> None:
    """Peaked and flat ones: neither form is the neighbours'."""
    values = logits()
    values[::2] *= 40
    values[1] /= 40
    beside = draft_rows(values, SamplingParams())
    assert len(set(beside.sizes.tolist())) > 1
    assert V in beside.sizes
    for index in range(R):
        alone = draft_rows(values[index : index + 1], SamplingParams()).row(0)
        assert np.array_equal(alone.ids, beside.row(index).ids)
        assert np.array_equal(alone.mass, beside.row(index).mass)


def test_rows_that_are_no_numbers_are_refused() -> None:
    values = logits()
    values[1, 7] = torch.nan
    with pytest.raises(OutriderError):
        SparseRows.likeliest(values, 1.0, 1e-7)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.COUPLED])
def test_each_rows_race_has_the_winner_of_the_full_row(rule: Rule) -> None:
    rows, _ = SparseRows.likeliest(logits(), 1.0, 1e-300)
    noises = [RoundNoise(seed, rule, 10 * seed) for seed in range(R)]
    keys = NoiseBatch.of(noises).draft_keys(range(R))
    assert rows.draw(keys) == race(dense(rows), keys).tolist()


@pytest.mark.parametrize("count", [1, 3, 64, V])
def test_the_largest_of_each_row(count: int) -> None:
    rows, _ = SparseRows.likeliest(logits(), 1.0, 1e-7)
    kept = rows.largest(count)
    for row, (before, after) in enumerate(
        zip(rows.split(rows.ids), kept.split(kept.ids), strict=True)
    ):
        values = logits()[row]
        expected = sorted(sorted(before, key=lambda v: (-float(values[v]), v))[:count])
        assert after == expected


def largest_remainders(mass: list[float]) -> list[int]:
    """Counts of one row, exactly: the whole parts of its shares, and one more for those with the
    largest remainders, of equal ones the first."""
    total = sum(map(Fraction, mass))
    shares = [Fraction(value) * COUNT_TOTAL / total for value in mass]
    counts = [int(share) for share in shares]
    order = sorted(range(len(mass)), key=lambda v: (counts[v] - shares[v], v))
    for v in order[: COUNT_TOTAL - sum(counts)]:
        counts[v] += 1
    return counts


def counted(masses: list[list[float]]) -> list[list[int]]:
    """Of every token, in order; 0 for those that are dropped."""
    rows = SparseRows(
        np.concatenate([np.arange(len(mass)) for mass in masses]),
        np.concatenate([np.array(mass) for mass in masses]),
        np.array([len(mass) for mass in masses]),
    )
    found = rows.quantised()
    kept = zip(found.split(found.ids), found.split(found.mass.astype(np.int64)), strict=True)
    by_id = [dict(zip(ids, counts, strict=True)) for ids, counts in kept]
    assert all(0 not in row.values() for row in by_id)
    return [
        [row.get(v, 0) for v in range(len(mass))] for row, mass in zip(by_id, masses, strict=True)
    ]


@settings(deadline=None)
@given(
    masses=st.lists(
        st.lists(st.integers(1, 2**20), min_size=1, max_size=30), min_size=1, max_size=5
    )
)
def test_counts_are_those_of_the_largest_remainders(masses: list[list[int]]) -> None:
    """Of rows whose total is a power of 2, so that the code's shares are exact, too."""
    rows = []
    for mass in masses:
        rest = 2**25 - sum(mass)  # At least 2**25 - 30 * 2**20, which is more than 0.
        rows.append([*map(float, mass), float(rest)])
    assert counted(rows) == [largest_remainders(row) for row in rows]


@settings(deadline=None)
@given(
    masses=st.lists(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=30), min_size=1, max_size=5)
)
def test_rounding_moves_a_count_by_one_at_most(masses: list[list[float]]) -> None:
    """Of any mass: shares that are rounded may put two remainders in another order."""
    for mass, row in zip(masses, counted(masses), strict=True):
        assert sum(row) == COUNT_TOTAL
        pairs = zip(row, largest_remainders(mass), strict=True)
        assert all(abs(count - exact) <= 1 for count, exact in pairs)


@pytest.mark.parametrize(
    ("mass", "expected"),
    [
        ([1.0] * 3, [21846, 21845, 21845]),
        ([1.0] * 7, [9363, 9363, 9362, 9362, 9362, 9362, 9362]),
        ([2.0**-17, 1 - 2.0**-16, 2.0**-17], [1, 65535, 0]),
        ([1 - 2.0**-20, 2.0**-20], [65536, 0]),
    ],
)
def test_of_equal_remainders_the_lowest_ids_are_counted(
    mass: list[float], expected: list[int]
) -> None:
    assert counted([mass, [1.0], mass]) == [expected, [COUNT_TOTAL], expected]
    assert largest_remainders(mass) == expected


def test_a_row_without_mass_is_no_distribution() -> None:
    with pytest.raises(InvariantError), np.errstate(all="ignore"):
        SparseRows(np.arange(2), np.array([np.nan, 1.0]), np.array([2])).quantised()


def few_rows() -> SparseRows:
    """Of few tokens out of many, as a sharp distribution leaves them."""
    generator = np.random.default_rng(4)
    ids = [np.sort(generator.choice(5000, size, replace=False)) for size in (1, 3, 40, 7)]
    sizes = np.array([len(row) for row in ids])
    return SparseRows(np.concatenate(ids) + 1000, generator.random(sizes.sum()) + 0.01, sizes)


def test_few_tokens_are_drawn_as_out_of_the_whole_row() -> None:
    rows = few_rows()
    for seed in range(30):
        noises = [RoundNoise(seed, Rule.TOKEN, 9 + row) for row in range(len(rows))]
        keys = NoiseBatch.of(noises).draft_keys(range(len(rows)))
        full = torch.zeros(len(rows), 6000, dtype=torch.float64)
        for row in range(len(rows)):
            full[row, rows.row(row).ids] = torch.from_numpy(rows.row(row).mass)
        assert rows.draw(keys) == race(full, keys).tolist()


def test_of_tokens_that_arrive_together_the_lowest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = few_rows()
    monkeypatch.setattr(SparseRows, "speeds", lambda self, keys: np.ones(len(self.ids)))
    keys = NoiseBatch.of([RoundNoise(1, Rule.TOKEN, 9)] * len(rows)).draft_keys([0] * len(rows))
    assert rows.draw(keys) == rows.ids[rows.starts].tolist()
