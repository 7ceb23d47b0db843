"""Events of a session as JSON, with the texts of tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from models import byte_level_tokenizer

from coordinator.http_api.answers import NativeEvents
from coordinator.http_api.errors import to_json
from outrider.messages import PositionLogprobs
from outrider.request import Finished, Metrics, RoundReport, Started, Tokens, Usage
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule
from outrider.tokenizer import TokenizerText

TREE = RoundReport(
    3, (5, 6, 7), 1, 1.5, 0.25, 0.5, 4.0, 0.125, look_ahead_hit=True, proposed_parents=(-1, -1, 0)
)


@pytest.fixture(scope="module")
def text() -> TokenizerText:
    return TokenizerText(byte_level_tokenizer(), "toy")


def told(native: NativeEvents, event: Any) -> dict[str, Any]:
    [found] = json.loads(to_json(native.take(0, event)))
    assert isinstance(found, dict)
    return found


def tokens(first: int, ids: list[int], delta: str, **fields: Any) -> Tokens:
    origins = (*[Origin.ACCEPTED] * (len(ids) - 1), Origin.CORRECTION)[: len(ids)]
    return Tokens(first, tuple(ids), delta, origins, fields.get("logprobs", ()))


def test_beginning_and_end(text: TokenizerText) -> None:
    native = NativeEvents(text)
    assert told(native, Started("ab" * 16, "m", 2**64 - 1, Rule.BLOCK, 7)) == {
        "type": "started", "session_id": "ab" * 16, "model": "m", "seed": 2**64 - 1,
        "rule": "block", "num_prompt_tokens": 7,
    }  # fmt: skip
    end = Finished(FinishReason.STOP, Usage(7, 3), Metrics(2, 4, 1, 1.5, 12.0, 80.0))
    assert told(native, end) == {
        "type": "finished",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
        "metrics": {
            "num_rounds": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 1,
            "mean_acceptance_length": 1.5, "time_to_first_token_ms": 12.0,
            "tokens_per_second": 80.0,
        },
    }  # fmt: skip


def test_characters_go_to_the_token_that_completes_them(text: TokenizerText) -> None:
    """Of a character of several bytes the first tokens have nothing, the last one all of it."""
    snow = text.encode("a☃b")
    assert len(snow) == 5, "each byte of the snowman is a token"
    native = NativeEvents(text)
    first = told(native, tokens(0, snow[:3], "a"))
    assert (first["texts"], first["text_delta"]) == (["a", "", ""], "a")
    rest = told(native, tokens(3, snow[3:], "☃b"))
    assert (rest["first_index"], rest["texts"]) == (3, ["☃", "b"])
    assert rest["origins"] == ["accepted", "correction"]
    assert "logprobs" not in rest


def test_a_round_says_where_its_tokens_begin(text: TokenizerText) -> None:
    """With all of the report; a part of a character is spelled as bytes."""
    native = NativeEvents(text)
    native.take(0, tokens(0, [1, 2, 3], ""))
    snowman = text.encode("☃")[0]
    report = RoundReport(3, (5, snowman), 1, 1.5, 0.25, 0.5, 4.0, 0.125)
    found = told(native, report)
    assert found["proposed_texts"] == [text.spell(5).decode(), "bytes:\\xe2"]
    assert (found["first_index"], found["index"], found["num_accepted"]) == (3, 3, 1)
    parts = [found[f"{part}_ms"] for part in ("draft", "wire", "queue", "verify", "commit")]
    assert parts == [1.5, 0.25, 0.5, 4.0, 0.125]
    assert (found["proposed_parents"], found["look_ahead_hit"]) == ([], False)
    tree = told(native, TREE)
    assert (tree["proposed_parents"], tree["look_ahead_hit"]) == ([-1, -1, 0], True)


def test_without_a_tokenizer_there_are_no_texts() -> None:
    native = NativeEvents(None)
    assert told(native, tokens(0, [1, 2], ""))["texts"] is None
    assert told(native, TREE)["proposed_texts"] is None


def test_an_impossible_token_has_a_number(text: TokenizerText) -> None:
    """JSON knows no infinity."""
    entry = PositionLogprobs(-1.5, ((4, -0.5), (9, float("-inf"))))
    found = told(NativeEvents(text), tokens(0, [1], "", logprobs=(entry,)))
    assert found["logprobs"] == [{"logprob": -1.5, "top": [[4, -0.5], [9, -9999.0]]}]
