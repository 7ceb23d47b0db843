"""Constraints on completions. A constraint has a kind and a canonical text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

from outrider.errors import BadRequest
from outrider.limits import CHOICES_MAX, CONSTRAINT_BYTES_MAX, REGEX_BYTES_MAX, SCHEMA_DEPTH_MAX

DIGEST_BYTES = 16
_CONTAINERS = (dict, list, tuple)
_SIZED = frozenset({*_CONTAINERS, str})


class ConstraintKind(StrEnum):
    """How a constraint's text is read."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A constraint that the whole completion must match. The class methods that make a constraint
    do not check whether it can be compiled."""

    kind: ConstraintKind
    text: str
    """A schema as compact JSON, a regular expression, or a JSON list of choices. The keys of a
    schema keep their order, because this order also holds for the keys of an answer."""
    field: str = dataclasses.field(default="", compare=False)
    """The request's field that asks for the constraint, for errors."""

    @classmethod
    def of_schema(
        cls, schema: str | Mapping[str, Any], field: str = ConstraintKind.JSON_SCHEMA
    ) -> Constraint:
        """JSON that matches a schema. Raises `BadRequest` if the schema is not a JSON object, or
        exceeds the size or depth in `outrider.limits`."""
        if isinstance(schema, str):
            _check_size(schema, CONSTRAINT_BYTES_MAX, field)
            schema = _loaded(schema, field)
        if not isinstance(schema, Mapping):
            raise BadRequest(field, "must be a JSON object")
        text = _dumped(schema, field)
        level: list[Any] = [schema]
        for _ in range(SCHEMA_DEPTH_MAX):
            level = [inner for outer in level for inner in containers_in(outer)]
        if level:
            raise _too_deep(field)
        return cls(ConstraintKind.JSON_SCHEMA, text, field)

    @classmethod
    def any_object(cls, field: str = ConstraintKind.JSON_OBJECT) -> Constraint:
        """Any JSON object."""
        return cls(ConstraintKind.JSON_OBJECT, '{"type":"object"}', field)

    @classmethod
    def of_regex(cls, regex: str, field: str = ConstraintKind.REGEX) -> Constraint:
        """Text that a regular expression matches from beginning to end. Raises `BadRequest` if the
        expression is empty or too long."""
        if not isinstance(regex, str):
            raise BadRequest(field, "must be a string")
        _check_size(regex, REGEX_BYTES_MAX, field)
        whole = regex.lstrip("^")
        bare = whole.rstrip("$")
        if bare != whole and (len(bare) - len(bare.rstrip("\\"))) % 2:
            bare += "$"  # The first of the removed $ is escaped.
        if not bare:
            raise BadRequest(field, "is empty; it must match some text")
        return cls(ConstraintKind.REGEX, bare, field)

    @classmethod
    def of_choices(cls, choices: Iterable[str], field: str = ConstraintKind.CHOICE) -> Constraint:
        """One of these texts. Raises `BadRequest` for no texts, too many texts or an empty text."""
        listed = [choices] if isinstance(choices, str) else list(choices)
        if not 1 <= len(listed) <= CHOICES_MAX:
            raise BadRequest(field, f"got {len(listed)} choices; allowed: 1..{CHOICES_MAX}")
        for index, choice in enumerate(listed):
            if not isinstance(choice, str) or not choice:
                raise BadRequest(f"{field}[{index}]", "must be a non-empty string")
        text = _dumped(list(dict.fromkeys(listed)), field)
        return cls(ConstraintKind.CHOICE, text, field)

    @classmethod
    def read(cls, kind: str, text: str, field: str = "constraint") -> Constraint:
        """A constraint from a message or the store. Raises `BadRequest`."""
        if kind == ConstraintKind.JSON_OBJECT:
            return cls.any_object()
        if kind == ConstraintKind.JSON_SCHEMA:
            return cls.of_schema(text, f"{field}.text")
        if kind == ConstraintKind.REGEX:
            return cls.of_regex(text, f"{field}.text")
        if kind == ConstraintKind.CHOICE:
            _check_size(text, CONSTRAINT_BYTES_MAX, f"{field}.text")
            choices = _loaded(text, f"{field}.text")
            if not isinstance(choices, list):
                raise BadRequest(f"{field}.text", "must be a JSON list")
            return cls.of_choices(choices, f"{field}.text")
        allowed = ", ".join(ConstraintKind)
        raise BadRequest(f"{field}.kind", f"{kind[:64]!r} is not a kind; allowed: {allowed}")

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts of a `CHOICE`."""
        return tuple(json.loads(self.text))

    def digest(self) -> bytes:
        """A 128-bit hash that is the same in every process."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        # All sessions of a request have the same constraint object, which may be long.
        content = f"{self.kind}\n{self.text}".encode()
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _loaded(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise BadRequest(field, f"is not valid JSON: {error}") from None


def _dumped(value: Any, field: str) -> str:
    if is_longer(value, CONSTRAINT_BYTES_MAX):
        raise BadRequest(field, f"has more than {CONSTRAINT_BYTES_MAX} bytes")
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise _too_deep(field) from None
    except (ValueError, TypeError) as error:
        raise BadRequest(field, f"cannot be written as JSON: {error}") from None
    _check_size(text, CONSTRAINT_BYTES_MAX, field)
    return text


def _too_deep(field: str) -> BadRequest:
    return BadRequest(field, f"is nested more than {SCHEMA_DEPTH_MAX} levels deep")


def _check_size(text: str, bytes_max: int, field: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadRequest(field, f"is not Unicode text: {error.reason}") from None
    if size > bytes_max:
        raise BadRequest(field, f"has {size} bytes; at most {bytes_max} are allowed")


def is_longer(value: Any, num_chars: int) -> bool:
    """Whether the JSON of a list or object is certainly longer than `num_chars`. Looks at no more
    than `num_chars` values, so this takes less time than writing the JSON of a large value."""
    left, parts = num_chars, [value]
    for part in parts:  # Parts within this part are appended.
        left -= len(part)
        if left < 0:
            return True
        inner = [] if isinstance(part, str) else part
        if isinstance(part, dict):
            inner = [*part.keys(), *part.values()]
        parts += [item for item in inner if type(item) in _SIZED]
    return False


def containers_in(value: Any) -> list[Any]:
    """The lists and objects directly inside a list or object."""
    parts = value.values() if isinstance(value, Mapping) else value
    is_container = isinstance(value, Mapping | Sequence)
    return [part for part in parts if isinstance(part, _CONTAINERS)] if is_container else []
