"""How many ways of going on a schema may hold open at a time, from above, before it is compiled.

The compiler's parser tries every alternative wherever one may stand, and compares each with all
that it has: where many of them begin alike, a step takes the cube of their number, and cannot be
stopped once begun. Where schemas are combined (`allOf`, or keys beside a reference or a union),
every alternative of one is combined with every one of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Final

from outrider.errors import BadRequest
from outrider.limits import ALTERNATIVES_MAX, LIST_ALTERNATIVE

_UNIONS: Final = ("anyOf", "oneOf")
_SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
_NOTES: Final = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "x-guidance"),
}
"""Keys that hold no answer to anything."""
_APART: Final = _NOTES | {"allOf", "$ref", "patternProperties", "enum", "const", *_UNIONS}
"""Keys that are looked at one by one."""
_MANY: Final = 1e9
_REFERENCES_MAX: Final = 8
"""References that lead to one another, to find what kind of value an alternative is."""


def check_alternatives(schema: dict[str, Any], field: str) -> None:
    """Raises `BadRequest` for a schema with more alternatives than a step has time for."""
    document = _Document(schema)
    try:
        found = document.all_within(schema)
    except RecursionError:
        raise BadRequest(field, "has too many references that lead to one another") from None
    if found > ALTERNATIVES_MAX:
        raise BadRequest(
            field,
            f"has too many alternatives that are lists or objects: anyOf, oneOf and enum of the "
            f"whole schema, multiplied where schemas are combined, count {found:.0f}; allowed: "
            f"{ALTERNATIVES_MAX}, where one that may be a list counts {LIST_ALTERNATIVE}",
        )


class _Document:
    """A schema, with what is known of its parts."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._reached: dict[int, float] = {}
        """What each part that was looked at holds with all that it refers to; by its `id`."""
        self._on_the_way: set[int] = set()
        self._unions = self._listed_within(schema)

    def all_within(self, value: Any) -> float:
        """The alternatives that a value holds, those of references left out."""
        own = self._own(value) if isinstance(value, dict) else 0.0
        return own + sum(map(self.all_within, _inner(value)))

    def _listed_within(self, value: Any) -> float:
        """The same, as if nothing was combined."""
        own = self._listed(value) if isinstance(value, dict) else 0.0
        return own + sum(map(self._listed_within, _inner(value)))

    def _own(self, schema: dict[str, Any]) -> float:
        """The alternatives that stand in a schema itself, and those that combining makes."""
        found, parts = self._listed(schema), self._combined(schema)
        if len(parts) < 2:
            return found
        # Counted as lists: which ones a combination holds is not looked at.
        ways = prod(1 + part / LIST_ALTERNATIVE for part in parts) - 1
        return min(max(found, LIST_ALTERNATIVE * ways), _MANY)

    def _listed(self, schema: dict[str, Any]) -> float:
        """Those that stand in a schema itself."""
        values = schema.get("enum")
        if isinstance(values, list):
            values = [LIST_ALTERNATIVE for value in values if isinstance(value, dict | list)]
        return _several(values if isinstance(values, list) else None) + sum(
            self._of_union(schema.get(key)) for key in _UNIONS
        )

    def _of_union(self, entries: Any) -> float:
        return _several(map(self._weight, entries) if isinstance(entries, list) else ())

    def _weight(self, entry: Any) -> int:
        """Of one alternative: nothing where it is neither a list nor an object."""
        for _ in range(_REFERENCES_MAX):
            if not isinstance(entry, dict) or "$ref" not in entry:
                break
            entry = self._target(entry["$ref"])
        if not isinstance(entry, dict):
            return 0 if entry is False else LIST_ALTERNATIVE
        types = entry.get("type")
        kinds = set(_names(types))
        if kinds and kinds <= _SCALARS:
            return 0
        values = [entry["const"]] if "const" in entry else entry.get("enum")
        if isinstance(values, list) and not any(isinstance(v, dict | list) for v in values):
            return 0
        return 1 if kinds and kinds <= {"object", *_SCALARS} else LIST_ALTERNATIVE

    def _combined(self, schema: dict[str, Any]) -> list[float]:
        """Of the parts of a schema that all hold at once, the alternatives of each; where it has
        some."""
        listed, reference = schema.get("allOf"), schema.get("$ref")
        patterns = schema.get("patternProperties")
        parts: list[float] = []
        if isinstance(listed, list):
            parts += map(self._reach, listed)
        if isinstance(reference, str):
            parts.append(self._reach_by(reference))
        for entries in (schema.get(key) for key in _UNIONS):
            if isinstance(entries, list):
                parts.append(self._of_union(entries) + sum(map(self._reach, entries)))
        if isinstance(patterns, dict):
            parts += map(self._reach, patterns.values())
        rest = [schema[key] for key in schema if key not in _APART]
        parts.append(sum(map(self._reach, rest)))
        return [part for part in parts if part > 0]

    def _reach(self, value: Any) -> float:
        """The alternatives that a value and all that it refers to hold."""
        if not isinstance(value, dict | list):
            return 0.0
        known = self._reached.get(id(value))
        if known is not None:
            return known
        if id(value) in self._on_the_way:
            return self._unions
        self._on_the_way.add(id(value))
        found = 0.0
        if isinstance(value, dict):
            found = self._own(value)
            if isinstance(value.get("$ref"), str):
                found += self._reach_by(value["$ref"])
        found = min(found + sum(map(self._reach, _inner(value))), _MANY)
        self._on_the_way.discard(id(value))
        self._reached[id(value)] = found
        return found

    def _reach_by(self, reference: str) -> float:
        """The same of what a reference names; all there are, where that is not found here."""
        target = self._target(reference)
        return self._unions if target is None else self._reach(target)

    def _target(self, reference: Any) -> Any:
        """What a reference names in this document; nothing where it does not."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _inner(value: Any) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, dict | list)]


def _several(weights: Iterable[int] | None) -> float:
    """Nothing of one alternative, which nothing else begins like."""
    counted = [weight for weight in weights or () if weight > 0]
    return float(sum(counted)) if len(counted) > 1 else 0.0


def _names(types: Any) -> list[str]:
    listed = types if isinstance(types, list) else [types]
    return listed if all(isinstance(name, str) for name in listed) else []
