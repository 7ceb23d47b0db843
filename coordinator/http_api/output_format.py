"""What form an answer must have: the one place where a request's wish for it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint

from .bodies import GenerationBody

_KINDS: Final = ("json", "json_object", "regex", "choice")
_GUIDED: Final = ("json", "regex", "choice")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A form that a body asks for."""

    constraint: Constraint
    field: str
    """Of the body that asks for it."""

    @property
    def names(self) -> Mapping[str, str]:
        """What the body calls the coordinator's field for it."""
        return {self.constraint.kind.value: self.field}


def output_format(body: GenerationBody) -> OutputFormat | None:
    """Of `response_format`, or vLLM's `structured_outputs` or `guided_...`; None = any text. Raises
    `BadRequest` for more than one, and for what no constraint can be read from."""
    if body.guided_grammar is not None:
        raise BadRequest("guided_grammar", "is not served; leave it out")
    guided = {f"guided_{name}": (name, getattr(body, f"guided_{name}")) for name in _GUIDED}
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *(_read(*entry, field) for field, entry in guided.items() if entry[1] is not None),
    ]
    if len(found) > 1:
        raise BadRequest(found[1].field, f"is given beside {found[0].field}; allowed: one of them")
    return found[0] if found else None


def _of_response_format(value: Mapping[str, Any] | None) -> list[OutputFormat]:
    """OpenAI's; a schema is always met, `strict` or not."""
    field = "response_format"
    if value is None:
        return []
    match value.get("type"):
        case "text":
            return []
        case "json_object":
            return [OutputFormat(Constraint.any_object(), field)]
        case "json_schema":
            field += ".json_schema"
            described = value.get("json_schema")
            if not isinstance(described, Mapping) or "schema" not in described:
                raise BadRequest(f"{field}.schema", "is missing")
            return [_read("json", described["schema"], f"{field}.schema")]
        case other:
            raise BadRequest(
                f"{field}.type", f"got {other!r}; allowed: text, json_object, json_schema"
            )


def _of_structured_outputs(value: Mapping[str, Any] | None) -> list[OutputFormat]:
    """vLLM's: one of its kinds, but for `grammar` and `structural_tag`."""
    found = []
    for name, entry in (value or {}).items():
        field = f"structured_outputs.{name}"
        if entry is None or (name == "json_object" and entry is False):
            continue
        if name not in _KINDS:
            allowed = ", ".join(_KINDS)
            raise BadRequest(field, f"is not served; allowed: one of {allowed}")
        found.append(_read(name, entry, field))
    return found


def _read(name: str, entry: Any, field: str) -> OutputFormat:
    match name:
        case "json":
            constraint = Constraint.of_schema(entry, field)
        case "json_object":
            if entry is not True:
                raise BadRequest(field, f"got {entry!r}; allowed: true, false")
            constraint = Constraint.any_object()
        case "regex":
            constraint = Constraint.of_regex(entry, field)
        case _:
            if not isinstance(entry, list):
                raise BadRequest(field, "is no list of texts")
            constraint = Constraint.of_choices(entry, field)
    return OutputFormat(constraint, field)
