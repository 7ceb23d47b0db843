import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.decoding.detokenizer import Completion
from coordinator.requests.validation import GenerationParameters
from outrider.sessions.store import FinishReason
from outrider.speculation.sampling_params import Rule, SamplingParams
from tests.support.coordinator_bench import Letters

EOS = 99


def completion(
    stop: tuple[str, ...] = (), max_tokens: int = 100, lag: int | None = 0, **sampling: Any
) -> Completion:
    """Without a tokenizer if `lag` is None."""
    asked = GenerationParameters(
        prompt=(1,),
        max_tokens=max_tokens,
        stop=stop,
        seed=1,
        rule=Rule.TOKEN,
        num_draft_tokens=0,
        deadline_ms=1,
        sampling=SamplingParams(**sampling),
    )
    return Completion(asked, (EOS,), None if lag is None else Letters(lag))


@pytest.mark.parametrize(("end", "told"), [(5, 5), (EOS, None)])
def test_a_stop_token_ends_the_text_as_eos_does_and_is_named(end: int, told: int | None) -> None:
    answer = completion(lag=2, stop_token_ids=(5, EOS))
    piece = answer.push([0, 1, 2, end, 25, 25])
    assert (piece.num_tokens, piece.text, piece.finish_reason) == (4, "abc", FinishReason.STOP)
    assert (answer.stop_token_id, answer.stop_string) == (told, None)


def test_no_token_ends_the_text_before_min_tokens() -> None:
    answer = completion(min_tokens=2, stop_token_ids=(5,))
    piece = answer.push([5, EOS, 5])
    found = piece.num_tokens, piece.finish_reason, answer.stop_token_id
    assert found == (3, FinishReason.STOP, 5)


def test_without_a_tokenizer_there_is_no_text_but_eos_and_length_still_end_it() -> None:
    answer = completion(max_tokens=4, lag=None)
    assert answer.push([1, 2]).finish_reason is None
    assert answer.push([EOS]).finish_reason is FinishReason.STOP
    assert answer.stop_string is None


@settings(max_examples=500)
@example("cabda", ["ab", "cabz"], [1] * 6, 0, 3, 9)  # Within text that is held for another one.
@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
    lag=st.integers(0, 2),
    min_tokens=st.integers(0, 8),
    max_tokens=st.integers(1, 20),
)
def test_text_ends_at_the_first_stop_string_or_max_tokens_however_it_arrives(
    text: str, stop: list[str], cuts: list[int], lag: int, min_tokens: int, max_tokens: int
) -> None:
    answer = completion(tuple(stop), max_tokens, lag, min_tokens=min_tokens)
    shown, num_tokens, reason = "", 0, None
    tokens, rounds = iter([ord(letter) - 97 for letter in text]), iter(cuts)
    while reason is None and (chunk := list(itertools.islice(tokens, next(rounds)))):
        piece = answer.push(chunk)
        shown, num_tokens = shown + piece.text, num_tokens + piece.num_tokens
        reason = piece.finish_reason
    if reason is None:
        shown += answer.finish()
    expected = _expected(text[:max_tokens], stop, lag, min_tokens)
    assert (shown, answer.stop_string, num_tokens) == expected
    is_too_long = answer.stop_string is None and len(text) >= max_tokens
    assert (reason is FinishReason.LENGTH) == is_too_long


def _expected(text: str, stop: list[str], lag: int, min_tokens: int) -> tuple[str, str | None, int]:
    """The text to show, the stop string that ends it, and the number of tokens. Letters become text
    one by one, the last `lag` of them together. Strings that are complete by `min_tokens` tokens
    are text."""
    ends = [(num, max(0, num - lag)) for num in range(len(text) + 1)] + [(len(text), len(text))]
    for (_, before), (num_tokens, end) in itertools.pairwise(ends):
        found = [
            (at, one)
            for one in stop
            if (at := text.find(one, max(0, before + 1 - len(one)), end)) >= 0
        ]
        if found and num_tokens > min_tokens:
            first, stop_string = min(found)
            return text[:first], stop_string, num_tokens
    return text, None, len(text)
