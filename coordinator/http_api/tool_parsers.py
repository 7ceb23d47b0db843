"""Splits the text of an answer, as it is generated, into content, reasoning and calls of tools.

| class | parses |
| --- | --- |
| `HeldCalls`, `HeldArguments` | answers that a grammar constrains to calls |
| `Hermes`, `Llama3`, `Mistral`, `DeepSeek` | text with calls as this family of models writes them |
| `Content` | text without calls |
| `Reasoning` | `<think>...</think>`, and then what another parser takes |

A parser is a generator that continues with each piece of text. Text that may be the beginning of a
mark is held back, and white space beside a mark belongs to it. Text that looks like a call but is
none is content.
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
from coordinator.http_api.tools import AUTO
from outrider.errors import BadRequest

if TYPE_CHECKING:
    from coordinator.http_api.bodies import TranslatedBody
    from outrider.tokenizer import TokenizerText

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Waits for more text at each `yield`."""

_OPENINGS_KEPT = 64
"""Cache entries: for which variables the chat template begins the reasoning itself."""
_SPACE_MAX = 256
"""Characters of white space before a mark that are left out."""
_HEAD_CHARS_MAX = 256
"""Characters of a call up to the end of a mark after its name."""
_SOME_TURN = {"role": "user", "content": "x"}
_OTHER_CALLS = ("<function=", "<arg_key>")
"""In templates whose `<tool_call>` does not contain JSON."""
_ARGUMENTS = ("arguments", "parameters")
"""Keys of a call's arguments; Llama uses the second."""


class Part(NamedTuple):
    """A piece of an answer. A call is its whole name, then its arguments as pieces of JSON."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    text: str


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Merges adjacent parts of one kind, except names."""
    for kind, run in groupby(parts, key=attrgetter("kind")):
        texts = [part.text for part in run]
        yield from (Part(kind, text) for text in (texts if kind == "name" else ["".join(texts)]))


class _TextEndsError(Exception):
    """The text has ended, or the rest is ignored."""


class _NoCallError(Exception):
    """The text read is not a call."""


class Reader:
    """Base class of the parsers."""

    shown_tokens: ClassVar[tuple[str, ...]] = ()
    """Marks that the text must contain even where they are special tokens."""
    has_content = True
    """Whether text besides calls is content; if not, it is dropped."""

    def __init__(self, names: Collection[str] = (), *, several: bool = True) -> None:
        """`names` are those of the tools. Unless `several`, only the first call counts."""
        self._names = names
        self._several = several
        self._num_calls = 0
        self._text = ""
        """Text that is not parsed yet."""
        self._call_texts: list[str] = []
        """Text of the current call so far."""
        self._parts: list[Part] = []
        """Parts that are not returned yet."""
        self._follows_mark = False
        self._is_over = False
        self._reading = self._read_all()

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after this text."""
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

    def _read_all(self) -> Reading[None]:
        try:
            yield from self._read()
        except _TextEndsError:
            self._add("content", self._text)

    def _read(self) -> Reading[None]:
        """Parses the whole text. Raises `_TextEndsError` at its end."""
        raise NotImplementedError

    def _more(self) -> Reading[None]:
        if self._is_over:
            raise _TextEndsError
        yield

    def _add(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if text and (kind != "content" or self.has_content):
            self._parts.append(Part(kind, text))

    def _all(self, kind: Literal["content", "arguments"]) -> Reading[None]:
        while True:
            self._add(kind, self._text)
            self._text = ""
            yield from self._more()

    def _until(self, kind: Literal["content", "reasoning"], *marks: str) -> Reading[str]:
        """Adds the text up to one of the marks, which it returns."""
        while True:
            if self._follows_mark:
                self._text = self._text.lstrip()
            found = self._found(marks)
            if found is not None:
                at, mark = found
                self._add(kind, _without_space(self._text[:at]))
                self._text = self._text[at + len(mark) :]
                self._follows_mark = True
                return mark
            held = max(overlap(self._text, mark) for mark in marks)
            certain = _without_space(self._text[: len(self._text) - held])
            self._follows_mark = self._follows_mark and not certain
            self._add(kind, certain)
            self._text = self._text[len(certain) :]
            if self._is_over:
                self._add(kind, self._text)
                self._text = ""
            yield from self._more()

    def _found(self, marks: Collection[str]) -> tuple[int, str] | None:
        """The place of the first mark in the text, and the mark."""
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        return min(found, default=None)

    def _begins_with(self, mark: str) -> Reading[bool]:
        """Takes a mark at the beginning of the text. Returns whether it is there."""
        yield from self._peek()
        while not (text := self._text.lstrip()).startswith(mark):
            if not mark.startswith(text) or self._is_over:
                return False
            yield
        self._text = text[len(mark) :]
        return True

    def _peek(self) -> Reading[str]:
        """The next character that is not white space; the text stays as it is."""
        num_seen = 0
        while not (text := self._text[num_seen:].lstrip()):
            num_seen = len(self._text)
            yield from self._more()
        return text[0]

    # Calls: their text is kept in `_call_texts` until it is certainly a call.

    def _called(self, mark: str = "") -> Reading[bool]:
        """Parses a call. Returns whether it was one; if not, its text is content, with the mark
        before it."""
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
                self._add("content", "".join(self._call_texts))
                self._follows_mark = False
            if isinstance(error, _TextEndsError):
                raise
        return self._num_calls > num_before

    def _read_call(self) -> Reading[None]:
        """An object with a `name` and `arguments`."""
        has_arguments, early = False, "{}"
        num_before = self._num_calls
        yield from self._expect("{")
        while (yield from self._peek()) != "}":
            key = yield from self._string()
            yield from self._expect(":")
            is_object = (yield from self._peek()) == "{"
            if key == "name":
                self._begin_call((yield from self._string()))
            elif key in _ARGUMENTS and is_object and self._num_calls > num_before:
                yield from self._value(is_added=True)
                has_arguments = True
            else:
                value = yield from self._value()
                if key in _ARGUMENTS:
                    early = value
            if (yield from self._peek()) == ",":
                yield from self._expect(",")
        yield from self._expect("}")
        if self._num_calls == num_before:
            raise _NoCallError
        if not has_arguments:
            self._add("arguments", _unquoted(early))

    def _begin_call(self, name: str) -> None:
        self._num_calls += 1
        self._follows_mark = True
        self._parts.append(Part("name", name))

    def _take(self, number: int) -> str:
        """Takes the next characters of a call."""
        taken, self._text = self._text[:number], self._text[number:]
        self._call_texts.append(taken)
        return taken

    def _up_to(self, *marks: str) -> Reading[tuple[str, str]]:
        """Takes the text of a call up to one of the marks, which must be near. Returns the text and
        the mark."""
        while (found := self._found(marks)) is None and len(self._text) < _HEAD_CHARS_MAX:
            yield from self._more()
        if found is None or found[0] + len(found[1]) > _HEAD_CHARS_MAX:
            raise _NoCallError
        return self._take(found[0]), found[1]

    def _past(self, mark: str) -> Reading[str]:
        """Takes the text of a call up to a mark, which must be near, and the mark. Returns the
        text."""
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

    def _value(self, *, is_added: bool = False) -> Reading[str]:
        """Takes a JSON value, and returns it. It is added as arguments if it `is_added`. Only its
        end is determined: the value may be invalid."""
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
                    end, has_ended = place, True  # After a number or a word.
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
            if is_added:
                self._add("arguments", taken)
            if has_ended:
                return whole
            yield from self._more()

    def _list(self) -> Reading[None]:
        """Parses a list of calls, up to the first that is none."""
        yield from self._expect("[")
        while (yield from self._called()) and (yield from self._peek()) == ",":
            yield from self._expect(",")
        if (yield from self._peek()) == "]":
            yield from self._expect("]")


def _without_space(text: str) -> str:
    """The text before a mark, or before what may be one, without white space at its end."""
    return text[: max(len(text.rstrip()), len(text) - _SPACE_MAX)]


def _loaded(text: str) -> Any:
    """The value of JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _unquoted(arguments: str) -> str:
    """Arguments as an object: some models write it within a string, or null for none."""
    found = _loaded(arguments)
    return found if isinstance(found, str) else "{}" if found is None else arguments


class HeldCalls(Reader):
    """A list of calls and nothing else."""

    has_content = False

    def _read(self) -> Reading[None]:
        yield from self._list()


class HeldArguments(Reader):
    """The arguments of the only tool that may be called."""

    has_content = False

    def _read(self) -> Reading[None]:
        [name] = self._names
        self._begin_call(name)
        yield from self._all("arguments")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the texts of an answer are parsed."""

    make_reader: Callable[[], Reader]
    ends_with_calls: bool = True
    """Whether calls in an answer are its `finish_reason`."""
    has_short_ids: bool = False
    """Whether ids of calls must be nine letters and digits, as some chat templates require."""

    def call_id(self, session_id: str, index: int) -> str:
        """The id of a call in a session, which does not change when the session is resumed."""
        name = f"{session_id}/{index}".encode()
        digest = hashlib.blake2b(name, digest_size=12).hexdigest()
        return digest[:9] if self.has_short_ids else f"call_{digest}"


class Content(Reader):
    """Text without calls."""

    def _read(self) -> Reading[None]:
        yield from self._all("content")


class Hermes(Reader):
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, any number of them; Qwen's models,
    too."""

    shown_tokens = ("<tool_call>", "</tool_call>")

    def _read(self) -> Reading[None]:
        begin, _ = self.shown_tokens
        while True:
            if (yield from self._until("content", *self.shown_tokens)) == begin:
                yield from self._called(begin)


class Llama3(Reader):
    """`{"name": .., "parameters": {..}}` at the beginning, or after `<|python_tag|>`; several with
    semicolons between. An object whose name is not that of a tool is content."""

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
            yield from self._past("[ARGS]")
        self._begin_call(name)
        yield from self._value(is_added=True)


class DeepSeek(Reader):
    """Between marks: in V3 `function`, the name, and the arguments as a block of JSON; in V3.1 the
    name and the arguments."""

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
        name = yield from self._past("<｜tool▁sep｜>")
        if (yield from self._peek()) != "{":
            name = yield from self._past("```json")
        self._begin_call(name.strip())
        yield from self._value(is_added=True)
        yield from self._past("<｜tool▁call▁end｜>")


class Reasoning(Reader):
    """The text from `<think>` to `</think>` at the beginning; another parser takes the rest."""

    shown_tokens = ("<think>", "</think>")

    def __init__(self, rest: Reader, *, is_open: bool) -> None:
        """`is_open` = the text begins within the reasoning."""
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
"""By their names for `--tool-call-parser`."""


class ChatFormats:
    """How the served model writes calls and reasoning."""

    def __init__(
        self, text: TokenizerText | None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """The names of the parsers, from the settings; `auto` = by the chat template."""
        self._template = template = "" if text is None else text.chat_template
        self._text = text
        name = tool_call_parser if tool_call_parser != AUTO else _calls_in(template)
        self._calls = CALL_READERS.get(name)
        """None = unknown."""
        self._has_short_ids = name == "mistral"
        self._has_reasoning = reasoning_parser != "none" and (
            reasoning_parser != AUTO or "</think>" in template
        )
        self._always_reasons = reasoning_parser == "deepseek_r1"
        self._opens = lru_cache(_OPENINGS_KEPT)(self._opens_with)

    def fitted(self, asked: TranslatedBody) -> TranslatedBody:
        """Adds the form of its answers to the body of a conversation. Raises `BadRequest` if it has
        tools and it is unknown how the model writes calls."""
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
        form = json.dumps(read)
        requests = tuple(
            replace(one, shown_tokens=shown, answer_form=form) for one in asked.requests
        )
        return replace(asked, form=self.form(form), requests=requests)

    def form(self, answer_form: str) -> AnswerForm | None:
        """The form of the answer to a request with this `answer_form`. Raises as `fitted`."""
        if not answer_form:
            return None
        read, form = json.loads(answer_form), AnswerForm(Content)
        if "tools" in read:
            names, named, is_required, several = read["tools"]
            make_reader = self._reader_of_calls(names, named, is_required, several)
            form = AnswerForm(make_reader, not named, self._has_short_ids)
        if "reasoning" not in read:
            return form
        make = form.make_reader
        return replace(form, make_reader=lambda: Reasoning(make(), is_open=read["reasoning"]))

    def _reader_of_calls(
        self, names: list[str], named: str, is_required: bool, several: bool
    ) -> Callable[[], Reader]:
        if named:
            return partial(HeldArguments, [named])
        if is_required:
            return partial(HeldCalls, several=several)
        if self._calls is None and self._template:
            allowed = ", ".join(CALL_READERS)
            raise BadRequest(
                "tool_choice",
                f"got auto, but the chat template does not show how the model writes calls; give "
                f"the server --tool-call-parser (one of {allowed}), or say required",
            )
        return partial(self._calls or Content, names, several=several)

    def _opens_with(self, variables: str) -> bool:
        """Whether the chat template begins the reasoning itself; its variables are in JSON."""
        if self._text is None:
            return False
        try:
            rendered = self._text.render([_SOME_TURN], (), json.loads(variables))
        except BadRequest:
            return False
        return rendered.rstrip().endswith("<think>")


def _calls_in(template: str) -> str:
    """The name of the parser for the calls in a chat template; empty = none fits."""
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and not any(one in template for one in _OTHER_CALLS):
        return "hermes"
    if "<|eot_id|>" in template and '"parameters"' in template:
        return "llama3"
    return ""
