"""Where prompts come from, and what a wrong file is told."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import prompts as module
from benchmarks.prompts import (
    CATEGORIES,
    BenchPrompt,
    built_in_prompts,
    parse_prompts,
    read_prompts,
    select_prompts,
)
from outrider.errors import ConfigError


def test_built_in_prompts_are_eight_of_each_category_and_all_different() -> None:
    """Those of the last three hold the text that they are about, and a task to rewrite names what
    is changed, which the text holds: one that changes nothing would be mere repetition."""
    prompts = built_in_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 8)
    assert len({prompt.text for prompt in prompts}) == 48
    assert tuple(dict.fromkeys(prompt.category for prompt in prompts)) == CATEGORIES
    for prompt in prompts:
        task, _, source = prompt.text.partition("\n\n")
        if prompt.category in ("rewrite", "summary", "extract"):
            assert 5 <= len(task.split()) <= 40
            assert 150 <= len(source.split()) <= 600
        if prompt.category == "rewrite":
            quoted = task.split('"')[1::2]
            assert len(quoted) == 2
            assert sum(source.count(words) > 0 for words in quoted) == 1


def test_a_file_keeps_order_skips_empty_lines_and_ignores_other_columns(tmp_path: Path) -> None:
    """A line separator inside a text, which JSON allows unescaped, does not end the line."""
    path = tmp_path / "own.jsonl"
    lines = [
        json.dumps({"prompt": "One\u2028line", "category": "a", "question_id": 81}),
        "   ",
        json.dumps({"prompt": "Zwei\u2028Wörter"}, ensure_ascii=False),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_prompts(path) == (
        BenchPrompt("One\u2028line", "a"),
        BenchPrompt("Zwei\u2028Wörter", "other"),
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "Invalid JSON"),
        ('{"prompt": "  "}', '"prompt": String should match'),
        ('{"prompt": "a", "max_tokens": 16385}', '"max_tokens": Input should be less than'),
        ('{"prompt": "half \\ud800"}', "Invalid JSON"),
        ('{"prompt": "a", "response_format": {"type": "xml"}}', "response_format: is wrong"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_what_is_allowed(line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_prompts('{"prompt": "fine"}\n' + line, "own.jsonl")
    assert "own.jsonl:2: " in caught.value.message
    assert reason in caught.value.message
    assert 'a JSON object with "prompt"' in caught.value.message


def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl: No such file"):
        read_prompts(tmp_path / "missing.jsonl")
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "Wörter"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(path)
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no prompts"):
        parse_prompts("\n\n", "empty.jsonl")
    monkeypatch.setattr(module, "PROMPTS_MAX", 3)
    with pytest.raises(ConfigError, match="more than 3 prompts"):
        parse_prompts('{"prompt": "a"}\n' * 4, "x")


@pytest.mark.parametrize(
    ("categories", "number", "expected"),
    [
        ("aabbabcc", 6, "a0 a1 b2 b3 c6 c7"),
        ("aaabbbccc", 5, "a0 a1 b3 b4 c6"),
        ("abc", 99, "a0 b1 c2"),
        ("aaab", 3, "a0 a1 b3"),
        ("aabbcc", 2, "a0 b2"),
    ],
)
def test_a_selection_has_as_many_of_each_category(
    categories: str, number: int, expected: str
) -> None:
    """The first ones. What cannot be divided goes to the first categories."""
    prompts = [BenchPrompt(f"{name}{place}", name) for place, name in enumerate(categories)]
    assert [prompt.text for prompt in select_prompts(prompts, number)] == expected.split()
