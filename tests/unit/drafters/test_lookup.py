"""Prompt lookup, compared with a search of the whole text, and what a proposal may depend on."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.lookup import OCCURRENCES_MAX, TOKENS_PER_MATCH, NgramDrafter
from outrider.foundation.tokens import TokenSequence
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import Rule
from tests.support.lookup_requests import request


def search(ids: list[int], ngrams: tuple[int, int], num_tokens: int) -> tuple[int, ...]:
    """The definition: compares every place with the end of the text."""
    matches: list[tuple[int, int]] = []
    for end in range(len(ids) - 1, 0, -1):
        length = 0
        while length < min(end, ngrams[1]) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= ngrams[0]:
            matches.append((length, end))
    matches = matches[:OCCURRENCES_MAX]
    if not matches:
        return ()
    length, start = max(matches)
    text = list(ids)
    for i in range(min(num_tokens, TOKENS_PER_MATCH * length)):
        text.append(text[start + i])
    return tuple(text[len(ids) :])


NGRAMS = st.builds(lambda low, more: (low, low + more), st.integers(1, 3), st.integers(0, 4))


@given(ids=st.lists(st.integers(0, 2), max_size=60), ngrams=NGRAMS, k=st.integers(0, 8))
@settings(max_examples=400, deadline=None)
def test_a_guess_is_what_a_search_finds(ids: list[int], ngrams: tuple[int, int], k: int) -> None:
    """Three token ids, so that there are matches of every length."""
    guess = NgramDrafter(*ngrams).guess(request(ids, k))
    assert guess.token_ids == search(ids, ngrams, k)


@given(
    ids=st.lists(st.integers(0, 2), max_size=60), least=st.sampled_from([0.1, 0.3, 0.5, 0.7, 1.0])
)
def test_a_guess_ends_before_its_chance_is_too_small(ids: list[int], least: float) -> None:
    whole = NgramDrafter().guess(request(ids, 8))
    guess = NgramDrafter().guess(request(ids, 8, min_chance=least))
    num = len(guess.token_ids)
    assert guess.token_ids == whole.token_ids[:num]
    assert guess.score >= num * least, "all its tokens have at least this chance"
    if num < len(whole.token_ids):
        longer = NgramDrafter().guess(request(ids, num + 1))
        assert longer.score - guess.score < least


@given(
    parts=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8),
    ngrams=NGRAMS,
    cut=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_a_proposal_depends_on_the_committed_tokens_alone(
    parts: list[list[int]], ngrams: tuple[int, int], cut: int
) -> None:
    """A drafter that has followed the session, was rolled back, or has served other sessions
    proposes the same as a new drafter."""
    drafter = NgramDrafter(*ngrams)
    committed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.drafters.lookup.SEQUENCES_PER_REPLICA_MAX", 2)
        for number, part in enumerate(parts):
            committed = committed + part
            if number == 4:
                committed = committed[:cut]
            drafter.guess(request([0, 1, 0, 1], session_id=str(number % 3)))
            fresh = NgramDrafter(*ngrams).guess(request(committed))
            known = TokenSequence(committed[: len(committed) - len(part)]) if number % 2 else None
            asked = replace(request(committed), digests=known)
            assert drafter.guess(asked) == fresh


class Watched(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_round_reads_the_new_tokens_only() -> None:
    drafter = NgramDrafter()
    known = TokenSequence([k % 50 for k in range(5000)])
    drafter.guess(request(list(known.ids)))
    tokens = Watched([*known.ids, 1, 2, 3])
    guess = drafter.guess(replace(request(tokens), digests=known))
    assert tokens.num_read == 3
    assert guess == NgramDrafter().guess(request(tokens))


@pytest.mark.parametrize("rule", list(Rule))
def test_proposals_are_one_hot(rule: Rule) -> None:
    asked = request([1, 2, 3, 1, 2], 2, rule=rule)
    proposal = NgramDrafter().guess(asked).proposal(asked)
    expected_q = (None, None) if rule in (Rule.TOKEN, Rule.BLOCK) else ()
    assert proposal == Proposal((3, 1), expected_q)
