"""Reads an answer's text as it comes: what of it is content, reasoning, or a call of a tool.

| class | reads |
| --- | --- |
| `HeldCalls`, `HeldArguments` | what the grammar holds an answer to that must be calls |
| `Hermes`, `Llama3`, `Mistral`, `DeepSeek` | calls as a family of models writes them, and text |
| `Content` | text that calls nothing |
| `Reasoning` | `<think>...</think>`, and then what one of the others reads |

A reader is a generator that goes on when more text comes. What may be the beginning of a mark is
held back, and white space beside a mark belongs to it. What looks like a call and is none is
content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from coordinator.decoding.detokenizer import overlap
from coordinator.http_api.tools import AUTO, Tools
from outrider.errors import BadRequest

if TYPE_CHECKING:
    from coordinator.http_api.bodies import TranslatedBody
    from outrider.tokenizer import TokenizerText

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Waits for more text at each `yield`."""

_OPENINGS_KEPT = 64
"""Sets of a chat template's variables, of which is remembered whether reasoning begins with
them."""
_SPACE_MAX = 256
"""White space beside a mark of which it is not told; what is before that, is."""
_HEAD_CHARS_MAX = 256
"""Up to the end of a mark within a call, behind its name."""
_SOME_TURN = {"role": "user", "content": "x"}
_OTHER_CALLS = ("<function=", "<arg_key>")
"""In templates whose `<tool_call>` holds something else than JSON."""
_ARGUMENTS = ("arguments", "parameters")
"""What the arguments of a call are called; Llama's way is the second."""


class Part(NamedTuple):
    """A piece of an answer. A call begins with its whole name; its arguments are JSON in pieces."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    text: str


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Neighbours of one kind as one, but for names."""
    for kind, run in groupby(parts, key=attrgetter("kind")):
        texts = [part.text for part in run]
        yield from (Part(kind, text) for text in (texts if kind == "name" else ["".join(texts)]))


class _TextEndsError(Exception):
    """There is no more text, or no more of it is wanted."""


class _NoCallError(Exception):
    """What was read is no call."""


class Reader:
    """Base of all readers."""

    shown_tokens: ClassVar[tuple[str, ...]] = ()
    """Marks, which the text has for this reader even where they are special tokens."""
    has_content = True
    """Whether what is no call is told."""

    def __init__(self, names: Collection[str] = (), *, several: bool = True) -> None:
        """`names` are those of the tools; after the first call nothing is told unless `several`
        may come."""
        self._names = names
        self._several = several
        self._num_calls = 0
        self._text = ""
        """What has come and is not read."""
        self._call_texts: list[str] = []
        """What was read of a call."""
        self._parts: list[Part] = []
        """What was read and is not told."""
        self._follows_mark = False
        self._is_over = False
        self._reading = self._read_all()

    def push(self, text: str) -> list[Part]:
        """What is certain after some more text."""
        self._text += text
        return self._go_on()

    def finish(self) -> list[Part]:
        """What was held back; the text has ended."""
        self._is_over = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        found, self._parts = self._parts, []
        return found

    def _read_all(self) -> Reading[None]:
        try:
            yield from self._read()
        except _TextEndsError:
            self._tell("content", self._text)

    def _read(self) -> Reading[None]:
        """Reads the whole text; raises `_TextEndsError` where it ends."""
        raise NotImplementedError

    def _more(self) -> Reading[None]:
        if self._is_over:
            raise _TextEndsError
        yield

    def _tell(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if text and (kind != "content" or self.has_content):
            self._parts.append(Part(kind, text))

    def _until(self, kind: Literal["content", "reasoning"], *marks: str) -> Reading[str]:
        """Tells text up to one of the marks, which it returns."""
        while True:
            if self._follows_mark:
                self._text = self._text.lstrip()
            found = self._found(marks)
            if found is not None:
                at, mark = found
                self._tell(kind, _without_space(self._text[:at]))
                self._text = self._text[at + len(mark) :]
                self._follows_mark = True
                return mark
            held = max(overlap(self._text, mark) for mark in marks)
            certain = _without_space(self._text[: len(self._text) - held])
            self._follows_mark = self._follows_mark and not certain
            self._tell(kind, certain)
            self._text = self._text[len(certain) :]
            if self._is_over:
                self._tell(kind, self._text)
                self._text = ""
            yield from self._more()

    def _found(self, marks: Collection[str]) -> tuple[int, str] | None:
        """The first of the marks in the text, and where it is."""
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        return min(found, default=None)

    def _begins_with(self, mark: str) -> Reading[bool]:
        """Reads a mark at the beginning of the text, if it is there."""
        yield from self._peek()
        while not (text := self._text.lstrip()).startswith(mark):
            if not mark.startswith(text) or self._is_over:
                return False
            yield
        self._text = text[len(mark) :]
        return True

    def _peek(self) -> Reading[str]:
        """The next character that is no white space, which is read no more than that is."""
        num_seen = 0
        while not (text := self._text[num_seen:].lstrip()):
            num_seen = len(self._text)
            yield from self._more()
        return text[0]

    # Calls: what is read of them is kept until it is certain that they are some.

    def _called(self, mark: str = "") -> Reading[bool]:
        """Reads a call; returns whether it was one. If not it is content, with the mark before
        it."""
        if self._num_calls and not self._several:
            self._text = ""
            raise _TextEndsError
        num_before = self._num_calls
        self._call_texts = [mark]
        try:
            yield from self._read_call()
        except (_NoCallError, _TextEndsError) as error:
            if self._num_calls == num_before:
                if isinstance(error, _TextEndsError):
                    self._take(len(self._text))
                self._tell("content", "".join(self._call_texts))
                self._follows_mark = False
            if isinstance(error, _TextEndsError):
                raise
        return self._num_calls > num_before

    def _read_call(self) -> Reading[None]:
        """An object with a `name` and `arguments`."""
        is_told, early = False, "{}"
        num_before = self._num_calls
        yield from self._expect("{")
        while (yield from self._peek()) != "}":
            key = yield from self._string()
            yield from self._expect(":")
            is_object = (yield from self._peek()) == "{"
            if key == "name":
                self._begin_call((yield from self._string()))
            elif key in _ARGUMENTS and is_object and self._num_calls > num_before:
                yield from self._value(is_told=True)
                is_told = True
            else:
                value = yield from self._value()
                if key in _ARGUMENTS:
                    early = value
            if (yield from self._peek()) == ",":
                yield from self._expect(",")
        yield from self._expect("}")
        if self._num_calls == num_before:
            raise _NoCallError
        if not is_told:
            self._tell("arguments", _unquoted(early))

    def _begin_call(self, name: str) -> None:
        self._num_calls += 1
        self._follows_mark = True
        self._parts.append(Part("name", name))

    def _take(self, number: int) -> str:
        """Reads so many characters of a call."""
        taken, self._text = self._text[:number], self._text[number:]
        self._call_texts.append(taken)
        return taken

    def _up_to(self, *marks: str) -> Reading[tuple[str, str]]:
        """Reads a call up to one of the marks, which is near; returns what is before it, and it."""
        while (found := self._found(marks)) is None and len(self._text) < _HEAD_CHARS_MAX:
            yield from self._more()
        if found is None or found[0] + len(found[1]) > _HEAD_CHARS_MAX:
            raise _NoCallError
        return self._take(found[0]), found[1]

    def _behind(self, mark: str) -> Reading[str]:
        """Reads a call up to behind a mark that is near; returns what is before it."""
        before, _ = yield from self._up_to(mark)
        self._take(len(mark))
        return before

    def _expect(self, char: str) -> Reading[None]:
        if (yield from self._peek()) != char:
            raise _NoCallError
        self._take(self._text.index(char) + 1)

    def _string(self) -> Reading[str]:
        value = yield from self._value()
        found = _loaded(value)
        if not isinstance(found, str):
            raise _NoCallError
        return found

    def _value(self, *, is_told: bool = False) -> Reading[str]:
        """Reads a JSON value, which is told as arguments if it `is_told`; returns it. Only where it
        ends is looked at."""
        if (yield from self._peek()) in ",:]}":
            raise _NoCallError
        self._take(len(self._text) - len(self._text.lstrip()))
        depth, is_in_string, is_escaped, whole = 0, False, False, ""
        while True:
            end, has_ended = len(self._text), False
            for place, char in enumerate(self._text):
                if is_in_string:
                    is_in_string = is_escaped or char != '"'
                    is_escaped = char == "\\" and not is_escaped
                elif depth == 0 and (whole or place) and char in ",:]} \t\r\n":
                    end, has_ended = place, True  # Behind a number or a word.
                    break
                elif char == '"':
                    is_in_string = True
                else:
                    depth += (char in "{[") - (char in "}]")
                if char in '"}]' and depth <= 0 and not is_in_string:
                    end, has_ended = place + 1, True
                    break
            taken = self._take(end)
            whole += taken
            if is_told:
                self._tell("arguments", taken)
            if has_ended:
                return whole
            yield from self._more()

    def _list(self) -> Reading[None]:
        """Reads a list of calls, up to what is none."""
        yield from self._expect("[")
        while (yield from self._called()) and (yield from self._peek()) == ",":
            yield from self._expect(",")
        if (yield from self._peek()) == "]":
            yield from self._expect("]")


def _without_space(text: str) -> str:
    """What is told of the text before a mark, or before what may be one."""
    return text[: max(len(text.rstrip()), len(text) - _SPACE_MAX)]


def _loaded(text: str) -> Any:
    """What JSON stands for; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _unquoted(arguments: str) -> str:
    """Arguments that are an object, or JSON within a string; null is no arguments."""
    found = _loaded(arguments)
    return found if isinstance(found, str) else "{}" if found is None else arguments


class HeldCalls(Reader):
    """A list of calls, and nothing else."""

    has_content = False

    def _read(self) -> Reading[None]:
        yield from self._list()


class HeldArguments(Reader):
    """The arguments of the only tool that it may call."""

    has_content = False

    def _read(self) -> Reading[None]:
        [name] = self._names
        self._begin_call(name)
        while True:
            self._tell("arguments", self._text)
            self._text = ""
            yield from self._more()


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the texts of an answer are read."""

    make_reader: Callable[[], Reader]
    ends_with_calls: bool = True
    """Whether an answer with calls says that it ends for them."""
    has_short_ids: bool = False
    """Whether the chat template takes no other ids of calls than nine letters and digits."""

    def call_id(self, session_id: str, index: int) -> str:
        """Of a call of a session, the same whenever the session is read."""
        name = f"{session_id}/{index}".encode()
        digest = hashlib.blake2b(name, digest_size=12).hexdigest()
        return digest[:9] if self.has_short_ids else f"call_{digest}"


class Content(Reader):
    """Text that calls nothing."""

    def _read(self) -> Reading[None]:
        while True:
            self._tell("content", self._text)
            self._text = ""
            yield from self._more()


class Hermes(Reader):
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, any number of them. So do Qwen's
    models write."""

    shown_tokens = ("<tool_call>", "</tool_call>")

    def _read(self) -> Reading[None]:
        begin, _ = self.shown_tokens
        while True:
            if (yield from self._until("content", *self.shown_tokens)) == begin:
                yield from self._called(begin)


class Llama3(Reader):
    """`{"name": .., "parameters": {..}}` at the beginning, or behind `<|python_tag|>`; several with
    semicolons. An object at the beginning whose name is no tool's is content."""

    shown_tokens = ("<|python_tag|>",)

    def _read(self) -> Reading[None]:
        [mark] = self.shown_tokens
        if (yield from self._peek()) == "{":
            yield from self._calls()
        while True:
            yield from self._until("content", mark)
            yield from self._calls()

    def _calls(self) -> Reading[None]:
        while (yield from self._called()) and (yield from self._peek()) in ";,{":
            if (yield from self._peek()) != "{":
                self._text = self._text.lstrip()[1:]

    def _begin_call(self, name: str) -> None:
        if name not in self._names:
            raise _NoCallError
        super()._begin_call(name)


class Mistral(Reader):
    """`[TOOL_CALLS]` and a list of calls; newer models, before each call, and write it as
    `name[ARGS]{..}` or `name{..}`."""

    shown_tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def _read(self) -> Reading[None]:
        mark, *_ = self.shown_tokens
        while True:
            yield from self._until("content", mark)
            if (yield from self._peek()) == "[":
                yield from self._list()
            else:
                yield from self._called()

    def _read_call(self) -> Reading[None]:
        if (yield from self._peek()) == "{":
            yield from super()._read_call()
            return
        before, mark = yield from self._up_to("{", "[CALL_ID]", "[ARGS]")
        name = before.strip()
        if not name or " " in name:
            raise _NoCallError
        if mark != "{":
            yield from self._behind("[ARGS]")
        self._begin_call(name)
        yield from self._value(is_told=True)


class DeepSeek(Reader):
    """V3: between marks `function`, the name, and the arguments as a block of JSON; V3.1: the name
    and the arguments."""

    shown_tokens = (
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )  # fmt: skip

    def _read(self) -> Reading[None]:
        _, begin, *_ = self.shown_tokens
        while True:
            if (yield from self._until("content", *self.shown_tokens)) == begin:
                yield from self._called()

    def _read_call(self) -> Reading[None]:
        name = yield from self._behind("<｜tool▁sep｜>")
        if (yield from self._peek()) != "{":
            name = yield from self._behind("```json")
        self._begin_call(name.strip())
        yield from self._value(is_told=True)
        yield from self._behind("<｜tool▁call▁end｜>")


class Reasoning(Reader):
    """What stands between `<think>` and `</think>` at the beginning, and what another one reads of
    the rest."""

    shown_tokens = ("<think>", "</think>")

    def __init__(self, rest: Reader, *, is_open: bool) -> None:
        """`is_open` = the text begins within it."""
        super().__init__()
        self._rest = rest
        self._is_open = is_open

    def _read(self) -> Reading[None]:
        begin, end = self.shown_tokens
        if (yield from self._begins_with(begin)) or self._is_open:
            self._follows_mark = True
            yield from self._until("reasoning", end)
            yield from self._peek()
            self._text = self._text.lstrip()
        while True:
            self._parts += self._rest.push(self._text)
            self._text = ""
            if self._is_over:
                self._parts += self._rest.finish()
            yield from self._more()


CALL_READERS: dict[str, type[Reader]] = {
    "hermes": Hermes, "llama3": Llama3, "mistral": Mistral, "deepseek": DeepSeek, "none": Content
}  # fmt: skip
"""By what `--tool-call-parser` calls them."""


class ChatFormats:
    """How the served model writes calls and reasoning."""

    def __init__(
        self, text: TokenizerText | None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """The parsers are those of the settings, where `auto` goes by the chat template."""
        self._template = template = "" if text is None else text.chat_template
        self._text = text
        name = tool_call_parser if tool_call_parser != AUTO else _calls_in(template)
        self._calls = CALL_READERS.get(name)
        """None = not known."""
        self._has_short_ids = name == "mistral"
        self._has_reasoning = reasoning_parser != "none" and (
            reasoning_parser != AUTO or "</think>" in template
        )
        self._always_reasons = reasoning_parser == "deepseek_r1"
        self._opens = lru_cache(_OPENINGS_KEPT)(self._opens_with)

    def fitted(self, asked: TranslatedBody) -> TranslatedBody:
        """A conversation's body with the form of its answers. Raises `BadRequest` for tools whose
        calls could not be recognised."""
        tools, request = asked.tools, asked.requests[0]
        read: dict[str, Any] = {}
        shown: tuple[str, ...] = ()
        if tools is not None:
            if self._text is not None:
                self._text.check_tools("tools")
            read["tools"] = [sorted(tools.names), tools.named, tools.is_required, tools.several]
            if self._calls is not None and not tools.is_held:
                shown = self._calls.shown_tokens
        if self._has_reasoning and request.constraint is None:
            variables = json.dumps({**request.template_variables})
            read["reasoning"] = self._always_reasons or self._opens(variables)
            shown += Reasoning.shown_tokens
        if not read:
            return asked
        told = json.dumps(read)
        requests = tuple(
            replace(one, shown_tokens=shown, answer_form=told) for one in asked.requests
        )
        return replace(asked, form=self.form(told), requests=requests)

    def form(self, told: str) -> AnswerForm | None:
        """Of the answer to a request with this `answer_form`. Raises `BadRequest` as `fitted`."""
        if not told:
            return None
        read, form = json.loads(told), AnswerForm(Content)
        if "tools" in read:
            names, *how = read["tools"]
            tools = Tools([{"name": name} for name in names], *how)
            form = AnswerForm(self._reader(tools), not tools.named, self._has_short_ids)
        if "reasoning" not in read:
            return form
        make = form.make_reader
        return replace(form, make_reader=lambda: Reasoning(make(), is_open=read["reasoning"]))

    def _reader(self, tools: Tools) -> Callable[[], Reader]:
        if tools.named:
            return partial(HeldArguments, [tools.named])
        if tools.is_required:
            return partial(HeldCalls, several=tools.several)
        if self._calls is None and self._template:
            allowed = ", ".join(CALL_READERS)
            raise BadRequest(
                "tool_choice",
                f"got auto, but how the model writes calls is not known from its chat template; "
                f"give the server --tool-call-parser (one of {allowed}), or say required",
            )
        return partial(self._calls or Content, tools.names, several=tools.several)

    def _opens_with(self, variables: str) -> bool:
        """Whether the chat template, with these variables as JSON, begins the reasoning itself."""
        if self._text is None:
            return False
        try:
            rendered = self._text.render([_SOME_TURN], (), json.loads(variables))
        except BadRequest:
            return False
        return rendered.rstrip().endswith("<think>")


def _calls_in(template: str) -> str:
    """The parser for the calls that a chat template writes; empty = none of them."""
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and not any(one in template for one in _OTHER_CALLS):
        return "hermes"
    if "<|eot_id|>" in template and '"parameters"' in template:
        return "llama3"
    return ""
