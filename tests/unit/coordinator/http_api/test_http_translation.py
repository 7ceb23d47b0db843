"""Bodies of HTTP requests as requests of the coordinator: pure functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coordinator.http_api.bodies import ChatBody, CompletionBody, GenerationBody, TranslatedBody
from coordinator.http_api.errors import wrong_body
from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.limits import PROMPTS_MAX, SEED_MAX
from outrider.request import ChatMessage, GenerateRequest
from outrider.speculation.random_streams import choice_seed
from outrider.speculation.sampling_params import Rule, SamplingParams

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def chat(draw: int = 7, **fields: Any) -> TranslatedBody:
    body = ChatBody.model_validate({"messages": [USER]} | fields)
    return body.translate(lambda: draw)


def completion(draw: int = 7, **fields: Any) -> TranslatedBody:
    body = CompletionBody.model_validate({"prompt": "x"} | fields)
    return body.translate(lambda: draw)


def only(asked: TranslatedBody) -> GenerateRequest:
    (request,) = asked.requests
    return request


def refused(kind: type[GenerationBody], fields: Any) -> BadRequest:
    """The error that a caller is told of a body that is wrong."""
    try:
        kind.model_validate(fields).translate(lambda: 7)
    except BadRequest as error:
        return error
    except ValidationError as error:
        return wrong_body([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])
    raise AssertionError("it is taken")


def test_silence_is_the_coordinators_default() -> None:
    """Without a seed the rule is what a request without one has, though a seed is drawn here."""
    request = only(chat())
    assert request == GenerateRequest((ChatMessage("user", "hi"),), seed=7, rule=Rule.TOKEN)
    assert only(completion()) == GenerateRequest(
        "x", seed=7, rule=Rule.TOKEN, default_max_tokens=16
    )
    assert only(chat(seed=3)).rule is None


def test_null_is_as_good_as_nothing() -> None:
    """Clients that write every field ask for nothing by it."""
    for body, kind in (({"messages": [USER]}, ChatBody), ({"prompt": "x"}, CompletionBody)):
        empty = dict.fromkeys(kind.model_fields.keys() - body.keys())
        assert kind.model_validate(body | empty) == kind.model_validate(body)
    assert only(chat(seed=None, n=None, temperature=None)) == only(chat())


def test_every_field_arrives() -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1.0, "repetition_penalty": 1.5,
    }  # fmt: skip
    speculation = {
        "enabled": True, "rule": "block", "num_draft_tokens": 3, "draft_deadline_ms": 20,
        "histograms": True,
    }  # fmt: skip
    asked = chat(
        **sampling, logit_bias={"5": 1, "3": -2.5}, model="m", max_completion_tokens=9, seed=8,
        stop=["a", "b"], ignore_eos=True, logprobs=True, top_logprobs=2, speculation=speculation,
        deadline_ms=100, user="me", stream=True, return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    assert only(asked) == GenerateRequest(
        prompt=(ChatMessage("user", "hi"),), model="m",
        sampling=SamplingParams(**sampling, logit_bias=((3, -2.5), (5, 1.0))),  # type: ignore[arg-type]
        max_tokens=9, stop=("a", "b"), ignore_eos=True, seed=8, rule=Rule.BLOCK,
        num_draft_tokens=3, deadline_ms=100, logprobs=2, include_rounds=True, draft_deadline_ms=20,
    )  # fmt: skip
    assert asked.has_logprobs


@given(seed=st.integers(0, SEED_MAX), n=st.integers(1, 16), num_prompts=st.integers(1, 4))
def test_choices_have_seeds_of_their_own(seed: int, n: int, num_prompts: int) -> None:
    """Choice j of each prompt has `choice_seed(seed, j)`, and stands at prompt * n + j."""
    asked = completion(prompt=[[i + 1] for i in range(num_prompts)], n=n, seed=seed)
    for index, request in enumerate(asked.requests):
        assert request.prompt == (index // n + 1,)
        assert request.seed == choice_seed(seed, index % n)
    assert len(asked.requests) == n * num_prompts


def test_a_negative_seed_is_one_of_64_bits() -> None:
    """As OpenAI has them: the one with the same bits."""
    for seed, same in ((-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (0, 0)):
        assert only(chat(seed=seed)).seed == same
        assert [one.seed for one in completion(seed=seed, prompt="a", n=3).requests] == [
            one.seed for one in completion(seed=same, prompt="a", n=3).requests
        ]
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(ValidationError):
            chat(seed=seed)


def test_prompts_without_a_seed_have_different_ones() -> None:
    seeds = iter((3, 4))
    body = CompletionBody.model_validate({"prompt": ["a", "a"], "n": 2})
    asked = body.translate(lambda: next(seeds))
    drawn = [request.seed for request in asked.requests]
    assert drawn == [3, choice_seed(3, 1), 4, choice_seed(4, 1)]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1, 2], [3]], [(1, 2), (3,)])],
)
def test_prompts_of_every_kind(prompt: Any, prompts: list[Any]) -> None:
    assert [request.prompt for request in completion(prompt=prompt).requests] == prompts


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [[]] * (PROMPTS_MAX + 1), [1, "a"], [True], [1.0], ["a", [1]]]
)
def test_what_is_no_prompt_is_refused_by_name(prompt: Any) -> None:
    assert refused(CompletionBody, {"prompt": prompt}).field == "prompt"


def test_text_parts_are_lines_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
    ]
    asked = chat(messages=messages)
    assert only(asked).prompt == (ChatMessage("system", "a\nb"), ChatMessage("assistant", ""))


def test_plain_decoding_is_asked_for_by_name() -> None:
    assert only(chat(speculation={"enabled": False})).num_draft_tokens == 0
    assert only(chat(speculation={"enabled": True})).num_draft_tokens is None
    with pytest.raises(BadRequest, match=r"speculation\.num_draft_tokens"):
        chat(speculation={"enabled": False, "num_draft_tokens": 4})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"min_tokens": 3, "ignore_eos": True, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 3, "ignore_eos": True, "max_tokens": 5, "stop": "x"}, "min_tokens"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"store": 0}, "store"),
        ({"best_of": True}, "best_of"),
        ({"surprise": None}, "surprise"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias"),
        ({"messages": [USER, {**USER, "tool_calls": [{}]}]}, "messages[1].tool_calls"),
        ({"messages": [{**USER, "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant"}, {"role": "user"}]}, "messages[1].content"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    ],
)
def test_what_is_refused_names_the_field(fields: dict[str, Any], field: str) -> None:
    """What contradicts itself, is not served, or is of another type."""
    found = refused(ChatBody, {"messages": [USER]} | fields)
    assert found.field == field
    assert found.message.startswith(f"{field}: ")


def test_errors_about_the_answers_form_have_the_bodys_name_for_it() -> None:
    asked = chat(guided_regex="a")
    assert only(asked).constraint == Constraint.of_regex("a")
    assert asked.renamed(BadRequest("regex", "is bad"), 0).field == "guided_regex"


def test_what_asks_for_nothing_is_accepted() -> None:
    idle = {
        "tools": [], "tool_choice": "auto", "store": False, "modalities": ["text"],
        "parallel_tool_calls": True, "metadata": {"a": "b"}, "response_format": {"type": "text"},
        "service_tier": "auto", "best_of": 1, "user": "me", "audio": None, "logprobs": False,
        "top_logprobs": 0, "messages": [{**USER, "name": "bob"}],
    }  # fmt: skip
    assert only(chat(**idle)) == only(chat())
    assert only(chat(min_tokens=5, ignore_eos=True, max_tokens=5)).max_tokens == 5
    assert only(completion(echo=False, suffix="")) == only(completion())


@pytest.mark.parametrize(
    ("field", "in_chat", "in_completions"),
    [
        ("sampling.temperature", "temperature", "temperature"),
        ("chat", "messages", "chat"),
        ("chat.messages[2].role", "messages[2].role", "chat.messages[2].role"),
        ("text", "text", "prompt"),
        ("logprobs", "top_logprobs", "logprobs"),
        ("stop[1]", "stop[1]", "stop[1]"),
        ("max_tokens", "max_completion_tokens", "max_tokens"),
    ],
)
def test_the_coordinators_errors_name_the_bodys_fields(
    field: str, in_chat: str, in_completions: str
) -> None:
    error = BadRequest(field, "is wrong")
    told = chat(max_completion_tokens=5).renamed(error, 0)
    assert (told.field, told.message) == (in_chat, f"{in_chat}: is wrong")
    assert completion(max_tokens=5).renamed(error, 0).field == in_completions


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("token_ids", "prompt[1]"), ("token_ids[3]", "prompt[1][3]"), ("text", "prompt[1]"),
        ("stop[0]", "stop"), ("sampling.top_p", "top_p"),
    ],
)  # fmt: skip
def test_which_of_several_prompts_is_wrong_is_named(field: str, name: str) -> None:
    """By its place among the prompts; each has two choices here."""
    asked = completion(prompt=[[1], [2], [3]], n=2, stop="x")
    assert asked.renamed(BadRequest(field, "is wrong"), 3).field == name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    name=st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools"})),
    value=JSON,
)
def test_no_value_of_any_field_is_a_bug(name: str, value: Any) -> None:
    """Whatever JSON a field holds, it is taken, or refused as the caller's mistake."""
    value = json.loads(json.dumps(value))
    for translate in (chat, completion):
        try:
            translate(**{name: value})
        except (BadRequest, ValidationError):
            continue


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"enum": [1, "é"]}}}
OF_SCHEMA = Constraint.of_schema(SCHEMA)
DESCRIBED = {"name": "x", "strict": True, "schema": SCHEMA}


def read(**fields: Any) -> tuple[Constraint | None, str | None]:
    """The constraint that is asked for, and the field that errors about it name."""
    body = CompletionBody.model_validate({"prompt": "x"} | fields)
    found = body.translate(lambda: 1)
    constraint = found.requests[0].constraint
    return constraint, None if constraint is None else found.names[constraint.kind]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_json": None},
    ],
)
def test_any_text(fields: dict[str, Any]) -> None:
    assert read(**fields) == (None, None)


@pytest.mark.parametrize(
    ("fields", "constraint", "field"),
    [
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {}},
            Constraint.any_object(),
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": DESCRIBED}},
            OF_SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
            OF_SCHEMA,
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Constraint.any_object(),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            Constraint.of_regex("a"),
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Constraint.of_choices(["a", "b"]),
            "structured_outputs.choice",
        ),
        ({"guided_json": SCHEMA}, OF_SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, Constraint.of_regex("a"), "guided_regex"),
        ({"guided_choice": ["a"]}, Constraint.of_choices(["a"]), "guided_choice"),
    ],
)
def test_each_way_to_ask(fields: dict[str, Any], constraint: Constraint, field: str) -> None:
    assert read(**fields) == (constraint, field)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: got 'xml'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema: is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema: is no JSON object",
        ),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar: is not served"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice: is no list"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object: got 1"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex: is given beside response_format",
        ),
    ],
)
def test_forms_that_are_none(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=f"^{said}"):
        read(**fields)
