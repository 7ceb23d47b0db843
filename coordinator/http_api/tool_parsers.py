"""Splits an answer's text, while it is generated, into content, reasoning and tool calls.

| class | parses |
| --- | --- |
| `Reader` | text without calls |
| `Hermes`, `Llama3`, `Mistral`, `DeepSeek` | text with calls as this family of models writes them |
| `HeldCalls`, `HeldArguments` | answers that a grammar constrains to calls |
| `Reasoning` | `<think>...</think>`, and then what another parser takes |

A *mark* is a text that begins or ends something, such as `<tool_call>`. A parser gets the text in
pieces. It returns nothing of a text that may turn out to begin a mark until the next piece decides.
It drops marks and the white space around them. Text that only looks like a call is content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from coordinator.decoding.detokenizer import overlap
from coordinator.http_api.tools import AUTO
from outrider.errors import BadRequest
from outrider.grammar.constraint import ConstraintKind

if TYPE_CHECKING:
    from coordinator.http_api.bodies import TranslatedBody
    from outrider.tokenizer import TokenizerText

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of a parser. It waits for more text at each `yield`, and returns a T."""
Kind = Literal["content", "reasoning", "name", "arguments"]

_OPENINGS_KEPT = 64
"""Most results of `ChatFormats._opens_with` that are kept, each for other variables."""
_SPACE_MAX = 256
"""Most characters of white space that are dropped before a mark."""
_HEAD_CHARS_MAX = 256
"""Most characters of a call before its arguments."""
_SOME_TURN = {"role": "user", "content": "x"}
_JSON = (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT)
_OTHER_CALLS = ("<function=", "<arg_key>")
"""Templates with one of these write something other than JSON within `<tool_call>`."""
_NAME_OF_OBJECT = re.compile(
    r'\s*\{\s*(?:"\w+"\s*:\s*"[^"}]*"\s*,\s*)*?"name"\s*:\s*"(?P<name>[^"\\}]*)"'
)
_HEAD_OF_OBJECT = re.compile(
    _NAME_OF_OBJECT.pattern + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The usual beginning of a call that is a JSON object, up to its arguments. Llama writes
`parameters` for `arguments`. The pattern allows no closing brace before the arguments. So `_call`
can stop waiting for a match at the first closing brace, wherever the text was cut into pieces."""
_JSON_MARK = re.compile(r'[\\"{}\[\]]')


class Part(NamedTuple):
    """A piece of an answer. A call has a part with its name, and then parts with its arguments."""

    kind: Kind
    text: str


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Merges adjacent parts of the same kind. Names stay apart, as each begins a call."""
    for kind, run in groupby(parts, key=attrgetter("kind")):
        texts = [part.text for part in run]
        yield from (Part(kind, text) for text in (texts if kind == "name" else ["".join(texts)]))


class Reader:
    """Parses text whose calls begin with a mark. This base class has no marks, so all text is
    content."""

    shown_tokens: ClassVar[tuple[str, ...]] = ()
    """Texts that the parser needs. The parsed text must contain them even if they are special
    tokens, which answers otherwise leave out."""
    marks: ClassVar[tuple[str, ...]] = ()
    """One call or several follow the first mark. The other marks are only dropped."""
    named_head: ClassVar[re.Pattern[str] | None] = None
    """The beginning of a call that is a name and a JSON object, up to that object. None = calls are
    always JSON objects with a `name`."""
    shows_mark = False
    """Whether the first mark is content if no call follows it."""
    begins_with_calls = False
    """Whether an object at the beginning of the text is a call without a mark."""
    knows_names = False
    """Whether an object with a name that no tool has is content."""
    has_content = True
    """Whether text outside of calls is content. If not, it is dropped."""

    def __init__(self, names: Collection[str] = (), *, several: bool = True) -> None:
        """`names` are the names of the tools. Without `several`, the second call and all text after
        it are dropped."""
        self._names = names
        self._several = several
        self._num_calls = 0
        self._is_extra = False
        """Whether the text is dropped: the second call has come, and `several` is false."""
        self._text = ""
        """Text that is not parsed yet."""
        self._parts: list[Part] = []
        """Parts that are not returned yet."""
        self._follows_mark = False
        """Whether only white space was parsed since the last mark."""
        self._is_over = False
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        """The parts that this text completes."""
        self._text += text
        return self._go_on()

    def finish(self) -> list[Part]:
        """The parts that were held back; the text has ended."""
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        found, self._parts = self._parts, []
        return found

    def _read(self) -> Reading[None]:
        """Parses the whole text."""
        if not self.marks:
            yield from self._all("content")
        if self.begins_with_calls and (yield from self._peek()) == "{":
            yield from self._calls()
        while mark := (yield from self._until("content", *self.marks)):
            if mark == self.marks[0]:
                yield from self._calls(mark if self.shows_mark else "")

    def _add(self, kind: Kind, text: str) -> None:
        if text and not self._is_extra and (kind != "content" or self.has_content):
            self._parts.append(Part(kind, text))

    def _until(self, kind: Kind, *marks: str) -> Reading[str]:
        """Adds the text before the next mark, and returns the mark; empty = the text has ended."""
        while True:
            if self._follows_mark:
                self._text = self._text.lstrip()
            if (found := _any_of(marks).search(self._text)) is not None:
                self._add(kind, _without_space(self._text[: found.start()]))
                self._text = self._text[found.end() :]
                self._follows_mark = True
                return found[0]
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
        """Adds all text that comes."""
        while True:
            self._add(kind, self._text)
            self._text = ""
            yield

    def _peek(self) -> Reading[str]:
        """The next character that is not white space, or nothing at the end. Takes nothing."""
        num_seen = 0
        while not (text := self._text[num_seen:].lstrip()) and not self._is_over:
            num_seen = len(self._text)
            yield
        return text[:1]

    def _take(self, char: str) -> Reading[str]:
        """If the next character besides white space is one of those in `char`, takes it with the
        white space, and returns it. Else returns nothing."""
        found = yield from self._peek()
        if found and found in char:
            self._text = self._text.lstrip()[1:]
            return found
        return ""

    def _calls(self, mark: str = "") -> Reading[None]:
        """Parses one call, several with commas or semicolons between them, or a list of calls. Ends
        at the first text that is no call. If there is no call at all, `mark` is content."""
        before = mark + (opening := (yield from self._take("[")))
        while (yield from self._call(before)):
            before = ""
            yield from self._take(",;")
            if (yield from self._peek()) != "{":
                break
        if opening and not before:
            yield from self._take("]")

    def _call(self, before: str) -> Reading[bool]:
        """Parses a call, and returns True. If there is none, returns False; then the text `before`
        it is content, and so is an object that is no call."""
        self._is_extra = self._num_calls > 0 and not self._several
        is_object = (yield from self._peek()) == "{"
        head, found, whole = _HEAD_OF_OBJECT if is_object else self.named_head, None, ""
        while head is not None:
            if "{" in self._text:
                found = head.match(self._text, 0, _HEAD_CHARS_MAX)
            is_late = len(self._text) >= _HEAD_CHARS_MAX or "}" in self._text
            if found is not None or is_late or self._is_over:
                break
            yield
        if found is not None and self._is_known(found["name"]):
            self._text = self._text[found.end() :]
            self._begin_call(found["name"])
            yield from self._value(is_added=True)
            if is_object:  # Drop the rest of the object around the arguments.
                yield from self._value(depth=1)
            return True
        if is_object:
            whole = yield from self._value()
            call = _loaded(whole)
            if call is None and (cut := _NAME_OF_OBJECT.match(whole)) and self._is_over:
                call = {"name": cut["name"], "arguments": ""}
            if isinstance(call, dict) and self._is_known(call.get("name")):
                self._begin_call(call["name"])
                self._add("arguments", _arguments(call))
                return True
        self._add("content", before + whole)
        self._follows_mark = False
        return False

    def _is_known(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._names or not self.knows_names)

    def _begin_call(self, name: str) -> None:
        self._num_calls += 1
        self._follows_mark = True
        self._add("name", name)

    def _value(self, depth: int = 0, *, is_added: bool = False) -> Reading[str]:
        """Takes and returns a JSON object, or all text that is left if its end does not come.
        `depth` is the number of its brackets that are open already. With `is_added`, adds the
        object as arguments, piece by piece. Only brackets and strings are parsed: the JSON may be
        invalid."""
        taken, is_in_string, escaped = list[str](), False, -1
        while True:
            end = None
            for found in _JSON_MARK.finditer(self._text):
                char = found[0]
                if found.start() == escaped:
                    continue
                if char == "\\":
                    escaped = found.end()
                elif char == '"':
                    is_in_string = not is_in_string
                elif not is_in_string:
                    depth += 1 if char in "{[" else -1
                    if depth == 0:
                        end = found.end()
                        break
            piece, rest = self._text[:end], "" if end is None else self._text[end:]
            escaped -= len(piece)  # A backslash at the end escapes the next piece's beginning.
            self._text = rest
            taken.append(piece)
            if is_added:
                self._add("arguments", piece)
            if end is not None or self._is_over:
                return "".join(taken)
            yield


@lru_cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _without_space(text: str) -> str:
    """The text without the white space at its end, which stands before a mark."""
    return text[: max(len(text.rstrip()), len(text) - _SPACE_MAX)]


def _loaded(text: str) -> Any:
    """The value of JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments(call: dict[str, Any]) -> str:
    """The arguments of a call, as JSON text. Some models write that text as a string. For a call
    without arguments, some write null, and some leave the arguments out."""
    found = call.get("arguments", call.get("parameters"))
    if isinstance(found, str):
        return found
    return json.dumps({} if found is None else found, ensure_ascii=False)


class HeldCalls(Reader):
    """Parses a list of calls and nothing else."""

    has_content = False

    def _read(self) -> Reading[None]:
        yield from self._calls()


class HeldArguments(Reader):
    """Parses the arguments of the only tool that may be called."""

    def _read(self) -> Reading[None]:
        [name] = self._names
        self._begin_call(name)
        yield from self._all("arguments")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the texts of an answer are parsed."""

    make_reader: Callable[[], Reader]
    ends_with_calls: bool = True
    """Whether an answer with calls has `tool_calls` as its `finish_reason`."""
    has_short_ids: bool = False
    """Whether ids of calls are nine letters and digits, as Mistral's chat templates require."""

    def call_id(self, session_id: str, index: int) -> str:
        """The id of a call in a session. It stays the same when the session is resumed."""
        name = f"{session_id}/{index}".encode()
        digest = hashlib.blake2b(name, digest_size=12).hexdigest()
        return digest[:9] if self.has_short_ids else f"call_{digest}"


class Hermes(Reader):
    """Any number of `<tool_call>{"name": .., "arguments": {..}}</tool_call>`. Qwen's models write
    calls in this way, too."""

    shown_tokens = marks = ("<tool_call>", "</tool_call>")
    shows_mark = True


class Llama3(Reader):
    """`{"name": .., "parameters": {..}}` at the beginning, or after `<|python_tag|>`, with
    semicolons between several calls. An object with a name that no tool has is content."""

    shown_tokens = marks = ("<|python_tag|>",)
    begins_with_calls = knows_names = True


class Mistral(Reader):
    """`[TOOL_CALLS]` and a list of calls. Newer models write `[TOOL_CALLS]name[ARGS]{..}` or
    `[TOOL_CALLS]name{..}` for each call."""

    shown_tokens = marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    named_head = re.compile(
        r"\s*(?P<name>[^\s{}\[]+)\s*(?:(?:\[CALL_ID\][^{}\[]*)?\[ARGS\])?\s*(?=\{)"
    )


class DeepSeek(Reader):
    """Calls between marks. In V3: `function`, the name, and the arguments in a code block of JSON.
    In V3.1: the name and the arguments."""

    shown_tokens = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )  # fmt: skip
    marks = (
        "<｜tool▁call▁begin｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    )  # fmt: skip
    named_head = re.compile(
        r"(?:\s*function<｜tool▁sep｜>)?\s*(?P<name>[^{}<`]+?)\s*(?:<｜tool▁sep｜>|```json)\s*(?=\{)"
    )


class Reasoning(Reader):
    """Parses reasoning, the text from `<think>` to `</think>` at the beginning. The parser `rest`
    gets the text after that."""

    shown_tokens = ("<think>", "</think>")

    def __init__(self, rest: Reader, *, is_open: bool) -> None:
        """With `is_open`, the text begins within the reasoning, without `<think>`."""
        super().__init__()
        self._rest = rest
        self._is_open = is_open

    def _read(self) -> Reading[None]:
        begin, end = self.shown_tokens
        while begin.startswith(text := self._text.lstrip()) and text != begin:
            if self._is_over:
                break
            yield
        if text.startswith(begin) or self._is_open:
            self._text = text.removeprefix(begin)
            self._follows_mark = True
            yield from self._until("reasoning", end)
            yield from self._peek()
            self._text = self._text.lstrip()
        while True:
            self._parts += self._rest.push(self._text)
            self._text = ""
            if self._is_over:
                self._parts += self._rest.finish()
            yield


CALL_READERS: dict[str, type[Reader]] = {
    "hermes": Hermes, "llama3": Llama3, "mistral": Mistral, "deepseek": DeepSeek, "none": Reader
}  # fmt: skip
"""Parsers by their names in `--tool-call-parser`."""


class ChatFormats:
    """How the served model writes calls and reasoning, and the parsers for that."""

    def __init__(
        self, text: TokenizerText | None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """The settings name the parsers; with `auto`, the model's chat template decides."""
        self._template = template = "" if text is None else text.chat_template
        self._text = text
        name = tool_call_parser if tool_call_parser != AUTO else _calls_in(template)
        self._calls = CALL_READERS.get(name)
        """The parser of calls; None = the chat template does not show how the model writes them."""
        self._has_short_ids = name == "mistral"
        self._has_reasoning = reasoning_parser != "none" and (
            reasoning_parser != AUTO or "</think>" in template
        )
        self._always_reasons = reasoning_parser == "deepseek_r1"
        self._opens = lru_cache(_OPENINGS_KEPT)(self._opens_with)

    def fitted(self, asked: TranslatedBody) -> TranslatedBody:
        """The body of a conversation, with the form of its answers. A constrained answer has no
        reasoning. JSON that the body asks for, as by `response_format`, is content even if it looks
        like a call. Raises `BadRequest` if the answer may have calls and it is unknown how the
        model writes them."""
        tools, request = asked.tools, asked.requests[0]
        read: dict[str, Any] = {}
        shown: tuple[str, ...] = ()
        if tools is not None and self._text is not None:
            self._text.check_tools("tools")
        is_json = request.constraint is not None and request.constraint.kind in _JSON
        if tools is not None and (tools.is_required or not is_json):
            names = sorted(one["name"] for one in tools.functions)
            read["tools"] = [names, tools.named, tools.is_required, tools.several]
            if self._calls is not None and not tools.is_required:
                shown = self._calls.shown_tokens
        if self._has_reasoning and request.constraint is None:
            variables = json.dumps({**request.template_variables})
            read["reasoning"] = self._always_reasons or self._opens(variables)
            shown += Reasoning.shown_tokens
        if not read:
            return asked
        form = json.dumps(read)
        requests = tuple(
            replace(one, shown_tokens=shown, answer_form=form) for one in asked.requests
        )
        return replace(asked, form=self.form(form), requests=requests)

    def form(self, answer_form: str) -> AnswerForm | None:
        """Reads a request's `answer_form`, which `fitted` has written. Raises `BadRequest` as
        `fitted`."""
        if not answer_form:
            return None
        read, form = json.loads(answer_form), AnswerForm(Reader)
        if "tools" in read:
            names, named, is_required, several = read["tools"]
            reader: Callable[[], Reader] = partial(self._calls or Reader, names, several=several)
            if named:
                reader = partial(HeldArguments, [named])
            elif is_required:
                reader = partial(HeldCalls, several=several)
            elif self._calls is None and self._template:
                raise BadRequest(
                    "tool_choice",
                    f"got auto, but the chat template does not show how the model writes calls; "
                    f"give the server --tool-call-parser (one of {', '.join(CALL_READERS)}), or "
                    "say required",
                )
            form = AnswerForm(reader, not named, self._has_short_ids)
        if "reasoning" not in read:
            return form
        make = form.make_reader
        return replace(form, make_reader=lambda: Reasoning(make(), is_open=read["reasoning"]))

    def _opens_with(self, variables: str) -> bool:
        """Whether a prompt that the chat template renders with these variables (in JSON) ends with
        `<think>`."""
        if self._text is None:
            return False
        try:
            rendered = self._text.render([_SOME_TURN], (), json.loads(variables))
        except BadRequest:
            return False
        return rendered.rstrip().endswith("<think>")


def _calls_in(template: str) -> str:
    """The name of the parser for calls as this chat template writes them; empty = none fits."""
    for name in ("deepseek", "mistral"):
        if CALL_READERS[name].marks[0] in template:
            return name
    if "<tool_call>" in template and not any(one in template for one in _OTHER_CALLS):
        return "hermes"
    if "<|eot_id|>" in template and '"parameters"' in template:
        return "llama3"
    return ""
