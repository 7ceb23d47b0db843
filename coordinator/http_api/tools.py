"""Tools that an answer may call: what holds it to them, and how the chat template is told."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.limits import CALLS_MAX, TOOLS_BYTES_MAX, TOOLS_MAX

AUTO, REQUIRED, NONE = "auto", "required", "none"
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request."""

    functions: Sequence[Mapping[str, Any]]
    """`name` and `parameters` of each, which are a JSON schema; and its `description`, if any."""
    named: str = ""
    """The one that the answer is a call of; empty = none in particular."""
    is_required: bool = False
    """Whether the answer must be calls."""
    several: bool = True
    """Whether it may call more than once."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(str(function["name"]) for function in self.functions)

    @property
    def is_held(self) -> bool:
        """Whether the grammar holds the answer to calls."""
        return self.is_required or bool(self.named)

    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": dict(one)} for one in self.functions]

    def constraint(self) -> Constraint | None:
        """What an answer that must be calls is: a list of each one's name and arguments, or the
        arguments of the named tool alone; None where it may be text. Raises `BadRequest`."""
        if self.named:
            [schema] = [one["parameters"] for one in self.functions if one["name"] == self.named]
            return Constraint.of_schema(schema, "tools")
        if not self.is_required:
            return None
        call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        calls = [
            {
                **call,
                "properties": {
                    "name": {"const": one["name"]},
                    "arguments": {"$ref": f"#/$defs/{one['name']}"},
                },
            }
            for one in self.functions
        ]
        schema = {
            "type": "array",
            "minItems": 1,
            "maxItems": CALLS_MAX if self.several else 1,
            "items": {"anyOf": calls},
            "$defs": {
                one["name"]: _moved(one["parameters"], f"#/$defs/{one['name']}")
                for one in self.functions
            },
        }
        return Constraint.of_schema(schema, "tools")


def tools_of(
    functions: Sequence[Mapping[str, Any]], choice: str, named: str, *, several: bool, place: str
) -> Tools | None:
    """Of a request with these functions, whose `choice` is `AUTO`, `REQUIRED` or `NONE` if none is
    `named`; None where nothing may be called. `place` is where a tool has its name, and the choice
    the one that it names. Raises `BadRequest`."""
    if not functions and (named or choice == REQUIRED):
        raise BadRequest("tool_choice", "asks for a call, but there are no tools")
    if len(functions) > TOOLS_MAX:
        raise BadRequest("tools", f"got {len(functions)}; at most {TOOLS_MAX} are allowed")
    names = set[str]()
    for index, function in enumerate(functions):
        name, field = function["name"], f"tools[{index}]{place}"
        if not _NAME.fullmatch(name):
            raise BadRequest(field, f"got {name[:64]!r}; allowed: 1 to 64 letters, digits, - and _")
        if name in names:
            raise BadRequest(field, f"{name!r} is the name of another tool, too")
        names.add(name)
    if named and named not in names:
        raise BadRequest(f"tool_choice{place}", f"{named[:64]!r} is none of the tools")
    size = len(json.dumps(functions, ensure_ascii=False).encode(errors="surrogatepass"))
    if size > TOOLS_BYTES_MAX:
        raise BadRequest("tools", f"have {size} bytes; at most {TOOLS_BYTES_MAX} are allowed")
    if not functions or (choice == NONE and not named):
        return None
    whole = [{**one, "parameters": _of_object(one.get("parameters"))} for one in functions]
    return Tools(whole, named, choice == REQUIRED, several)


def arguments_of(text: str, field: str) -> dict[str, Any]:
    """The arguments of a call, as chat templates want them; an empty text is none. Raises
    `BadRequest`."""
    try:
        found = from_json(text) if text else {}
    except ValueError as error:
        raise BadRequest(field, f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest(field, "is no JSON object")
    return found


def _of_object(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A tool without parameters takes an empty object; arguments are an object always."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    is_open = schema.keys().isdisjoint({"type", "$ref", "anyOf", "oneOf", "allOf"})
    return {"type": "object", **schema} if is_open else schema


def _moved(schema: Any, place: str) -> Any:
    """A schema that is put at another place of a document: its references lead there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
        if key not in ("$schema", "$id") or not isinstance(value, str)
    }
