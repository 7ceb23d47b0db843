"""Constraints are compiled once, off the event loop, within a time limit; errors are reported."""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any
from unittest.mock import create_autospec

import pytest

from outrider.errors import BadRequest, ConfigError, Incompatible, Overloaded
from outrider.grammar.compiler import Grammar, Grammars, GrammarTokenizer, check_alternatives
from outrider.grammar.constraint import Constraint
from outrider.grammar.matcher import Matchers, PrefixMatcher
from outrider.limits import ALTERNATIVES_MAX, COMPILE_S_MAX, LIST_ALTERNATIVE, MASK_S_MAX
from tests.support.constrained import CONSTRAINTS, SCHEMA, grammars, hf_tokenizer, tokens

ITSELF = {"$ref": "#/$defs/a"}


def alike(count: int, alternative: dict[str, Any]) -> Constraint:
    """Nested values whose kinds cannot be told apart."""
    kinds = [alternative] * count
    return Constraint.of_schema({"$defs": {"a": {"anyOf": [*kinds, {"type": "null"}]}}, **ITSELF})


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the whole text may be written and ended."""
    matcher = PrefixMatcher(tokens().compile(constraint), grammars())
    ids = [*hf_tokenizer().encode(text), *tokens().eos_token_ids]
    return matcher.replace_from(0, ids) == len(ids)


@pytest.mark.parametrize(
    ("constraint", "whole", "not_whole"),
    [
        (
            Constraint.of_schema(SCHEMA),
            ['{"name":"x","tags":[]}', '{"name": "x", "tags": ["bb", "a"], "size": 7}'],
            ['{"name":"x"}', '{"tags":[],"name":"x"}', '{"name":  "x","tags":[]}', "[]"],
        ),
        (Constraint.any_object(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"', ""]),
        (Constraint.of_regex(r"^a+\$$"), ["aa$"], ["aa", "$", "aa$a"]),
        (Constraint.of_regex("yes|no"), ["yes", "no"], ["yesno", "ye"]),
        (
            Constraint.of_choices(['a "b"\\\n', "a|b", ".*", "日本", "\x7f\u2028"]),
            ['a "b"\\\n', "a|b", ".*", "日本", "\x7f\u2028"],
            ["a", "b", "xx", "日"],
        ),
    ],
)
def test_what_a_constraint_accepts(
    constraint: Constraint, whole: list[str], not_whole: list[str]
) -> None:
    assert [text for text in whole if not accepts(constraint, text)] == []
    assert [text for text in not_whole if accepts(constraint, text)] == []


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint.of_schema({"type": "striing"}), "json_schema: cannot be compiled: .*striing"),
        (Constraint.of_schema({"uniqueItems": True}), "json_schema: .*uniqueItems"),
        (
            Constraint.of_schema({"uniqueItems": True, "x-guidance": {"lenient": True}}),
            "json_schema: x-guidance.lenient is not allowed",
        ),
        (Constraint.of_regex("(a"), "regex: cannot be compiled: .*unclosed group"),
        (Constraint.of_regex("(?=a)b"), "regex: .*look-ahead"),
    ],
)
async def test_what_cannot_be_compiled_is_told_by_name_and_remembered(
    constraint: Constraint, said: str
) -> None:
    known = grammars()
    for _ in range(2):
        with pytest.raises(BadRequest, match=said):
            await known.prepare(constraint)
    assert isinstance(known.find(constraint.digest()), BadRequest)
    with pytest.raises(BadRequest, match=said):
        known.get(constraint)
    known.close()


async def test_a_constraint_is_compiled_once_for_all_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling = create_autospec(GrammarTokenizer.compile, side_effect=GrammarTokenizer.compile)
    monkeypatch.setattr(GrammarTokenizer, "compile", compiling)
    known, constraint = grammars(), CONSTRAINTS["schema"]
    await asyncio.gather(*(known.prepare(constraint) for _ in range(5)))
    await known.prepare(constraint)
    assert known.get(constraint).constraint == constraint
    assert compiling.call_count == 1
    known.close()


async def test_a_grammar_in_use_is_found_however_many_came_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An item that waits for a step, or a running session, holds such a grammar."""
    monkeypatch.setattr("outrider.limits.GRAMMARS_MAX", 2)
    known = grammars()
    held = await known.prepare(CONSTRAINTS["regex"])
    matchers = Matchers(known)
    matchers.allowed_tokens("a", await known.prepare(CONSTRAINTS["schema"]), ())
    followed = CONSTRAINTS["schema"].digest()
    for index in range(3):
        await known.prepare(Constraint.of_regex(f"a{index}"))
    assert known.find(held.digest) is held
    assert known.find(followed) is not None
    matchers.release("a")
    for index in range(3):
        await known.prepare(Constraint.of_regex(f"a{index}"))
    assert known.find(followed) is None
    known.close()


async def test_tenants_share_neither_grammars_nor_refusals() -> None:
    known, regex = grammars(), CONSTRAINTS["regex"]
    first = await known.prepare(regex, "a")
    assert known.find(regex.digest(), "b") is None
    second = await known.prepare(regex, "b")
    known.note_slow(first)
    with pytest.raises(BadRequest, match="takes more than"):
        known.note_slow(first)
    assert isinstance(known.find(regex.digest(), "a"), BadRequest)
    assert known.find(regex.digest(), "b") is second
    known.close()


async def test_a_tenant_with_many_constraints_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many bytes of constraints wait is limited."""
    monkeypatch.setattr("outrider.limits.COMPILATION_BYTES_PER_TENANT_MAX", 56)
    monkeypatch.setattr("outrider.limits.COMPILATION_BYTES_MAX", 66)
    known = grammars()
    compiled = list[str]()

    def slow(constraint: Constraint, tenant: str) -> Any:
        time.sleep(0.01)
        compiled.append(constraint.text)

    monkeypatch.setattr(known, "_compile", slow)

    async def prepare(text: str, tenant: str) -> None:
        await known.prepare(Constraint.of_regex(text), tenant)

    waiting = [asyncio.ensure_future(prepare(f"a{index:02}", "a")) for index in range(20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="bytes of constraints await compilation for your tenant"):
        await prepare("a20", "a")
    await prepare("b", "b")
    assert len(compiled) < 19
    await asyncio.gather(*waiting)
    known.close()


async def test_the_largest_tenant_loses_its_grammars_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.limits.GRAMMAR_BYTES_MAX", 30)
    known = grammars()
    small = Constraint.of_regex("b")
    await known.prepare(small, "b")
    large = [Constraint.of_regex(f"a{index}aaaaaaaa") for index in range(5)]
    for one in large:
        await known.prepare(one, "a")
    assert [known.find(one.digest(), "a") is not None for one in large] == [0, 0, 0, 1, 1]
    assert known.find(small.digest(), "b") is not None
    known.close()


async def test_many_small_grammars_of_a_tenant_keep_out_no_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.limits.GRAMMARS_MAX", 4)
    known = grammars()
    for index in range(5):
        await known.prepare(Constraint.of_regex(f"a{index}"), "a")
    large = Constraint.of_regex("b" * 50)
    await known.prepare(large, "b")
    assert known.find(large.digest(), "b") is not None
    await known.prepare(Constraint.of_regex("a9"), "a")
    assert known.find(large.digest(), "b") is not None
    known.close()


async def test_no_session_waits_for_ever_for_what_others_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.limits.COMPILE_WAIT_S_MAX", 0.3)
    free, compiling = threading.Event(), GrammarTokenizer.compile

    def held(tokenizer: GrammarTokenizer, constraint: Constraint) -> Grammar:
        free.wait(10)
        return compiling(tokenizer, constraint)

    monkeypatch.setattr(GrammarTokenizer, "compile", held)
    known = grammars()
    for name in ("regex", "choice", "schema"):
        with pytest.raises(Overloaded, match="other constraints are being compiled; try later"):
            await known.prepare(CONSTRAINTS[name])
    await asyncio.sleep(0)  # A compilation that has not begun is given up.
    free.set()
    async with asyncio.timeout(10):
        while known.find(CONSTRAINTS["choice"].digest()) is None:
            await asyncio.sleep(0.01)
    assert known.find(CONSTRAINTS["schema"].digest()) is None  # It had not begun.
    known.close()


async def test_a_model_without_an_end_of_text_has_no_constraints() -> None:
    known = Grammars(lambda: GrammarTokenizer(hf_tokenizer(), ()))
    with pytest.raises(BadRequest, match="json_object: constraints need an end-of-text token"):
        await known.prepare(Constraint.any_object())
    known.close()
    with pytest.raises(ConfigError, match="tokenizer does not support constraints"):
        GrammarTokenizer(object(), (0,))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.of_regex(r"((a{0,100}){0,100}){0,100}"),
        Constraint.of_regex("|".join(f"(.{{0,{100 + i}}}x){{1,9}}" for i in range(400))),
        Constraint.of_choices([f"choice {i} " + "z" * 40 for i in range(1024)]),
        alike(1000, {"type": "array", "items": ITSELF}),
        alike(64, {"items": ITSELF}),
        Constraint.of_schema(
            {
                "properties": {
                    f"p{i}": {"type": "string", "pattern": f"[a-z]{{1,{i + 9}}}"}
                    for i in range(900)
                }
            }
        ),
    ],
)
def test_the_largest_constraints_take_less_than_what_is_allowed(constraint: Constraint) -> None:
    began = time.thread_time()
    with suppress(BadRequest, Incompatible):
        matcher = PrefixMatcher(tokens().compile(constraint), grammars())
        matcher.mask()
        for text in ("[[[[", '{"a":{"a":{"a":'):
            token_ids = hf_tokenizer().encode(text)
            for length in range(1, len(token_ids) + 1):
                before = time.thread_time()
                matcher.replace_from(0, token_ids[:length])
                matcher.mask()
                assert time.thread_time() - before < MASK_S_MAX
    assert time.thread_time() - began < COMPILE_S_MAX


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
    unions(1000, {"enum": ["a", "b", [1]]}),
    {
        "$defs": {"t": OBJECT, "u": {"$ref": "#/$defs/t"}},
        "anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/u"}] * (ALTERNATIVES_MAX // 2),
    },
    {"oneOf": [OBJECT] * ALTERNATIVES_MAX},
    {"$defs": {"a": of(40)}, "allOf": [{"$ref": "#/$defs/a"}], "description": "..."},
    {"$ref": "#/$defs/none", "anyOf": "none", "allOf": {"a": 3}, "type": 7, "enum": {}},
]
TOO_MANY = [
    {"anyOf": [LIST] * (LISTS_MAX + 1)},
    {"anyOf": [{"$ref": "#"}] * (LISTS_MAX + 1)},
    {"oneOf": [OBJECT] * (ALTERNATIVES_MAX + 1)},
    {"enum": [[index] for index in range(LISTS_MAX + 1)]},
    unions(LISTS_MAX // 2 + 1, TWO),
    {"anyOf": [of(LISTS_MAX // 2), of(LISTS_MAX // 2 + 1)]},
    {"allOf": [of(10), of(10)]},
    {"$defs": {"a": of(10)}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
    {"$defs": {"a": of(10)}, "$ref": "#/%24defs/a", "anyOf": of(10)["anyOf"]},
    {"anyOf": of(10)["anyOf"], "oneOf": of(10)["anyOf"]},
    {"allOf": [{"items": {"$ref": "#"}}, of(10)]},
]


@pytest.mark.parametrize("schema", USUAL)
def test_what_a_step_has_time_for_is_let_through(schema: dict[str, Any]) -> None:
    check_alternatives(schema, "json_schema")


@pytest.mark.parametrize("schema", TOO_MANY)
def test_more_is_refused_and_the_field_is_named(schema: dict[str, Any]) -> None:
    said = f"^json_schema: has too many .* allowed: {ALTERNATIVES_MAX}"
    with pytest.raises(BadRequest, match=said):
        check_alternatives(schema, "json_schema")


def test_references_that_lead_to_one_another_are_followed_so_far_and_no_further() -> None:
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, TWO]} for i in range(900)}
    with pytest.raises(BadRequest, match=r"^json_schema: has too many"):
        check_alternatives({"$defs": chain, "$ref": "#/$defs/d0"}, "json_schema")
