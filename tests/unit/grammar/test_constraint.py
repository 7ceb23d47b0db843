"""Equal constraints are equal values, in whatever form they were written. Errors name the field."""

import json
from typing import Any

import pytest

from outrider.errors import BadRequest
from outrider.grammar.constraint import Constraint

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"enum": [1, "é"]}}}
DEEP = '{"a":' * 32 + "{}" + "}" * 32


def test_the_same_schema_has_one_text_and_one_digest() -> None:
    made = Constraint.of_schema(SCHEMA)
    assert made == Constraint.of_schema(json.dumps(SCHEMA, indent=2))
    assert made.digest() == Constraint.of_schema(json.dumps(SCHEMA)).digest()
    assert made.text == '{"type":"object","properties":{"b":{},"a":{"enum":[1,"é"]}}}'


def test_different_constraints_have_different_digests() -> None:
    each = [
        Constraint.of_schema({"properties": {"a": {}, "b": {}}}),
        Constraint.of_schema({"properties": {"b": {}, "a": {}}}),  # Their order is the answer's.
        Constraint.of_schema({"type": "object"}),
        Constraint.any_object(),
        Constraint.of_regex('["a"]'),
        Constraint.of_choices(["a"]),
    ]
    assert len({one.digest() for one in each}) == len(each)


def test_what_was_sent_or_stored_is_read_again() -> None:
    for made in (
        Constraint.of_schema(SCHEMA),
        Constraint.any_object(),
        Constraint.of_regex(r"\d+\$"),
        Constraint.of_choices(["a", 'b"', "a"]),
    ):
        assert Constraint.read(str(made.kind), made.text) == made
    assert Constraint.of_choices(["a", 'b"', "a"]).choices == ("a", 'b"')


def test_anchors_around_an_expression_say_nothing() -> None:
    assert Constraint.of_regex("^a$") == Constraint.of_regex("a")
    assert Constraint.of_regex(r"a\$").text == r"a\$"
    assert Constraint.of_regex(r"a\\$").text == r"a\\"
    assert Constraint.of_regex("^^ab$$").text == "ab"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Constraint.of_schema("{"), "json_schema: is not valid JSON"),
        (lambda: Constraint.of_schema('{"a": NaN}'), "json_schema: cannot be written"),
        (lambda: Constraint.of_schema('{"a": 1e999}'), "json_schema: cannot be written"),
        (lambda: Constraint.of_schema(r'{"a": "\ud800"}'), "json_schema: is not Unicode"),
        (lambda: Constraint.of_schema(DEEP), "json_schema: is nested more than 32 levels deep"),
        (lambda: Constraint.of_schema(" " * 65_537), "json_schema: has 65537 bytes; at most 65536"),
        (lambda: Constraint.of_regex(""), "regex: is empty"),
        (lambda: Constraint.of_regex("a" * 16_385), "regex: has 16385 bytes"),
        (lambda: Constraint.of_choices(["a"] * 1025), "choice: got 1025 choices"),
        (lambda: Constraint.of_choices(["a", ""]), r"choice\[1\]: must be a non-empty"),
        (lambda: Constraint.of_choices(["x" * 65_533]), "choice: has 65537 bytes"),
        (lambda: Constraint.of_choices(["x" * 65_536]), "choice: has more than 65536 bytes"),
        (
            lambda: Constraint.of_schema({"enum": [[{"a": [1] * 70_000}]]}),
            "json_schema: has more than 65536 bytes",
        ),
        (lambda: Constraint.read("lark", "x"), "constraint.kind: 'lark' is not a kind; allowed"),
        (lambda: Constraint.read("choice", "{}"), "constraint.text: must be a JSON list"),
    ],
)
def test_what_is_no_constraint_is_told_by_its_field(make: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=f"^{said}"):
        make()
