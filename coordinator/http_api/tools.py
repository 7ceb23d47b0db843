"""The tools of a request, and the constraint on an answer that must call a tool. A reader splits
an answer's text into content, reasoning and tool calls while the text is generated.

A *mark* is a text such as `<tool_call>` that begins or ends a call or the reasoning. The reader
gets the text in pieces. If a piece ends with what may be the beginning of a mark, the reader holds
this end back until more text arrives. The reader drops marks and the white space around them. Text
that only looks like a call is content, and so is the mark before it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from pydantic_core import from_json

from coordinator.decoding.detokenizer import overlap
from outrider import limits
from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint, ConstraintKind, is_longer

if TYPE_CHECKING:
    from outrider.models.tokenizer import TokenizerText

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that parses some text and returns a T. At each `yield` it waits for more text."""
Kind = Literal["content", "reasoning_content", "name", "arguments"]

AUTO, REQUIRED, NONE = "auto", "required", "none"
_SPACE_MAX = 256
"""Before a mark, at most this many characters of white space are dropped."""
_HEAD_CHARS_MAX = 256
"""A call has at most this many characters before its arguments."""
_SOME_TURN = {"role": "user", "content": "x"}
_THINK = ("<think>", "</think>")
_JSON = (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT)
_OTHER_CALLS = ("<function=", "<arg_key>")
"""Chat templates that contain one of these texts do not write JSON within `<tool_call>`."""
_HEAD_OF_OBJECT = re.compile(
    r'\s*\{\s*(?:"\w+"\s*:\s*"[^"}]*"\s*,\s*)*?"name"\s*:\s*"(?P<name>[^"\\}]*)"'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Matches the usual beginning of a call that is a JSON object, up to its arguments. Llama writes
`parameters` instead of `arguments`. A match contains no closing brace, so `_call` waits for a match
only until the first closing brace."""
_JSON_MARK = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
"""Matches the characters by which `_value` finds the end of a JSON object. A backslash and the next
character are one match."""


class CallFormat(NamedTuple):
    """How a family of models writes calls."""

    marks: tuple[str, ...] = ()
    """The first mark begins one or several calls. The others are only dropped. () = no calls."""
    named_head: re.Pattern[str] | None = None
    """Matches the text before the arguments, if calls are written as a name and a JSON object.
    None = every call is a JSON object with a `name`."""
    begins_with_calls: bool = False
    """Whether a call at the beginning of the text needs no mark. If so, a JSON object whose `name`
    is not the name of a tool is content."""
    separators: tuple[str, ...] = ()
    """Texts between the parts of a call. Outside of calls, these texts are content."""


CALL_FORMATS = {
    # <tool_call>{"name": .., "arguments": {..}}</tool_call>, any number of times
    "hermes": CallFormat(("<tool_call>", "</tool_call>")),
    # {"name": .., "parameters": {..}}; {..}
    "llama3": CallFormat(("<|python_tag|>",), begins_with_calls=True),
    # [TOOL_CALLS] and a list of calls. Newer models: [TOOL_CALLS]name[ARGS]{..} for each call
    "mistral": CallFormat(
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        re.compile(r"\s*(?P<name>[^\s{}\[]+)\s*(?:(?:\[CALL_ID\][^{}\[]*)?\[ARGS\])?\s*(?=\{)"),
    ),
    # V3: `function`, the name, and the arguments in a code block. V3.1: the name and the arguments
    "deepseek": CallFormat(
        (
            "<｜tool▁call▁begin｜>",
            "```<｜tool▁call▁end｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        re.compile(
            r"(?:\s*function<｜tool▁sep｜>)?\s*(?P<name>[^{}<`]+?)\s*"
            r"(?:<｜tool▁sep｜>|```json)\s*(?=\{)"
        ),
        separators=("<｜tool▁sep｜>",),
    ),
    "none": CallFormat(),
}
"""Formats by their names in `--tool-call-parser`."""
LIST = "list"
"""A value of `AnswerForm.calls`: the answer is a JSON list of calls. Any other text is dropped."""
ARGUMENTS = "arguments"
"""A value of `AnswerForm.calls`: the answer is the arguments of a named tool. As in OpenAI's API,
the finish reason of these answers is not `tool_calls`."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How an answer's text is parsed. The session stores this form as JSON."""

    calls: str = ""
    """`LIST`, `ARGUMENTS` or a key of `CALL_FORMATS`. Empty = no calls."""
    names: Sequence[str] = ()
    """The tools that may be called."""
    several: bool = True
    """Whether several calls are allowed. If not, all text from the second call on is dropped."""
    opens: bool | None = None
    """Whether the text begins within reasoning, without `<think>`. None = there is no reasoning."""

    @property
    def format(self) -> CallFormat:
        is_plain = self.calls in ("", LIST, ARGUMENTS)
        return CALL_FORMATS["none" if is_plain else self.calls]

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Texts that must be in the answer's text even if they are special tokens."""
        reasoning = () if self.opens is None else _THINK
        return self.format.marks + self.format.separators + reasoning

    def to_json(self) -> str:
        """Returns an empty text for `PLAIN`."""
        return "" if self == PLAIN else json.dumps(asdict(self))


PLAIN = AnswerForm()
"""All text is content."""


class Part(NamedTuple):
    """A piece of an answer. A call becomes a part with its name, then parts with its arguments."""

    kind: Kind
    text: str


class Reader:
    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._marks, self._named_head, self._begins_with_calls, _ = form.format
        self._num_calls = 0
        self._is_extra = False
        """Whether text is dropped, because a second call has begun and only one is allowed."""
        self._text = ""
        """Text that is not parsed yet."""
        self._parts: list[Part] = []
        """Parts that `push` has not returned yet."""
        self._follows_mark = False
        """Whether only white space was parsed since the last mark."""
        self._is_over = False
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        """Adds text. Returns the new parts, except those that further text could still change."""
        self._text += text
        return self._go_on()

    def finish(self) -> list[Part]:
        """Ends the text. Returns the parts that were held back."""
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Reading[None]:
        form = self._form
        if form.opens is not None:
            yield from self._reasoning(form.opens)
        if form.calls == LIST:
            yield from self._calls()
            return
        if form.calls == ARGUMENTS:
            self._begin_call(form.names[0])
        if not self._marks:
            yield from self._all("arguments" if form.calls == ARGUMENTS else "content")
        if self._begins_with_calls and (yield from self._peek()) == "{":
            yield from self._calls()
        while mark := (yield from self._until("content", *self._marks)):
            if mark == self._marks[0]:
                yield from self._calls(mark)

    def _reasoning(self, is_open: bool) -> Reading[None]:
        """Parses the reasoning at the beginning of the text, from `<think>` to `</think>`."""
        begin, end = _THINK
        while begin.startswith(text := self._text.lstrip()) and text != begin:
            if self._is_over:
                break
            yield
        if text.startswith(begin) or is_open:
            self._text = text.removeprefix(begin)
            self._follows_mark = True
            yield from self._until("reasoning_content", end)
            yield from self._peek()
            self._text = self._text.lstrip()

    def _add(self, kind: Kind, text: str) -> None:
        if not text or self._is_extra or (kind == "content" and self._form.calls == LIST):
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind == kind != "name":
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))

    def _until(self, kind: Kind, *marks: str) -> Reading[str]:
        """Adds the text before the next mark as parts of this `kind`. Returns the mark, or "" at
        the end."""
        while True:
            if self._follows_mark:
                self._text = self._text.lstrip()
            if (match := _any_of(marks).search(self._text)) is not None:
                self._add(kind, _without_space(self._text[: match.start()]))
                self._text = self._text[match.end() :]
                self._follows_mark = True
                return match[0]
            certain = self._text
            if not self._is_over:
                held = max(overlap(certain, mark) for mark in marks)
                certain = _without_space(certain[: len(certain) - held])
            self._follows_mark = self._follows_mark and not certain
            self._add(kind, certain)
            self._text = self._text[len(certain) :]
            if self._is_over:
                return ""
            yield

    def _all(self, kind: Kind) -> Reading[None]:
        while True:
            self._add(kind, self._text)
            self._text = ""
            yield

    def _peek(self) -> Reading[str]:
        """Returns the next character that is not white space, or "" at the end."""
        num_seen = 0
        while not (text := self._text[num_seen:].lstrip()) and not self._is_over:
            num_seen = len(self._text)
            yield
        return text[:1]

    def _take(self, chars: str) -> Reading[str]:
        """If the next character that is not white space is in `chars`, removes and returns it."""
        char = yield from self._peek()
        if char and char in chars:
            self._text = self._text.lstrip()[1:]
            return char
        return ""

    def _calls(self, mark: str = "") -> Reading[None]:
        """Parses a call, several calls with commas or semicolons between them, or a list of calls,
        up to the first text that is not a call. If there is no call, `mark` becomes content."""
        before = mark + (opening := (yield from self._take("[")))
        while (yield from self._call(before)):
            before = ""
            yield from self._take(",;")
            if (yield from self._peek()) != "{":
                break
        if opening and not before:
            yield from self._take("]")

    def _call(self, before: str) -> Reading[bool]:
        """Parses a call, and returns True. If no call follows, adds `before` and the next JSON
        object, if any, as content, and returns False."""
        self._is_extra = self._num_calls > 0 and not self._form.several
        is_object = (yield from self._peek()) == "{"
        head, match, whole = _HEAD_OF_OBJECT if is_object else self._named_head, None, ""
        while head is not None:
            if "{" in self._text:
                match = head.match(self._text, 0, _HEAD_CHARS_MAX)
            is_late = len(self._text) >= _HEAD_CHARS_MAX or "}" in self._text
            if match is not None or is_late or self._is_over:
                break
            yield
        if match is not None and self._is_known(match["name"]):
            self._text = self._text[match.end() :]
            self._begin_call(match["name"])
            yield from self._value(is_added=True)
            if is_object:  # Drop the rest of the object around the arguments.
                yield from self._value(depth=1)
            return True
        if is_object:
            whole = yield from self._value()
            call = _loaded(whole)
            if isinstance(call, dict) and self._is_known(call.get("name")):
                self._begin_call(call["name"])
                self._add("arguments", _arguments(call))
                return True
        self._add("content", before + whole)
        self._follows_mark = False
        return False

    def _is_known(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._form.names or not self._begins_with_calls)

    def _begin_call(self, name: str) -> None:
        self._num_calls += 1
        self._follows_mark = True
        self._add("name", name)

    def _value(self, depth: int = 0, *, is_added: bool = False) -> Reading[str]:
        """Parses a JSON object to its end, or to the end of the text, and returns its text. `depth`
        is the number of brackets that are already open. With `is_added`, adds the text as
        arguments, piece by piece. Looks only for brackets and strings, because the JSON may be
        invalid."""
        taken, is_in_string, is_whole = list[str](), False, False
        while True:
            end = len(self._text)
            for match in _JSON_MARK.finditer(self._text):
                mark = match[0]
                if mark == "\\" and not self._is_over:
                    end = match.start()  # The next character is not there yet.
                elif mark == '"':
                    is_in_string = not is_in_string
                elif mark in "{}[]" and not is_in_string:
                    depth += 1 if mark in "{[" else -1
                    if is_whole := depth == 0:
                        end = match.end()
                        break
            piece, self._text = self._text[:end], self._text[end:]
            taken.append(piece)
            if is_added:
                self._add("arguments", piece)
            if is_whole or self._is_over:
                return "".join(taken)
            yield


@lru_cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _without_space(text: str) -> str:
    """Removes at most `_SPACE_MAX` characters of white space from the end."""
    return text[: max(len(text.rstrip()), len(text) - _SPACE_MAX)]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments(call: dict[str, Any]) -> str:
    """Returns the arguments of a call, as JSON text. Some models write this JSON as a string. If
    there are no arguments, some models write null or leave the field out."""
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Tools:
    functions: Sequence[Mapping[str, Any]] = ()
    """Each function has a `name`, `parameters` (a JSON schema), and perhaps a `description`."""
    named: str = ""
    """The tool that the answer must call. Empty = no tool is named."""
    is_required: bool = False
    """Whether the answer must consist of calls. True if a tool is `named`."""
    several: bool = True

    def for_template(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"type": "function", "function": dict(function)} for function in self.functions
        )

    def constraint(self) -> Constraint | None:
        """Returns the constraint on an answer that must consist of calls: the arguments of the
        `named` tool, or a list of objects with `name` and `arguments`. Returns None if the answer
        may be text. Raises `BadRequest`."""
        if not self.is_required:
            return None
        if self.named:
            [schema] = [
                function["parameters"]
                for function in self.functions
                if function["name"] == self.named
            ]
            return Constraint.of_schema(schema, "tools")
        call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        calls, schemas = list[Any](), dict[str, Any]()
        for function in self.functions:
            name, place = function["name"], f"#/$defs/{function['name']}"
            schemas[name] = _moved(function["parameters"], place)
            own = {"name": {"const": name}, "arguments": {"$ref": place}}
            calls.append({**call, "properties": own})
        schema = {
            "type": "array",
            "minItems": 1,
            "maxItems": limits.CALLS_MAX if self.several else 1,
            "items": {"anyOf": calls},
            "$defs": schemas,
        }
        return Constraint.of_schema(schema, "tools")


NO_TOOLS = Tools()


def tools_of(
    functions: Sequence[Mapping[str, Any]], choice: str, named: str, *, several: bool
) -> Tools:
    """Makes the tools of a request. `choice` is `AUTO`, `REQUIRED` or `NONE`, and is `REQUIRED` if
    a function is `named`. Raises `BadRequest`."""
    if not functions and choice == REQUIRED:
        raise BadRequest("tool_choice", "asks for a call, but there are no tools")
    names = Counter(function["name"] for function in functions)
    if len(names) < len(functions):
        raise BadRequest("tools", f"{names.most_common(1)[0][0]!r} is the name of several tools")
    if named and named not in names:
        raise BadRequest("tool_choice", f"{named[:64]!r} is not the name of a tool")
    if is_longer(functions, most := limits.TOOLS_BYTES_MAX):
        raise BadRequest("tools", f"have more than {most} bytes")
    size = len(json.dumps(functions, ensure_ascii=False).encode(errors="surrogatepass"))
    if size > most:
        raise BadRequest("tools", f"have {size} bytes; at most {most} are allowed")
    if choice == NONE:
        functions = []
    whole = [
        {**function, "parameters": _of_object(function.get("parameters"))} for function in functions
    ]
    return Tools(whole, named, choice == REQUIRED, several)


def call_id_of(session_id: str, index: int) -> str:
    """Makes a call's id: nine letters and digits, as Mistral's chat templates require."""
    return hashlib.sha256(f"{session_id}/{index}".encode()).hexdigest()[:9]


def parsed_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call. Raises `ValueError` if they are not a JSON object."""
    try:
        arguments = from_json(text) if text else {}
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError("must be a JSON object")
    return arguments


def call_for_template(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call in the form that chat templates read."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _of_object(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Completes the schema of a function's arguments, so that it allows only JSON objects."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    is_open = schema.keys().isdisjoint({"type", "$ref", "anyOf", "oneOf", "allOf"})
    return {"type": "object", **schema} if is_open else schema


def _moved(schema: Any, place: str) -> Any:
    """Returns the schema for use at `place` in a larger schema. Adapts each local `$ref`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
        if key not in ("$schema", "$id") or not isinstance(value, str)
    }


class ChatFormats:
    """Knows how the served model writes calls and reasoning."""

    def __init__(
        self, text: TokenizerText | None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """If a setting is `auto`, the chat template decides."""
        self._template = template = "" if text is None else text.chat_template
        self._text = text
        self._calls = tool_call_parser if tool_call_parser != AUTO else _calls_in(template)
        """A key of `CALL_FORMATS`. Empty = unknown."""
        self._has_reasoning = reasoning_parser != "none" and (
            reasoning_parser != AUTO or "</think>" in template
        )
        self._always_reasons = reasoning_parser == "deepseek_r1"

    def form(
        self, tools: Tools, constraint: Constraint | None, variables: Mapping[str, Any]
    ) -> AnswerForm:
        """Returns the form of answers that may call these tools. `variables` are for the chat
        template. Constrained answers have no reasoning. If the request asks for JSON, the JSON is
        content even if it looks like a call. Raises `BadRequest` if the answer may have calls but
        it is unknown how the model writes them."""
        form = PLAIN
        if tools.functions and self._text is not None:
            self._text.check_tools("tools")
        is_json = constraint is not None and constraint.kind in _JSON
        if tools.functions and (tools.is_required or not is_json):
            calls, names = self._calls, sorted(function["name"] for function in tools.functions)
            if tools.named:
                calls, names = ARGUMENTS, [tools.named]
            elif tools.is_required:
                calls = LIST
            elif not calls and self._template:
                raise BadRequest(
                    "tool_choice",
                    f"got auto, but the chat template does not show how the model writes calls; "
                    f"start the server with --tool-call-parser (one of {', '.join(CALL_FORMATS)}), "
                    "or send tool_choice required",
                )
            form = AnswerForm(calls, names, tools.several)
        if self._has_reasoning and constraint is None:
            form = replace(form, opens=self._always_reasons or self._opens_with(variables))
        return form

    def _opens_with(self, variables: Mapping[str, Any]) -> bool:
        """Whether the chat template with these variables ends prompts with `<think>`."""
        if self._text is None:
            return False
        try:
            rendered = self._text.render([_SOME_TURN], (), variables)
        except BadRequest:
            return False
        return rendered.rstrip().endswith("<think>")


def _calls_in(template: str) -> str:
    """Returns the name of the call format that a chat template uses. "" = unknown."""
    for name in ("deepseek", "mistral"):
        if CALL_FORMATS[name].marks[0] in template:
            return name
    if "<tool_call>" in template and not any(mark in template for mark in _OTHER_CALLS):
        return "hermes"
    if "<|eot_id|>" in template and '"parameters"' in template:
        return "llama3"
    return ""
