"""Converts text to token ids, and arriving tokens to whole characters."""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.errors import BadRequest, ConfigError
from outrider.grammar.compiler import backend_json
from outrider.models.loading import load_tokenizer

_REPLACEMENT = "\ufffd"
_HELD_TOKENS_MAX = 8
"""If a character may be incomplete, at most this many tokens wait for the missing bytes."""
_SOME_TURN = {"role": "user", "content": "x"}
_SOME_TOOL = "a_tool_that_is_looked_for"
_UNKNOWN_BYTES_MAX = 256
"""A token for an unknown word is assumed to stand for at most this many bytes of text."""


class TokenizerText:
    """The tokenizer of a model. It recognises special tokens in prompts."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._backend: Any | None = getattr(tokenizer, "backend_tokenizer", None)
        self._special = frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if getattr(token, "special", False)
        ) | frozenset(tokenizer.all_special_ids)
        decoder: dict[str, Any] = {}
        if self._backend is not None:
            decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        # A byte-level tokenizer decodes by joining the bytes of each token.
        self._bytes_of = _byte_level_alphabet() if decoder.get("type") == "ByteLevel" else None
        vocabulary = tokenizer.get_vocab()
        spelled = {f"<0x{byte:02X}>": byte for byte in range(256)}
        self.fallback_bytes = {
            vocabulary[key]: spelled[key] for key in spelled if key in vocabulary
        }
        """The bytes of the tokens `<0x00>` to `<0xFF>`, by token id, if there are such tokens."""
        self._special_ids = {self.spell(token_id).decode(): token_id for token_id in self._special}
        longest = max((len(token.encode()) for token in vocabulary), default=0)
        self.token_bytes_max = max(longest, _UNKNOWN_BYTES_MAX)
        """Largest number of bytes of text that one token stands for."""

    @classmethod
    def load(
        cls,
        path: Path,
        name: str | None = None,
        *,
        trust_remote_code: bool = False,
        chat_template: str = "",
    ) -> TokenizerText:
        """Loads the tokenizer from a model's directory. A `chat_template` replaces the model's own.
        Raises `ConfigError` if there is no tokenizer."""
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        if tokenizer is None:
            raise ConfigError(f"model {name}: no tokenizer in {path}")
        if chat_template:
            tokenizer.chat_template = chat_template
        return cls(tokenizer, name or str(path))

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "text") -> list[int]:
        """Raises `BadRequest` for the `field` if its text is not Unicode (a lone surrogate)."""
        _check_unicode(field, text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @property
    def chat_template(self) -> str:
        """The chat template; empty if there is none. A template for tools takes precedence."""
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template or ""

    def check_tools(self, field: str) -> None:
        """Raises `BadRequest` for `field` if the chat template does not support tools."""
        if self.chat_template and not self._knows_tools:
            raise BadRequest(
                field,
                f"the chat template of model {self._name} does not support tools; start the server "
                "with --chat-template FILE, or --chat-template hermes for a model that uses ChatML",
            )

    @cached_property
    def _knows_tools(self) -> bool:
        function = {"name": _SOME_TOOL, "description": "", "parameters": {"type": "object"}}
        try:
            listed = self.render([_SOME_TURN], [{"type": "function", "function": function}])
        except BadRequest:
            return True  # Rendering the real conversation then raises the template's error.
        return _SOME_TOOL in listed

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        field: str = "chat",
    ) -> str:
        """The text of a conversation, up to the beginning of the answer. Raises `BadRequest` for
        the `field` if the model has no chat template, or the template fails. Also raises it if
        `variables` has a wrong name."""
        if not self.chat_template:
            raise BadRequest(field, f"model {self._name} has no chat template; send a prompt")
        if wrong := variables.keys() & _not_for_templates():
            raise BadRequest(
                f"chat_template_kwargs.{min(wrong)}", "is not a variable of a chat template"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception as error:  # A template may raise anything.
            raise BadRequest(field, f"the model's chat template failed: {error}") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        field: str = "chat",
    ) -> list[int]:
        """The token ids of a conversation, up to the beginning of the answer. Each message has at
        least `role` and `content`. Raises the errors of `render`. Also raises `BadRequest` if the
        template does not support tools that the conversation needs."""
        if tools or any("tool_calls" in message for message in messages):
            self.check_tools("tools" if tools else field)
        rendered = self.render(messages, tools, variables, field)
        _check_unicode(field, rendered)
        return list(self._tokenizer.encode(rendered, add_special_tokens=False))

    def backend_json(self) -> str:
        """See `outrider.grammar.compiler.backend_json`."""
        return backend_json(self._tokenizer)

    def decode(self, token_ids: Sequence[int], with_special: bool = False) -> str:
        """The text of tokens, with the names of special tokens if `with_special` is set."""
        ids, skips = list(token_ids), not with_special
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=skips))
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
        )

    def stream(self, shown: Collection[str] = ()) -> _ByteStream | _WindowStream:
        """A converter of arriving tokens to text. Its time is linear in the number of tokens.
        `push` takes a token and returns the text that is now certain. `finish` returns the
        remaining text, with U+FFFD for bytes that are not a character. The text
        includes the special tokens named in `shown`."""
        marks = {self._special_ids[name]: name for name in shown if name in self._special_ids}
        return _WindowStream(self, marks) if self._bytes_of is None else _ByteStream(self, marks)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special token."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a byte-level token; empty for unknown ids and other kinds of tokenizers."""
        token = self._backend.id_to_token(token_id) if self._backend is not None else None
        if token is None or self._bytes_of is None:
            return b""
        try:
            return bytes(self._bytes_of[character] for character in token)
        except KeyError:  # An added token, which stands for its own spelling.
            return str(token).encode()

    def spell(self, token_id: int) -> bytes:
        """The text of a single token, or a special token's name; empty for an unknown id."""
        if token_id in self._special:
            return str(self._tokenizer.convert_ids_to_tokens(token_id)).encode()
        if self._bytes_of is not None:
            return self.token_bytes(token_id)
        if token_id in self.fallback_bytes:
            return bytes([self.fallback_bytes[token_id]])
        # The first token of a text may lose its leading space, but the second does not.
        once, twice = self.decode([token_id]), self.decode([token_id, token_id])
        return twice[len(once) :].encode()


class _ByteStream:
    """Converts tokens of byte-level tokenizers. The bytes show which characters are complete."""

    def __init__(self, text: TokenizerText, marks: Mapping[int, str]) -> None:
        self._text = text
        self._marks = marks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._text.is_special(token_id):
            return self._marks.get(token_id, "")
        return self._decoder.decode(self._text.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Converts tokens of any tokenizer. The first token of a decoded text may lose its leading
    space. So the tokens in `_pending` are decoded together with the tokens before them, `_context`.
    `_shown` is the text of `_context`."""

    def __init__(self, text: TokenizerText, marks: Mapping[int, str]) -> None:
        self._text = text
        self._marks = marks
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = ""

    def push(self, token_id: int) -> str:
        if self._text.is_special(token_id):
            mark = self._marks.get(token_id, "")
            return mark and self.finish() + mark
        self._pending.append(token_id)
        if self._splits_character():
            return ""
        decoded = self._text.decode(self._context + self._pending)
        # Without byte tokens, U+FFFD at the end of the text may be an incomplete character.
        if (
            not self._text.fallback_bytes
            and decoded.endswith(_REPLACEMENT)
            and len(self._pending) < _HELD_TOKENS_MAX
        ):
            return ""
        return self._show(decoded)

    def finish(self) -> str:
        return self._show(self._text.decode(self._context + self._pending))

    def _splits_character(self) -> bool:
        """Whether the pending tokens are bytes of an incomplete character."""
        known = self._text.fallback_bytes
        if not all(token_id in known for token_id in self._pending):
            return False
        try:
            pending = bytes(known[token_id] for token_id in self._pending)
            return codecs.utf_8_decode(pending, "strict", False)[1] < len(pending)
        except UnicodeDecodeError:
            return False  # No further byte can complete the character.

    def _show(self, decoded: str) -> str:
        delta = decoded[len(self._shown) :]
        self._context, self._pending = self._pending, []
        self._shown = self._text.decode(self._context)
        return delta


@cache
def _not_for_templates() -> frozenset[str]:
    """Names that template variables must not have: parameters of `apply_chat_template`."""
    from transformers import PreTrainedTokenizerBase

    names = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(names) | {"messages"}


def _byte_level_alphabet() -> dict[str, int]:
    """Maps each character of byte-level vocabularies to its byte (GPT-2, Radford et al. 2019)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, f"not Unicode text (position {error.start})") from error
