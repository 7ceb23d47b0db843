"""Keyed noise: known answers, ranges, and the same numbers however they are computed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.limits import SEED_MAX
from outrider.speculation import random_streams
from outrider.speculation.gumbel_max import numbers
from outrider.speculation.sampling_params import Rule
from tests.support.verdict_laws import row_keys

FULL = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((FULL,) * 4, (FULL,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
WORDS = st.integers(0, FULL)
SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    """Philox4x32-10 gives the vectors of the Random123 distribution."""
    assert " ".join(f"{word:08x}" for word in random_streams.rounds(*counter, *key)) == words


@settings(deadline=None)
@given(rows=st.lists(st.tuples(SEEDS, WORDS, WORDS, st.integers(0, 4)), min_size=1, max_size=20))
def test_words_of_rows_are_those_of_single_counters(rows):
    keys = [(a, b, stream, seed & FULL, seed >> 32) for seed, a, b, stream in rows]
    words = np.stack(random_streams.row_words(np.array(keys, dtype=np.uint64)), axis=1).tolist()
    assert words == [
        list(random_streams.rounds(0, a, b, stream, seed & FULL, seed >> 32))
        for seed, a, b, stream in rows
    ]


def test_numbers_have_the_finaliser_of_splitmix64():
    """Answers for the seed 1234567 are known."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    first, second = np.array([[1234567]]), np.array([[0]])
    found = numbers((first, second), np.array([[1, 2, 3]]))
    assert found.view(np.uint64)[0].tolist() == expected
    random = np.random.default_rng(1)
    first, second = random.integers(-(2**63), 2**63, (2, 5, 1))
    indices = random.integers(0, 2**33, (5, 40))
    other = numbers((first, second + 1), indices)
    assert (other != numbers((first, second), indices)).all()


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.GREEDY])
def test_absolute_places(rule):
    """Coupled and greedy numbers are keyed by absolute position, on the target's stream."""
    noise = random_streams.RoundNoise(1, rule, 2**32 - 1)
    assert noise.place(0) == random_streams.Place(FULL, 0)
    assert noise.place(1) == random_streams.Place(0, 1)
    assert noise.draft_stream is noise.residual_stream is random_streams.Stream.TARGET
    assert tuple(noise.accept_uniforms(3)) == (0.5,) * 3


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_round_places(rule):
    """Token and block numbers are keyed by the committed length at the round's start, and the
    index."""
    noise = random_streams.RoundNoise(1, rule, 77)
    assert noise.place(0) == random_streams.Place(77, 0x80000000)
    assert noise.place(5) == random_streams.Place(77, 0x80000005)
    assert noise.place(random_streams.INDEX_MAX) == random_streams.Place(77, 0x8000FFFF)
    assert noise.draft_stream is random_streams.Stream.DRAFT
    assert noise.residual_stream is random_streams.Stream.RESIDUAL
    places = [noise.place(index) for index in range(4)]
    words = random_streams.row_words(row_keys(1, places, [random_streams.Stream.ACCEPT] * 4))[0]
    assert list(noise.accept_uniforms(4)) == [random_streams.uniform(int(word)) for word in words]


@pytest.mark.parametrize("rule", Rule)
def test_many_rounds_have_the_keys_that_each_has_alone(rule):
    ends = ((SEED_MAX, 2**32 - 1), (5, 3))
    noises = [random_streams.RoundNoise(seed, rule, length) for seed, length in ends]
    assert random_streams.draft_keys(noises, [2, 1]).tolist() == [
        [*noise.place(index), noise.draft_stream, noise.seed & FULL, noise.seed >> 32]
        for noise, index in zip(noises, (2, 1), strict=True)
    ]
    sizes = [3, 6]
    expected = []
    for noise, size in zip(noises, sizes, strict=True):
        for index in range(size):
            stream = noise.residual_stream if index < size - 1 else random_streams.Stream.TARGET
            place = noise.place(index)
            expected.append([*place, stream, noise.seed & FULL, noise.seed >> 32])
    assert random_streams.verdict_keys(noises, sizes).tolist() == expected


def test_choice_seeds():
    """Choice 0 has the request's seed. The others have words 0 and 1 of their own counter."""
    assert random_streams.choice_seed(2**64 - 1, 0) == 2**64 - 1
    low, high, *_ = random_streams.rounds(2, 0, 0, 4, 9, 1)
    assert random_streams.choice_seed(1 << 32 | 9, 2) == high << 32 | low
    assert len({random_streams.choice_seed(5, j) for j in range(16)}) == 16
