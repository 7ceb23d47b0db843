"""A schema with more alternatives than a step has time for is refused before it is compiled; what
schemas are usually like is not."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import BadRequest
from outrider.grammar.compiler import check_alternatives
from outrider.limits import ALTERNATIVES_MAX, LIST_ALTERNATIVE

LISTS_MAX = ALTERNATIVES_MAX // LIST_ALTERNATIVE
LIST = {"type": "array"}
OBJECT = {"type": "object"}
TWO = {"anyOf": [LIST, LIST]}


def unions(count: int, union: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {f"p{index}": union for index in range(count)}}


def of(count: int) -> dict[str, Any]:
    return {"anyOf": [{**LIST, "maxItems": index} for index in range(count)]}


USUAL = [
    {"type": "object"},
    unions(1000, {"anyOf": [LIST, {"type": "null"}]}),
    unions(1000, {"anyOf": [LIST, {"enum": ["a", 1, None, True]}, {"const": "x"}]}),
    unions(1000, {"enum": ["a", "b", [1]]}),
    unions(1000, {"type": ["array", "object", "null"]}),
    {"$defs": {"t": OBJECT, "u": {"$ref": "#/$defs/t"}},
     "anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/u"}] * (ALTERNATIVES_MAX // 2)},
    {"anyOf": [LIST] * LISTS_MAX},
    {"oneOf": [OBJECT] * ALTERNATIVES_MAX},
    {"properties": {"a": TWO}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"$defs": {"a": of(40)}, "allOf": [{"$ref": "#/$defs/a"}], "description": "..."},
    {"allOf": [of(5), of(5)]},
    {"$ref": "#/$defs/none", "anyOf": "none", "allOf": {"a": 3}, "type": 7, "enum": {}},
]  # fmt: skip
TOO_MANY = [
    {"anyOf": [LIST] * (LISTS_MAX + 1)},
    {"anyOf": [{"items": {}}] * (LISTS_MAX + 1)},
    {"anyOf": [{"$ref": "#"}] * (LISTS_MAX + 1)},
    {"anyOf": [True] * (LISTS_MAX + 1)},
    {"anyOf": [{"type": ["array", "null"]}] * (LISTS_MAX + 1)},
    {"oneOf": [OBJECT] * (ALTERNATIVES_MAX + 1)},
    {"enum": [[index] for index in range(LISTS_MAX + 1)]},
    {"enum": [{"a": index} for index in range(LISTS_MAX + 1)]},
    unions(LISTS_MAX // 2 + 1, TWO),
    {"anyOf": [of(LISTS_MAX // 2), of(LISTS_MAX // 2 + 1)]},
    {"allOf": [of(10), of(10)]},
    {"allOf": [unions(10, TWO), unions(10, TWO)]},
    {"$defs": {"a": of(10)}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
    {"$defs": {"a": of(10)}, "$ref": "#/$defs/a", "anyOf": of(10)["anyOf"]},
    {"$defs": {"a": of(10)}, "$ref": "#/%24defs/a", "anyOf": of(10)["anyOf"]},
    {"anyOf": of(10)["anyOf"], "oneOf": of(10)["anyOf"]},
    {"properties": {"a": of(10)}, "patternProperties": {"a": of(10)}},
    {"$defs": {"a/b": of(10)}, "items": of(10), "$ref": "#/$defs/a~1b"},
    {"allOf": [{"items": {"$ref": "#"}}, of(10)]},
]


@pytest.mark.parametrize("schema", USUAL)
def test_what_a_step_has_time_for_is_let_through(schema: dict[str, Any]) -> None:
    check_alternatives(schema, "json_schema")


@pytest.mark.parametrize("schema", TOO_MANY)
def test_more_is_refused_and_the_field_is_named(schema: dict[str, Any]) -> None:
    with pytest.raises(
        BadRequest, match=f"^json_schema: has too many .* allowed: {ALTERNATIVES_MAX}"
    ):
        check_alternatives(schema, "json_schema")


def test_references_that_lead_to_one_another_are_followed_so_far_and_no_further() -> None:
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, TWO]} for i in range(900)}
    with pytest.raises(BadRequest, match=r"^json_schema: has too many"):
        check_alternatives({"$defs": chain, "$ref": "#/$defs/d0"}, "json_schema")
