"""Tools in chat completions: fields of bodies, constraints on answers, parsing of calls."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from coordinator.http_api.answers import ChatAnswer
from coordinator.http_api.tools import (
    ARGUMENTS,
    CALL_FORMATS,
    LIST,
    PLAIN,
    AnswerForm,
    ChatFormats,
    Reader,
    call_id_of,
)
from coordinator.requests.chat_template import read_chat_template
from outrider.config.deployment import HERMES as TEMPLATE
from outrider.errors import BadRequest, SettingError
from outrider.interfaces.request import ChatMessage
from outrider.limits import CALLS_MAX, FILE_BYTES_MAX, TOOLS_MAX
from outrider.models.tokenizer import TokenizerText
from outrider.sessions.store import FinishReason
from tests.support.constrained import tokens as grammar_tokens
from tests.support.http_bodies import USER, chat, refused
from tests.support.models import byte_level_tokenizer
from tests.support.told_answers import finished, started, tokens

Parts = list[tuple[str, str]]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


WEATHER, CLOCK = tool("weather", description="now", parameters=CITY), tool("clock")
BOTH = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}
REGEX = {"structured_outputs": {"regex": "a"}}


def called(arguments: str = "{}", **more: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def test_a_conversation_with_calls_is_told_to_the_template() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "warm"}
    call = called('{"city": "Rome"}', content=None, reasoning_content="hm")
    [request] = chat(
        messages=[USER, call, result], tools=BOTH, chat_template_kwargs={"enable_thinking": False}
    ).requests
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert request.prompt == (
        ChatMessage("user", "hi"),
        ChatMessage(
            "assistant",
            "",
            {
                "reasoning_content": "hm",
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
        ),
        ChatMessage("tool", "warm", {"tool_call_id": "1"}),
    )
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert request.tools == (WEATHER, tool("clock", parameters=nothing))
    assert request.template_variables == {"enable_thinking": False}
    assert request.constraint is None
    assert chat(tools=BOTH, tool_choice="none").requests == chat().requests


MANY = [tool(f"t{number}") for number in range(TOOLS_MAX + 1)]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": MANY}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [WEATHER, tool("weather")]}, "tools"),
        ({"tools": [tool("a", description="x" * 2**18)]}, "tools"),
        ({"tools": [tool("a", parameters={"x": "y" * 2**16})], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": "any"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": "required", **REGEX}, "structured_outputs.regex"),
        ({"messages": [called("[1]")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called("{")]}, "messages[0].tool_calls[0].function.arguments"),
        (
            {"messages": [called() | {"tool_calls": called()["tool_calls"] * (CALLS_MAX + 1)}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [called(role="user", content="x")]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "role": "tool"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {str(n): 1 for n in range(40)}}, "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    assert refused(chat, fields).field == field


def test_far_too_large_tools_are_not_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing them would block the event loop."""
    monkeypatch.setattr("coordinator.http_api.tools.json.dumps", None)
    large = tool("a", parameters={"enum": [{"x": 1}, *["y"] * 2**17]})
    assert refused(chat, {"tools": [large]}).reason == "have more than 262144 bytes"


@pytest.mark.parametrize("several", [True, False])
def test_calls_that_must_come_are_held_to_the_schemas(several: bool) -> None:
    asked = chat(
        tools=BOTH,
        tool_choice="required",
        parallel_tool_calls=several,
        response_format={"type": "json_object"},
    )
    [request] = asked.requests
    assert request.constraint is not None
    assert request.constraint.field == "tools"
    grammar_tokens().compile(request.constraint)
    schema = jsonschema.Draft202012Validator(json.loads(request.constraint.text))
    good = {"name": "weather", "arguments": {"city": "Rome"}}
    clock = {"name": "clock", "arguments": {}}
    assert schema.is_valid([good])
    assert schema.is_valid([good, clock]) is several
    for wrong in (
        [],
        [{**good, "name": "x"}],
        [{**good, "arguments": {"city": "Paris"}}],
        [{**clock, "arguments": {"a": 1}}],
    ):
        assert not schema.is_valid(wrong)


def test_the_named_tool_is_its_arguments_alone() -> None:
    [request] = chat(tools=BOTH, tool_choice=NAMED).requests
    assert json.loads(request.constraint.text) == CITY


def read(form: AnswerForm, text: str, width: int) -> Parts:
    """What a reader finds in a text that comes in pieces of this length."""
    reader = Reader(form)
    parts = [one for at in range(0, len(text), width) for one in reader.push(text[at : at + width])]
    parts += reader.finish()
    found: Parts = []
    for kind, text in parts:
        before = found.pop()[1] if found and found[-1][0] == kind != "name" else ""
        found.append((kind, before + text))
    return found


F: Parts = [("name", "f"), ("arguments", '{"a": 1}')]
G: Parts = [("name", "g"), ("arguments", "{}")]
OK: Parts = [("content", "ok")]
LISTED = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
CALL, _, END, BEGIN, ALL_END = CALL_FORMATS["deepseek"].marks
[SEP] = CALL_FORMATS["deepseek"].separators
BLOCK = f'{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END}'
HERMES, LLAMA, MISTRAL, DEEPSEEK = (
    AnswerForm(calls, ["f", "g"]) for calls in ("hermes", "llama3", "mistral", "deepseek")
)
HELD_LIST = AnswerForm(LIST)
THINKS, OPEN = AnswerForm(opens=False), AnswerForm(opens=True)
TEXTS: list[tuple[AnswerForm, str, Parts]] = [
    (HELD_LIST, LISTED, F + G),
    (replace(HELD_LIST, several=False), LISTED, F),
    (
        HELD_LIST,
        '[ {"name" : "f", "arguments" : {"a": "}\\"]", "b": [1, {}]} } ]',
        [("name", "f"), ("arguments", '{"a": "}\\"]", "b": [1, {}]}')],
    ),
    (HELD_LIST, '[{"name": "f", "arguments": {"a', [("name", "f"), ("arguments", '{"a')]),
    (HELD_LIST, '[{"name": "f', []),
    (AnswerForm(ARGUMENTS, ["f"]), '{"a": 1}', F),
    # Hermes-2-Pro and Qwen2.5
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', F),
    (
        HERMES,
        'I will.\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        [("content", "I will."), *F, *G],
    ),
    (
        replace(HERMES, several=False),
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call> x',
        F,
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> ok', F + OK),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', F),
    (HERMES, '<tool_call>{"name": "g", "arguments": null}', G),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', [F[0], ("arguments", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "f', [("content", '<tool_call>{"name": "f')]),
    (HERMES, '<tool_call>{"id": "}", "name": "g", "arguments": { }}', G),
    (HERMES, " if a <tool> b <", [("content", " if a <tool> b <")]),
    (HERMES, "as <tool_call>oops", [("content", "as<tool_call>oops")]),
    # Llama 3.1 and 3.2
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', F),
    (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": '
        '{"a": 1}}; {"name": "g", "parameters": {}}',
        F + G,
    ),
    (LLAMA, '{"name": "x", "a": 3} is', [("content", '{"name": "x", "a": 3} is')]),
    (LLAMA, "<|python_tag|>f(a=1)", [("content", "<|python_tag|>f(a=1)")]),
    (LLAMA, " Hello ", [("content", " Hello ")]),
    (LLAMA, "  ", [("content", "  ")]),
    # Mistral 7B v0.3 and Nemo; Small 3.2 and Magistral
    (MISTRAL, f"[TOOL_CALLS] {LISTED}", F + G),
    (MISTRAL, f"Yes.[TOOL_CALLS]{LISTED}", [("content", "Yes."), *F, *G]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', F + G),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]Xy3456789[ARGS]{"a": 1}', F),
    (MISTRAL, "[TOOL_CALLS]}{", [("content", "[TOOL_CALLS]}{")]),
    (MISTRAL, "[TOOL_CALLS] [1]", [("content", "[TOOL_CALLS][1]")]),
    # DeepSeek V3 and V3.1
    (DEEPSEEK, f"{BEGIN}{BLOCK}\n{CALL}function{SEP}g\n```json\n{{}}\n```{END}{ALL_END}", F + G),
    (
        DEEPSEEK,
        f'Now.{BEGIN}{CALL}f{SEP}{{"a": 1}}{END}{CALL}g{SEP}{{}}{END}{ALL_END}',
        [("content", "Now."), *F, *G],
    ),
    (DEEPSEEK, f"{CALL}function{SEP}oops", [("content", f"{CALL}function{SEP}oops")]),
    # Qwen3 and DeepSeek R1
    (
        replace(HERMES, opens=False),
        "<think>\nwhy\n\nso\n</think>\n\nok <tool_call>"
        '{"name": "f", "arguments": {"a": 1}}</tool_call>',
        [("reasoning_content", "why\n\nso"), *OK, *F],
    ),
    (OPEN, "\nwhy</think>\nok", [("reasoning_content", "why"), *OK]),
    (OPEN, "<think>why</thi", [("reasoning_content", "why</thi")]),
    (THINKS, " ok <think>", [("content", " ok <think>")]),
    (THINKS, "<thi", [("content", "<thi")]),
]


LONG = "f" * 300
FAR = [
    pytest.param(DEEPSEEK, f'{CALL}f{SEP}{{"a": 1}} {LONG}', [*F, ("content", LONG)], id="end"),
    pytest.param(
        MISTRAL, f"[TOOL_CALLS]{LONG}{{}}", [("content", f"[TOOL_CALLS]{LONG}{{}}")], id="name"
    ),
    pytest.param(
        HERMES,
        f'a{" " * 300}<tool_call>{{"name": "g"}}',
        [("content", "a" + " " * 44), *G],
        id="space",
    ),
]


@pytest.mark.parametrize(("form", "text", "parts"), [*TEXTS, *FAR])
def test_what_models_write(form: AnswerForm, text: str, parts: Parts) -> None:
    for width in (1, 2, 3, 7, len(text)):
        assert read(form, text, width) == parts


def test_what_is_certain_is_told_at_once() -> None:
    """Content up to what may begin a mark, names as a whole, and arguments piece by piece."""
    assert Reader(HERMES).push("sure <to") == [("content", "sure")]
    reader = Reader(HERMES)
    pieces = ("<tool_call>{", '"name": "f', '", "arguments": {"a', '": 1', "}}", "</tool_call>")
    found = [[tuple(part) for part in reader.push(piece)] for piece in pieces]
    assert found == [
        [],
        [],
        [("name", "f"), ("arguments", '{"a')],
        [("arguments", '": 1')],
        [("arguments", "}")],
        [],
    ]


@pytest.mark.parametrize("form", [HERMES, THINKS, MISTRAL])
@pytest.mark.parametrize("text", ["\n", "[TOOL_CALLS]f", "<tool_call> ", '<tool_call>{"a":"x'])
def test_no_text_takes_long(form: AnswerForm, text: str) -> None:
    reader, began = Reader(form), time.thread_time()
    reader.push(text)
    for _ in range(50_000):
        reader.push(text[-1] * 4)
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("template", ['<|eot_id|> "parameters"', "<tool_call>", ""])
@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": CITY}}]
)
def test_json_that_the_body_asks_for_is_no_call(template: str, form: dict[str, Any]) -> None:
    """The template still gets the tools, and need not show how calls are written. Under a regular
    expression, the answer may have calls."""
    formats = ChatFormats(text_of(TOLD + template))
    fitted = chat(formats, tools=BOTH, **form)
    assert (fitted.form, fitted.requests[0].shown_tokens) == (PLAIN, ())
    assert len(fitted.requests[0].tools) == 2
    written = '{"name": "weather", "parameters": {"city": "Rome"}}'
    if template:
        assert chat(formats, tools=BOTH, structured_outputs={"regex": ".*"}).form != PLAIN
        [choice] = answered(written, FinishReason.STOP, template, **form)["choices"]
        assert choice["message"]["content"] == written
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


def text_of(template: str, *special: str) -> TokenizerText:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return TokenizerText(tokenizer, "toy")


TOLD = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
"""A template that knows tools."""


@pytest.mark.parametrize(
    ("mark", "calls"),
    [
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        (CALL, "deepseek"),
        ('<|eot_id|> "parameters"', "llama3"),
        ("<tool_call><function=", None),
        ("", None),
    ],
)
def test_the_template_says_how_calls_are_written(mark: str, calls: str | None) -> None:
    """Special tokens that are marks are kept in the text only for the parser that needs them."""
    formats = ChatFormats(text_of(TOLD + mark))
    if calls is None:
        with pytest.raises(BadRequest, match="--tool-call-parser"):
            chat(formats, tools=BOTH)
        fitted = chat(ChatFormats(text_of(TOLD + mark), "none"), tools=BOTH)
    else:
        fitted = chat(formats, tools=BOTH)
        assert fitted.requests[0].shown_tokens == AnswerForm(calls).shown_tokens
        assert (SEP in fitted.requests[0].shown_tokens) == (calls == "deepseek")
    assert fitted.form == AnswerForm(calls or "none", ["clock", "weather"])
    assert AnswerForm(**json.loads(fitted.requests[0].answer_form)) == fitted.form
    held = chat(formats, tools=BOTH, tool_choice="required")
    assert held.form.calls == LIST
    assert held.requests[0].shown_tokens == ()
    assert chat(formats).form == PLAIN
    with pytest.raises(KeyError):
        Reader(AnswerForm("unknown"))


def test_ids_of_calls_fit_every_chat_template() -> None:
    assert call_id_of("s", 0) == call_id_of("s", 0) != call_id_of("s", 1)
    assert re.fullmatch("[0-9a-z]{9}", call_id_of("s", 0))


@pytest.mark.parametrize(
    ("template", "parser", "variables", "parts"),
    [
        ("<think></think>", "auto", {}, [("content", "ab</think>c")]),
        ("</think><think>", "auto", {}, [("reasoning_content", "ab"), ("content", "c")]),
        (
            "</think>{% if thinks %}<think>{% endif %}",
            "auto",
            {"thinks": True},
            [("reasoning_content", "ab"), ("content", "c")],
        ),
        ("</think>", "deepseek_r1", {}, [("reasoning_content", "ab"), ("content", "c")]),
        ("</think>", "qwen3", {}, [("content", "ab</think>c")]),
    ],
)
def test_reasoning_begins_where_the_template_has_begun_it(
    template: str, parser: str, variables: dict[str, Any], parts: Parts
) -> None:
    formats = ChatFormats(text_of(template), reasoning_parser=parser)
    assert read(chat(formats, chat_template_kwargs=variables).form, "ab</think>c", 2) == parts
    assert chat(formats).requests[0].shown_tokens == ("<think>", "</think>")
    assert chat(formats, response_format={"type": "json_object"}).form == PLAIN
    assert chat(ChatFormats(text_of(template), reasoning_parser="none")).form == PLAIN


SOLO = [{**USER, "content": "Hi"}]
ONE_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_the_template_that_ships(tmp_path: Path) -> None:
    text = text_of(read_chat_template(TEMPLATE))
    assert text.render(SOLO) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    turns = [
        {"role": "system", "content": "Be brief."},
        *SOLO,
        {"role": "assistant", "content": "So.", "tool_calls": [ONE_CALL, ONE_CALL]},
        *({"role": "tool", "content": one, "tool_call_id": "1"} for one in "xy"),
    ]
    rendered = text.render(turns, [tool("f", parameters=CITY)])
    system, _, assistant, result, last = rendered.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.dumps(tool("f", parameters=CITY)) in system.split("\n")
    assert assistant == f"assistant\nSo.\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
    assert read(HERMES, assistant, 5) == [
        ("content", "assistant\nSo."),
        *F,
        *F,
        ("content", "<|im_end|>\n"),
    ]
    responses = [f"\n<tool_response>\n{one}\n</tool_response>" for one in "xy"]
    assert result == f"tool{''.join(responses)}<|im_end|>\n"
    assert last == "assistant\n"
    (tmp_path / "wrong").write_text("{% if %}")
    (tmp_path / "good").write_text("{% generation %}{% endgeneration %}{% break %}")
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / "large").write_text("\u00e9" * (FILE_BYTES_MAX // 2) + "x", encoding="utf-8")
    for name, reason in (
        ("wrong", "line 1"),
        ("none", "cannot read"),
        ("", "cannot read"),
        ("latin", "is not UTF-8"),
        ("large", "larger than 1048576 bytes"),
    ):
        with pytest.raises(SettingError, match=f"^chat_template: .*{reason}"):
            read_chat_template(str(tmp_path / name))


def test_a_template_without_tools_is_named() -> None:
    """Variables cannot change how the template is rendered."""
    text = text_of("{{ messages[0].content }}{{ mood }}")
    assert text.render(SOLO, (), {"mood": "gay"}) == "Higay"
    called = [*SOLO, {"role": "assistant", "content": "", "tool_calls": [ONE_CALL]}]
    for turns, tools, variables, field in (
        (SOLO, [CLOCK], {}, "tools"),
        (called, [], {}, "chat"),
        (SOLO, [], {"tokenize": False}, "chat_template_kwargs.tokenize"),
        (SOLO, [], {"chat_template": "x"}, "chat_template_kwargs.chat_template"),
    ):
        with pytest.raises(BadRequest) as caught:
            text.encode_chat(turns, tools, variables)
        assert caught.value.field == field
        assert ("--chat-template" in caught.value.message) is (not variables)


def test_special_marks_are_in_the_text_where_they_are_asked_for() -> None:
    text = text_of(TOLD, "[TOOL_CALLS]")
    ids = text.encode("a[TOOL_CALLS] é")
    for shown, found in (((), "a é"), (("[TOOL_CALLS]",), "a[TOOL_CALLS] é")):
        stream = text.stream(shown)
        assert "".join([*map(stream.push, ids), stream.finish()]) == found


def answered(text: str, reason: FinishReason, template: str = "<tool_call>", **fields: Any) -> Any:
    """The whole answer, or its chunks, of a text in three pieces."""
    asked = chat(ChatFormats(text_of(TOLD + template)), tools=BOTH, **fields)
    answer = ChatAnswer(asked, None, 4, 99)
    third = -(-len(text) // 3)
    pieces = [text[index * third : (index + 1) * third] for index in range(3)]
    told = [tokens(index, [7], piece) for index, piece in enumerate(pieces)]
    events = [started(), *told, finished(reason)]
    chunks = [chunk for event in events for chunk in answer.take(0, event)]
    return chunks if fields.get("stream") else answer.whole()


WRITTEN = 'So.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' * 2
HELD = '[{"name": "weather", "arguments": {"city": "Rome"}}]'


@pytest.mark.parametrize(
    ("text", "choice", "reason", "content", "num_calls", "told"),
    [
        (WRITTEN, "auto", FinishReason.STOP, "So.So.", 2, "tool_calls"),
        ("Rainy.", "auto", FinishReason.STOP, "Rainy.", 0, "stop"),
        (HELD, "required", FinishReason.STOP, None, 1, "tool_calls"),
        ('{"city": "Rome"}', NAMED, FinishReason.STOP, None, 1, "stop"),
        (HELD[:-3], "required", FinishReason.LENGTH, None, 1, "length"),
    ],
)
def test_answers_with_calls(
    text: str, choice: Any, reason: FinishReason, content: str | None, num_calls: int, told: str
) -> None:
    """A stream has the same calls. It sends id, type and name of a call once, first."""
    whole = answered(text, reason, tool_choice=choice)["choices"][0]
    message = whole["message"]
    assert (message["content"], whole["finish_reason"]) == (content, told)
    calls = message.get("tool_calls", [])
    assert len(calls) == num_calls
    for call in calls:
        assert call["function"]["name"] == "weather"
        assert call["function"]["arguments"] in ('{"city": "Rome"}', '{"city": "Rome"')
    chunks = answered(text, reason, tool_choice=choice, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == (content or "")
    found: list[Any] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if part["index"] == len(found):
            found.append({key: part[key] for key in ("id", "type", "function")})
        else:
            assert part.keys() == {"index", "function"}
            found[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert found == calls
    assert chunks[-1]["choices"][0]["finish_reason"] == told
