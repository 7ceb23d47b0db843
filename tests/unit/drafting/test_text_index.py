"""Texts that are looked through as they would be with some more tokens."""

from __future__ import annotations

import random

import pytest

from outrider.drafting.text_index import TextIndex
from outrider.tokens import TokenSequence


def state(index: TextIndex) -> tuple[object, ...]:
    """All that a look-up can find."""
    grams = [(a, b) for a in range(5) for b in range(5)]
    places = {gram: list(index.occurrences(gram)) for gram in grams}
    return len(index), index.end, list(index.earlier()), places, index.slice(0, index.end)


@pytest.mark.parametrize("gram_length", [1, 2])
@pytest.mark.parametrize("num_cut", [0, 7])
def test_nothing_is_left_of_what_was_assumed(gram_length: int, num_cut: int) -> None:
    """While it lasts the text has the tokens; then it is as one that never had them, its digest
    and what is appended later included."""
    draw = random.Random(gram_length)
    index, untouched = TextIndex(gram_length), TextIndex(gram_length)
    ids: list[int] = []
    for round_index in range(30):
        ids += (added := [draw.randrange(5) for _ in range(draw.randrange(4))])
        for text in (index, untouched):
            text.extend(added)
        if round_index == 10:
            index.cut(num_cut)
            untouched.cut(num_cut)
        assumed = [draw.randrange(5) for _ in range(draw.randrange(4))]
        longer = TextIndex(gram_length)
        longer.extend([*ids, *assumed])
        with index.assuming(assumed):
            assert index.end == longer.end
            first = gram_length + (num_cut if round_index >= 10 else 0)
            assert list(index.earlier()) == [p for p in longer.earlier() if p >= first]
        assert state(index) == state(untouched)
    digests = TokenSequence(ids)
    assert index.begins(ids, digests) == untouched.begins(ids, digests) == (num_cut == 0)


def test_an_error_while_it_lasts_leaves_nothing_either() -> None:
    index = TextIndex(1)
    index.extend([1, 2, 1])
    before = state(index)
    with pytest.raises(KeyError), index.assuming([2, 2]):
        raise KeyError
    assert state(index) == before
