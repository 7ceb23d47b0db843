import itertools
from typing import Any

import pytest
from coordinator_bench import Letters
from hypothesis import given
from hypothesis import strategies as st

from coordinator.decoding.detokenizer import Completion
from outrider.sessions.store import FinishReason

EOS = 99


def ids(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def completion(
    stop: tuple[str, ...] = (), max_tokens: int = 100, lag: int = 0, **more: Any
) -> Completion:
    return Completion(
        max_tokens=max_tokens, stop=stop, eos_token_ids=(EOS,), text_stream=Letters(lag), **more
    )


@pytest.mark.parametrize(("end", "told"), [(5, 5), (EOS, None)])
def test_a_stop_token_ends_the_text_as_eos_does_and_is_named(end: int, told: int | None) -> None:
    answer = completion(lag=2, stop_token_ids=(5, EOS))
    piece = answer.push([*ids("abc"), end, *ids("zz")])
    assert (piece.num_tokens, piece.text, piece.finish_reason) == (4, "abc", FinishReason.STOP)
    assert (answer.stop_token_id, answer.stop_string) == (told, None)


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("abcabcd", ("bc",), "abca"),  # Complete by then, so it is text.
        ("aabcd", ("abc",), "a"),  # Begun by then, and complete after it.
        ("abcd", ("bc", "cbd"), "abcd"),
        ("cabda", ("ab", "cabz"), "cabda"),  # Within text that is held back for another one.
        ("ab", ("b",), "ab"),
    ],
)
def test_only_stop_strings_that_are_completed_after_min_tokens_count(
    text: str, stop: tuple[str, ...], shown: str, cut: int
) -> None:
    answer, found, reason = completion(stop=stop, min_tokens=3), "", None
    for at in range(0, len(text), cut):
        if reason is None:
            piece = answer.push(ids(text)[at : at + cut])
            found, reason = found + piece.text, piece.finish_reason
    assert (found if reason else found + answer.finish()) == shown
    assert (reason is None) == (shown == text)


def test_no_token_ends_the_text_before_min_tokens() -> None:
    answer = completion(min_tokens=2, stop_token_ids=(5,))
    piece = answer.push([5, EOS, 5])
    assert (piece.num_tokens, piece.finish_reason, answer.stop_token_id) == (
        3, FinishReason.STOP, 5,
    )  # fmt: skip


def test_max_tokens_ends_the_completion_and_shows_what_was_held_back() -> None:
    piece = completion(stop=("cz",), max_tokens=3, lag=1).push(ids("abcd"))
    assert (piece.num_tokens, piece.text) == (3, "abc")
    assert piece.finish_reason is FinishReason.LENGTH


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    answer = completion(stop=("cd", "bc"), max_tokens=3, lag=1)
    piece = answer.push(ids("abcd"))
    assert (piece.num_tokens, piece.text) == (3, "a")
    assert (piece.finish_reason, answer.stop_string) == (FinishReason.STOP, "bc")


def test_without_a_tokenizer_there_is_no_text_but_eos_and_length_still_end_it() -> None:
    answer = Completion(max_tokens=4, stop=(), eos_token_ids=(EOS,), text_stream=None)
    assert answer.push([1, 2]).finish_reason is None
    assert answer.push([EOS]).finish_reason is FinishReason.STOP
    assert answer.stop_string is None


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
    lag=st.integers(0, 2),
)
def test_text_is_what_precedes_the_first_stop_string_however_it_arrives(
    text: str, stop: list[str], cuts: list[int], lag: int
) -> None:
    answer = completion(stop=tuple(stop), lag=lag)
    shown, ended = "", False
    tokens, rounds = iter(ids(text)), iter(cuts)
    while not ended and (chunk := list(itertools.islice(tokens, next(rounds)))):
        piece = answer.push(chunk)
        shown += piece.text
        ended = piece.finish_reason is not None
    if not ended:
        shown += answer.finish()
    assert shown == _expected(text, stop, lag)


def _expected(text: str, stop: list[str], lag: int) -> str:
    """The text to show. Letters become text one by one, the last `lag` of them together."""
    for end in [*range(max(0, len(text) - lag) + 1), len(text)]:
        starts = [at for s in stop if (at := text[:end].find(s)) >= 0]
        if starts:
            return text[: min(starts)]
    return text
