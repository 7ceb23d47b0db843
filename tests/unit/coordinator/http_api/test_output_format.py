"""The form of an answer, however a request asks for it, and what asks for none that is served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.http_api.bodies import CompletionBody
from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"enum": [1, "é"]}}}
OF_SCHEMA = Constraint.of_schema(SCHEMA)
DESCRIBED = {"name": "x", "strict": True, "schema": SCHEMA}


def read(**fields: Any) -> tuple[Constraint | None, str | None]:
    """The constraint that is asked for, and the field that errors about it name."""
    body = CompletionBody.model_validate({"prompt": "x"} | fields)
    found = body.translate(lambda: 1)
    constraint = found.requests[0].constraint
    return constraint, None if constraint is None else found.names[constraint.kind]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_json": None},
    ],
)
def test_any_text(fields: dict[str, Any]) -> None:
    assert read(**fields) == (None, None)


@pytest.mark.parametrize(
    ("fields", "constraint", "field"),
    [
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {}},
            Constraint.any_object(),
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": DESCRIBED}},
            OF_SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
            OF_SCHEMA,
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Constraint.any_object(),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            Constraint.of_regex("a"),
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Constraint.of_choices(["a", "b"]),
            "structured_outputs.choice",
        ),
        ({"guided_json": SCHEMA}, OF_SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, Constraint.of_regex("a"), "guided_regex"),
        ({"guided_choice": ["a"]}, Constraint.of_choices(["a"]), "guided_choice"),
    ],
)
def test_each_way_to_ask(fields: dict[str, Any], constraint: Constraint, field: str) -> None:
    assert read(**fields) == (constraint, field)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: got 'xml'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema: is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema: is no JSON object",
        ),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar: is not served"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice: is no list"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object: got 1"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex: is given beside response_format",
        ),
    ],
)
def test_forms_that_are_none(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=f"^{said}"):
        read(**fields)
