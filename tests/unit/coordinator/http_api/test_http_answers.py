"""How events become OpenAI's answers, and events of `POST /api/generate`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.http_api.answers import Answer, ChatAnswer, CompletionAnswer, Json, NativeEvents
from coordinator.http_api.bodies import ChatBody, CompletionBody
from coordinator.http_api.reading import error_response, to_json
from outrider import errors
from outrider.interfaces import request
from outrider.interfaces.messages import PositionLogprobs
from outrider.models.tokenizer import TokenizerText
from outrider.sessions.store import FinishReason
from tests.support.models import byte_fallback_tokenizer, byte_level_tokenizer
from tests.support.told_answers import finished, started, tokens

TEXT = TokenizerText(byte_level_tokenizer(), "toy")
NOTHING = float("-inf")
Indexed = Sequence[tuple[int, request.Event]]


def begun(chat: bool = True, text: Any = TEXT, **fields: Any) -> Answer:
    if chat:
        fields = {"messages": [{"role": "user", "content": "hi"}]} | fields
        return ChatAnswer(ChatBody.model_validate(fields).translate(), text, 4, 99)
    fields = {"prompt": "x"} | fields
    return CompletionAnswer(CompletionBody.model_validate(fields).translate(), text, 4, 99)


def whole(events: Indexed, **fields: Any) -> Json:
    answer = begun(**fields)
    for index, event in events:
        assert not answer.take(index, event)
    found = answer.whole()
    assert found is not None
    return found


def streamed(events: Indexed, **fields: Any) -> list[Json]:
    answer = begun(stream=True, **fields)
    return [chunk for index, event in events for chunk in answer.take(index, event)]


ONE = [(0, started()), (0, tokens(0, [7], "a")), (0, tokens(1, [8, 9], "bc")), (0, finished())]


def test_a_whole_chat_completion() -> None:
    assert whole(ONE, return_token_ids=True) == {
        "id": "chatcmpl-" + "1".rjust(32, "0"),
        "object": "chat.completion",
        "created": 99,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [7, 8, 9],
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 2.0,
                "draft_acceptance_rate": pytest.approx(1 / 3),
                "num_spec_steps": 2,
                "num_accepted_draft_tokens": 2,
                "num_draft_tokens": 6,
                "num_spec_tokens": 4,
            }
        },
    }


def test_a_streamed_chat_completion() -> None:
    found = streamed(ONE)
    assert {(chunk["object"], chunk["id"]) for chunk in found} == {
        ("chat.completion.chunk", "chatcmpl-" + "1".rjust(32, "0"))
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "bc"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "stop"]
    assert ["metrics" in chunk for chunk in found] == [False, False, False, True]
    assert not any("usage" in chunk for chunk in found)


def test_usage_in_a_last_chunk_and_in_every_chunk() -> None:
    found = streamed(ONE, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in found[:-1]] == [None] * 4
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["total_tokens"] == 8
    assert found[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    found = streamed(ONE, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 1, 3, 3]


def test_choices_of_several_prompts() -> None:
    events: list[tuple[int, request.Event]] = [(i, started(i + 1)) for i in range(4)]
    events += [(i, tokens(0, [i + 4], f"t{i}")) for i in (3, 0, 2, 1)]
    events += [(i, finished()) for i in (2, 3, 1, 0)]
    found = whole(events, chat=False, prompt=["a", "b"], n=2)
    assert [(c["index"], c["text"]) for c in found["choices"]] == [(i, f"t{i}") for i in range(4)]
    assert (found["id"], found["object"]) == ("cmpl-" + "1".rjust(32, "0"), "text_completion")
    assert found["usage"]["prompt_tokens"] == 10
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] == 8
    chunks = streamed(events, chat=False, prompt=["a", "b"], n=2)
    assert ["metrics" in chunk for chunk in chunks] == [False] * 7 + [True]


@pytest.mark.parametrize(("stop", "token_id"), [("x", None), (None, 0), (None, None)])
def test_an_answer_that_a_stop_ended_names_it(stop: str | None, token_id: int | None) -> None:
    events = [*ONE[:-1], (0, replace(finished(stop=stop), stop_token_id=token_id))]
    (choice,) = whole(events)["choices"]
    expected = token_id if stop is None else stop
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected)
    assert streamed(events)[-1]["choices"][0]["stop_reason"] == expected


def test_echo_tells_the_prompt_first() -> None:
    """As it was given, or decoded. All its tokens but the first have a log-probability."""
    prompt = TEXT.encode("a the<|end|>b")
    entry = PositionLogprobs(-1.0, ((prompt[0], -0.5),))
    parts = (prompt[:1], prompt[1:])
    scored = [
        request.PromptTokens((prompt[0],), (None,)),
        request.PromptTokens(tuple(parts[1]), (entry,) * len(parts[1])),
    ]
    answer = tokens(0, [TEXT.encode("c")[0]], "c", [PositionLogprobs(-2.0, ())])
    for given, shown in (("a the<|end|>b", "a the<|end|>b"), (prompt, "a theb")):
        fields = {"chat": False, "prompt": given, "echo": True, "logprobs": 1}
        events: list[tuple[int, request.Event]] = [(0, started()), *((0, one) for one in scored)]
        events += [(0, answer), (0, finished())]
        [choice] = whole(events, **fields)["choices"]
        assert choice["text"] == shown + "c"
        told = choice["logprobs"]
        assert told["tokens"] == [TEXT.spell(one).decode() for one in prompt] + ["c"]
        assert told["token_logprobs"] == [None, *[-1.0] * len(parts[1]), -2.0]
        assert told["top_logprobs"][0] is None
        assert told["top_logprobs"][1][told["tokens"][0]] == -0.5
        offsets = told["text_offset"]
        assert offsets == sorted(offsets)
        for word, offset in zip(told["tokens"], offsets, strict=True):
            is_hidden = word == "<|end|>" and isinstance(given, list)
            assert (shown + "c").startswith("" if is_hidden else word, offset)
        chunks = [chunk["choices"][0] for chunk in streamed(events, **fields)]
        assert [chunk["text"] for chunk in chunks] == [shown, "", "c", ""]
        assert [len(one["logprobs"]["tokens"]) for one in chunks[:3]] == [1, len(parts[1]), 1]
        # First the prompt alone, and then a prompt without log-probabilities.
        events = [(0, started()), *((0, one) for one in scored), (0, finished(FinishReason.LENGTH))]
        assert whole(events, max_tokens=0, **fields)["choices"][0]["text"] == shown
        events = [(0, started()), (0, finished())]
        quiet = {**fields, "logprobs": None}
        assert [one["choices"][0]["text"] for one in streamed(events, **quiet)] == [shown, ""]


def test_histograms_where_they_are_asked_for() -> None:
    rounds = [
        (0, request.RoundReport(0, tuple(range(proposed)), accepted, 0, 0, 0, 0, 0))
        for proposed, accepted in ((0, 0), (4, 1), (4, 4), (2, 1))
    ]
    events: list[tuple[int, request.Event]] = [ONE[0], *rounds, ONE[-1]]
    told = whole(events, speculation={"histograms": True})["metrics"]["speculative_decoding"]
    assert told["acceptance_histogram"] == [0, 2, 0, 0, 1]
    assert told["acceptance_histogram_by_draft_length"] == {
        "0": [1],
        "2": [0, 1, 0],
        "4": [0, 1, 0, 0, 1],
    }


def test_logprobs_of_both_shapes() -> None:
    """Parts of characters are written as bytes. JSON has no infinity, so -9999 stands for it."""
    ids = [*TEXT.encode("a é"), TEXT.encode("\U0001f600")[0]]
    entries = [PositionLogprobs(-0.5, ((ids[0], -0.5), (ids[1], NOTHING))) for _ in ids]
    events: list[tuple[int, request.Event]] = [
        (0, started()),
        (0, tokens(0, ids, "a é", entries)),
        (0, finished()),
    ]
    (choice,) = whole(events, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content) == "a é".encode() + b"\xf0"
    assert content[-1]["token"].startswith("bytes:\\x")
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"] == "a"  # noqa: S105
    (choice,) = whole(events, chat=False, logprobs=2)["choices"]
    legacy = choice["logprobs"]
    assert legacy["tokens"] == [one["token"] for one in content]
    for token, offset in zip(legacy["tokens"], legacy["text_offset"], strict=True):
        assert token.startswith("bytes:") or "a é"[offset:].startswith(token)
    assert legacy["top_logprobs"][-1][legacy["tokens"][-1]] == -0.5
    parts = streamed(events, logprobs=True, top_logprobs=2)
    assert parts[1]["choices"][0]["logprobs"]["content"] == content
    events[1] = (0, tokens(0, [7], "", entries[:1]))
    (choice,) = whole(events, chat=False, text=None, prompt=[1], logprobs=0)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:7"]


def test_the_token_that_came_wins_over_one_that_is_spelled_the_same() -> None:
    text = TokenizerText(byte_level_tokenizer(), "toy")
    text.spell = lambda token_id: b"x" if token_id < 3 else b"y"  # type: ignore[method-assign]
    entry = PositionLogprobs(-0.5, ((2, -0.5), (1, -2.0), (3, -3.0)))
    events = [(0, started()), (0, tokens(0, [2], "x", [entry])), (0, finished())]
    (choice,) = whole(events, chat=False, text=text, logprobs=3)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"x": -0.5, "y": -3.0}]


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_tokens_are_spelled_as_they_stand_in_a_text(tokenizer: Any) -> None:
    text = TokenizerText(tokenizer(), "toy")
    sentence = "the rain would not stop, 東 said"
    ids = [token for token in text.encode(sentence) if not text.is_special(token)]
    assert b"".join(text.spell(token) for token in ids).decode().strip() == sentence
    assert text.spell(text._tokenizer.eos_token_id).decode() == text._tokenizer.eos_token


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (errors.BadRequest("top_p", "bad"), 400, "invalid_request_error", "top_p", "invalid_value"),
        (errors.Unauthenticated("no"), 401, "authentication_error", None, "invalid_api_key"),
        (errors.PermissionDenied("no"), 403, "permission_error", None, "permission_denied"),
        (errors.NotFound("no"), 404, "invalid_request_error", "model", "model_not_found"),
        (errors.Incompatible("no"), 409, "server_error", None, "conflict"),
        (errors.StaleEpoch("no"), 409, "server_error", None, "conflict"),
        (errors.TooLarge("no", "body"), 413, "invalid_request_error", None, "body_too_large"),
        (errors.Overloaded("no", 1500), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (errors.Unavailable("no"), 503, "service_unavailable_error", None, "unavailable"),
        (errors.DeadlineExceeded("no"), 504, "timeout_error", "deadline_ms", "deadline_exceeded"),
        (errors.DataLoss("no"), 500, "server_error", None, "internal_error"),
        (errors.OutriderError("no"), 500, "server_error", None, "internal_error"),
    ],
)
def test_one_shape_and_one_status_for_each_error(
    error: errors.OutriderError,
    status: int,
    kind: str,
    param: str | None,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only a bug is logged."""
    response = error_response(error)
    assert bool(caplog.records) == (type(error) is errors.OutriderError)
    assert response.status_code == status
    told = json.loads(bytes(response.body))["error"]
    assert told == {"message": error.message, "type": kind, "param": param, "code": code}
    assert response.headers.get("retry-after") == {429: "2", 503: "1"}.get(status)
    # OpenAI's client repeats each request with 409 or 504. It must, if a session was taken over.
    stays = isinstance(error, errors.Incompatible | errors.DeadlineExceeded)
    assert response.headers.get("x-should-retry") == ("false" if stays else None)


def told(native: NativeEvents, event: request.Event) -> dict[str, Any]:
    [found] = json.loads(to_json(native.take(0, event)))
    assert isinstance(found, dict)
    return found


def test_native_events_have_all_that_happened() -> None:
    native = NativeEvents(TEXT)
    assert told(native, started()) == {
        "type": "started",
        "session_id": "1".rjust(32, "0"),
        "model": "m",
        "seed": 1,
        "rule": "token",
        "num_prompt_tokens": 5,
    }
    assert told(native, finished()) == {
        "type": "finished",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 4},
        "stop_string": None,
        "stop_token_id": None,
        "metrics": {
            "num_rounds": 5,
            "num_draft_tokens": 6,
            "num_accepted_draft_tokens": 2,
            "mean_acceptance_length": 2.0,
            "time_to_first_token_ms": 1.0,
            "tokens_per_second": 1.0,
            "num_drafts": 2,
        },
    }
    found = told(native, tokens(0, [1], "", [PositionLogprobs(-1.5, ((4, -0.5), (9, NOTHING)))]))
    assert found["logprobs"] == [{"logprob": -1.5, "top": [[4, -0.5], [9, -9999.0]]}]


def test_native_texts_go_to_the_token_that_completes_them() -> None:
    """In a proposal, each part of a character is written as bytes."""
    snow = TEXT.encode("a☃b")
    assert len(snow) == 5, "each byte of the snowman is a token"
    native = NativeEvents(TEXT)
    first = told(native, tokens(0, snow[:3], "a"))
    assert (first["texts"], first["text_delta"]) == (["a", "", ""], "a")
    report = request.RoundReport(3, (5, snow[1], 7), 1, 1.5, 0.25, 0.5, 4.0, 0.125, True)
    found = told(native, report)
    assert found["proposed_texts"][:2] == [TEXT.spell(5).decode(), "bytes:\\xe2"]
    assert (found["first_index"], found["index"], found["num_accepted"]) == (3, 3, 1)
    parts = [found[f"{part}_ms"] for part in ("draft", "wire", "queue", "verify", "commit")]
    assert parts == [1.5, 0.25, 0.5, 4.0, 0.125]
    assert (found["proposed_token_ids"], found["look_ahead_hit"]) == ([5, snow[1], 7], True)
    rest = told(native, tokens(3, snow[3:], "☃b"))
    assert (rest["first_index"], rest["texts"], "logprobs" in rest) == (3, ["☃", "b"], False)
    assert told(NativeEvents(None), tokens(0, [1, 2], ""))["texts"] is None
    assert told(NativeEvents(None), report)["proposed_texts"] is None
