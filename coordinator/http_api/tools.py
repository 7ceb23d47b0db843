"""The tools of a request, their form in chat templates, and the constraint on an answer that must
call a tool."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint
from outrider.limits import CALLS_MAX, HTTP_CONTAINERS_MAX, TOOLS_BYTES_MAX

AUTO, REQUIRED, NONE = "auto", "required", "none"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request."""

    functions: Sequence[Mapping[str, Any]]
    """Each function has a `name`, `parameters` (a JSON schema), and perhaps a `description`."""
    named: str = ""
    """The tool that the answer must call. Empty = no tool is named."""
    is_required: bool = False
    """Whether the answer must consist of calls. True if a tool is `named`."""
    several: bool = True
    """Whether the answer may have more than one call."""

    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": dict(one)} for one in self.functions]

    def constraint(self) -> Constraint | None:
        """Returns the constraint on an answer that must consist of calls: the arguments of the
        `named` tool, or a list of objects with `name` and `arguments`. Returns None if the answer
        may be text. Raises `BadRequest`."""
        if not self.is_required:
            return None
        if self.named:
            [schema] = [one["parameters"] for one in self.functions if one["name"] == self.named]
            return Constraint.of_schema(schema, "tools")
        call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        calls, schemas = list[Any](), dict[str, Any]()
        for one in self.functions:
            name, place = one["name"], f"#/$defs/{one['name']}"
            schemas[name] = _moved(one["parameters"], place)
            own = {"name": {"const": name}, "arguments": {"$ref": place}}
            calls.append({**call, "properties": own})
        schema = {
            "type": "array",
            "minItems": 1,
            "maxItems": CALLS_MAX if self.several else 1,
            "items": {"anyOf": calls},
            "$defs": schemas,
        }
        return Constraint.of_schema(schema, "tools")


def tools_of(
    functions: Sequence[Mapping[str, Any]], choice: str, named: str, *, several: bool
) -> Tools | None:
    """Makes the tools of a request. `choice` is `AUTO`, `REQUIRED` or `NONE`. If a function is
    `named`, it must be `REQUIRED`. Returns None without functions, or if `choice` is `NONE`. Raises
    `BadRequest`."""
    if not functions and choice == REQUIRED:
        raise BadRequest("tool_choice", "asks for a call, but there are no tools")
    names = Counter(one["name"] for one in functions)
    if len(names) < len(functions):
        raise BadRequest("tools", f"{names.most_common(1)[0][0]!r} is the name of several tools")
    if named and named not in names:
        raise BadRequest("tool_choice", f"{named[:64]!r} is none of the tools")
    size = len(json.dumps(functions, ensure_ascii=False).encode(errors="surrogatepass"))
    if size > TOOLS_BYTES_MAX:
        raise BadRequest("tools", f"have {size} bytes; at most {TOOLS_BYTES_MAX} are allowed")
    if not functions or choice == NONE:
        return None
    whole = [{**one, "parameters": _of_object(one.get("parameters"))} for one in functions]
    return Tools(whole, named, choice == REQUIRED, several)


def check_arguments(texts: Sequence[str], field: str) -> None:
    """Raises `BadRequest` if the arguments of all calls together would take too long to parse."""
    if sum(text.count("{") + text.count("[") for text in texts) > HTTP_CONTAINERS_MAX:
        most = f"{HTTP_CONTAINERS_MAX} lists and objects in all"
        raise BadRequest(field, f"have calls with more than {most}")


def call_id_of(session_id: str, index: int) -> str:
    """Makes the id of a call in a session: nine letters and digits, as Mistral's chat templates
    require."""
    return hashlib.sha256(f"{session_id}/{index}".encode()).hexdigest()[:9]


def parsed_call(call_id: str, name: str, arguments: str, field: str) -> dict[str, Any]:
    """Returns a call for chat templates, with its arguments as an object. Raises `BadRequest` with
    this `field`."""
    try:
        found = from_json(arguments) if arguments else {}
    except ValueError as error:
        raise BadRequest(field, f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest(field, "must be a JSON object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": found}}


def _of_object(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Completes the schema of a function's arguments, which are an object."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    is_open = schema.keys().isdisjoint({"type", "$ref", "anyOf", "oneOf", "allOf"})
    return {"type": "object", **schema} if is_open else schema


def _moved(schema: Any, place: str) -> Any:
    """Returns the schema with this prefix before each `$ref`, for a larger schema."""
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
