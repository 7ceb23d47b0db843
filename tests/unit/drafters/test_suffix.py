"""Suffix decoding compared with its definition, and the history: its tenants and its limits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters import suffix
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.suffix import END, History, SuffixConfig, SuffixDrafter
from outrider.speculation.sampling_params import Rule
from tests.support.lookup_requests import request

SMALL = SuffixConfig(depth=4, occurrences_max=6)


def common(text: Sequence[int], end: int, tail: Sequence[int]) -> int:
    length = 0
    while length < min(end, len(tail)) and text[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length


def defined(
    ids: Sequence[int], outputs: Sequence[Sequence[int]], k: int, config: SuffixConfig
) -> tuple[list[tuple[int, ...]], float]:
    """The definition: every place of every text, the best over all match lengths. Guesses whose
    scores differ only by rounding are equally good."""
    tail = ids[-config.depth :]
    own = [(ids, end, common(ids, end, tail)) for end in range(len(ids) - 1, 0, -1)]
    old = [
        (output, end, common(output, end, tail))
        for output in reversed(outputs)
        for end in range(len(output), 0, -1)
    ]
    places = [place for place in own if place[2] >= 1][: config.occurrences_max]
    places += [place for place in old if place[2] >= 2][: config.occurrences_max]
    guesses: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for length in range(config.depth, 0, -1):
        matching = [place for place in places if place[2] >= length]
        drafted: list[int] = []
        score, product = 0.0, 1.0
        while matching and len(drafted) < min(k, config.tokens_per_match * length):
            longer = [
                (([*text, *drafted] if text is ids else text), end + len(drafted), text, end)
                for text, end, _ in matching
            ]
            counts = Counter(text[place] for text, place, *_ in longer if place < len(text))
            if not counts:
                break
            token_id = min(counts, key=lambda v: (-counts[v], v))
            product *= counts[token_id] / (sum(counts.values()) + 2 / (length + 2 * len(drafted)))
            if product < config.min_score:
                break
            matching = [
                (original, end, length)
                for text, place, original, end in longer
                if place < len(text) and text[place] == token_id
            ]
            drafted.append(token_id)
            score += product
        guesses.append((tuple(drafted), score))
    best = max(score for _, score in guesses)
    return [token_ids for token_ids, score in guesses if score > best - 1e-9], best


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(
    ids=TEXTS,
    outputs=st.lists(TEXTS, max_size=4),
    k=st.integers(1, 8),
    least=st.sampled_from([(0.05, 0.0), (0.2, 0.1), (0.05, 0.4)]),
)
@settings(max_examples=300, deadline=None)
def test_a_guess_is_what_most_often_followed(
    ids: list[int], outputs: list[list[int]], k: int, least: tuple[float, float]
) -> None:
    """Three token ids, so that there are matches of every length. Of the limits on a token's
    chance, the setting's and the round's, the greater applies."""
    config = replace(SMALL, min_score=least[0])
    drafter = SuffixDrafter(config)
    for number, output in enumerate(outputs):
        name = f"old{number}"
        drafter.guess(request(output, session_id=name, prompt_length=0, seed=number + 1))
        drafter.release(name)
    guess = drafter.guess(request(ids, k, min_chance=least[1]))
    equally_good, score = defined(ids, outputs, k, replace(config, min_score=max(least)))
    assert guess.token_ids in equally_good
    assert guess.score == pytest.approx(score)


def finish(
    drafter: SuffixDrafter, name: str, token_ids: Sequence[int], *, tenant: str = "", seed: int
) -> None:
    asked = request(token_ids, session_id=name, tenant=tenant, prompt_length=2, seed=seed)
    drafter.guess(asked)
    drafter.release(name)


def test_an_answer_serves_the_next_session_of_its_tenant_alone() -> None:
    drafter = SuffixDrafter(SuffixConfig())
    finish(drafter, "a", (1, 2, 3, 4, 5, 6), tenant="one", seed=1)
    again = request((9, 8, 1, 2), session_id="b", tenant="one", seed=2)
    assert drafter.guess(again).token_ids == (3, 4, 5, 6)
    other = request((9, 8, 1, 2), session_id="c", tenant="two", seed=3)
    assert drafter.guess(other).token_ids == ()


@pytest.mark.parametrize("rule", list(Rule))
def test_a_seed_that_was_had_before_steers_no_draft(rule: Rule) -> None:
    """If noise is keyed by the round, the second session of a seed reads no history. Its output is
    not added to the history, so that the first session does not read it either."""
    drafter = SuffixDrafter(SuffixConfig())
    drafter.guess(request((1, 2), session_id="first", seed=7))
    finish(drafter, "other", (1, 2, 3, 4), seed=8)
    second = request((5, 1, 2), session_id="second", seed=7, rule=rule)
    assert bool(drafter.guess(second).token_ids) == rule.absolute_noise
    finish(drafter, "second", (5, 6, 7, 8), seed=7)
    first = request((5, 1, 2), session_id="first", seed=7, rule=rule)
    assert drafter.guess(first).token_ids == (3, 4)
    assert drafter.guess(replace(first, token_ids=(5, 6, 7))).token_ids == ()


def test_a_session_that_comes_back_is_not_the_first_any_more() -> None:
    """The session's earlier output, which is now in the history, has the same noise."""
    drafter = SuffixDrafter(SuffixConfig())
    finish(drafter, "first", (1, 2, 3, 4), seed=7)
    again = request((5, 1, 2), session_id="first", seed=7)
    assert drafter.guess(again).token_ids == ()
    finish(drafter, "first", (1, 2, 9, 9), seed=7)
    assert drafter.guess(request((5, 1, 2), session_id="other", seed=8)).token_ids == (3, 4)


def test_a_seed_is_forgotten_with_what_its_session_wrote() -> None:
    """Sessions of another tenant make a seed forgotten. Outputs that were added later stay, and a
    later session of this seed can use them."""
    drafter = SuffixDrafter(SuffixConfig(), seeds_max=3)
    for seed, tenant in enumerate(["one", "two", "one", "two"]):
        first = 10 * seed
        finish(drafter, f"s{seed}", range(first, first + 4), tenant=tenant, seed=seed)
    last = request((9, 1, 2), session_id="last", tenant="one", seed=0)
    assert drafter.guess(last).token_ids == ()
    assert drafter.guess(replace(last, token_ids=(9, 21, 22))).token_ids == (23,)


@given(
    sessions=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), TEXTS), max_size=40),
    seeds_max=st.integers(1, 5),
    per_tenant=st.integers(0, 40),
)
@settings(max_examples=200, deadline=None)
def test_seeds_of_kept_answers_are_remembered(
    sessions: list[tuple[str, int, list[int]]], seeds_max: int, per_tenant: int
) -> None:
    config = replace(SMALL, tokens_per_tenant=per_tenant, tokens_total=60)
    drafter = SuffixDrafter(config, seeds_max=seeds_max)
    for number, (tenant, seed, token_ids) in enumerate(sessions):
        finish(drafter, str(number), (0, 0, *token_ids), tenant=tenant, seed=seed)
        known = drafter._first_of_seed
        assert len(known) <= seeds_max
        for name, history in drafter._history._tenants.items():
            assert all((name, held) in known for held in history.lengths)


@given(
    added=st.lists(st.tuples(st.sampled_from("abc"), TEXTS), max_size=30),
    per_tenant=st.integers(0, 30),
    total=st.integers(0, 50),
)
@settings(max_examples=200, deadline=None)
def test_a_history_holds_the_latest_answers_within_its_bounds(
    added: list[tuple[str, list[int]]], per_tenant: int, total: int
) -> None:
    history = History(per_tenant, total)
    everything: dict[str, list[int]] = {}
    for seed, (tenant, token_ids) in enumerate(added):
        history.add(tenant, seed, token_ids)
        everything.setdefault(tenant, []).extend([*token_ids, END])
        held = [text for name in everything if (text := history.of(name)) is not None]
        assert sum(map(len, held)) == history._num_tokens <= total
    for tenant in everything:
        text = history.of(tenant)
        if text is None:
            continue
        kept = text.slice(0, text.end)
        assert len(kept) <= per_tenant
        assert kept == everything[tenant][len(everything[tenant]) - len(kept) :]
        offset = text.end - len(kept)
        for gram in {tuple(kept[i : i + 2]) for i in range(len(kept) - 1)} | {(0, 1), (2, 2)}:
            ends = [i for i in range(len(kept), 1, -1) if tuple(kept[i - 2 : i]) == gram]
            assert list(text.occurrences(gram)) == [offset + end for end in ends]
        assert len(text._last) <= len(kept)


def test_a_long_answer_is_learned_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches are found across the ends of pieces."""
    monkeypatch.setattr(suffix, "PIECE_TOKENS", 6)
    drafter, text = SuffixDrafter(SMALL), range(100, 130)
    drafter.guess(request((1, 2), session_id="a", prompt_length=2, seed=1))
    lesson = drafter.end("a", (1, 2, *text))
    assert drafter.guess(asked((9, 100, 101))).token_ids == ()
    assert next(lesson) == 10
    assert drafter.guess(asked((9, 100, 101))).token_ids[:2] == (102, 103)
    assert drafter.guess(asked((9, 127, 128))).token_ids == ()
    assert [*lesson] == [10, 10, 10, 8]
    for first, second in pairwise(text[:-1]):
        assert drafter.guess(asked((9, first, second))).token_ids[:1] == (second + 1,)


def asked(token_ids: Sequence[int]) -> DraftRequest:
    return request(token_ids, session_id=str(token_ids), seed=hash(tuple(token_ids)) % 2**32)


def test_a_long_answer_is_kept_as_far_as_a_history_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "PIECE_TOKENS", 6)
    drafter = SuffixDrafter(replace(SMALL, tokens_per_tenant=40))
    finish(drafter, "a", (1, 2, *range(100, 200)), seed=1)
    assert drafter.guess(asked((9, 197, 198))).token_ids[:1] == (199,)
    assert drafter.guess(asked((9, 182, 183))).token_ids[:1] == (184,)


def test_the_rest_of_an_answer_is_not_learned_once_its_seed_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suffix, "PIECE_TOKENS", 6)
    drafter = SuffixDrafter(SMALL, seeds_max=2)
    drafter.guess(request((1, 2), session_id="a", prompt_length=2, seed=1))
    lesson = drafter.end("a", (1, 2, *range(100, 130)))
    assert next(lesson) == 10
    for seed in (5, 6):
        drafter.guess(request((1, 2), session_id=f"later{seed}", seed=seed))
    assert [*lesson] == []
    assert drafter._history.of("") is None


def test_a_text_that_is_forgotten_teaches_nothing() -> None:
    drafter = SuffixDrafter(SuffixConfig())
    drafter.guess(request((1, 2, 3, 4), session_id="a", prompt_length=2, seed=1))
    drafter.forget("a")
    drafter.release("a")
    assert [*drafter.end("a", (1, 2, 3, 4))] == []
    assert drafter.guess(asked((9, 1, 2))).token_ids == ()
