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

WITH_SOURCE = ("rewrite", "summary", "extract")


def test_built_in_prompts_are_eight_of_each_category_and_all_different() -> None:
    prompts = built_in_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 8)
    assert len({prompt.text for prompt in prompts}) == 48
    assert tuple(dict.fromkeys(prompt.category for prompt in prompts)) == CATEGORIES


@pytest.mark.parametrize("category", WITH_SOURCE)
def test_source_texts_have_150_to_600_words(category: str) -> None:
    for prompt in built_in_prompts():
        if prompt.category == category:
            task, _, source = prompt.text.partition("\n\n")
            assert 5 <= len(task.split()) <= 40
            assert 150 <= len(source.split()) <= 600


def test_rewrite_tasks_name_what_is_changed_and_the_source_holds_it() -> None:
    """A task that changes nothing would be mere repetition, and the words to look for are quoted
    in it."""
    for prompt in built_in_prompts():
        if prompt.category == "rewrite":
            task, _, source = prompt.text.partition("\n\n")
            quoted = task.split('"')[1::2]
            assert len(quoted) == 2
            assert sum(source.count(words) > 0 for words in quoted) == 1


def test_a_file_keeps_order_skips_empty_lines_and_ignores_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = [
        json.dumps({"prompt": "One\u2028line", "category": "a", "question_id": 81}),
        "   ",
        json.dumps({"prompt": "Zwei Wörter"}, ensure_ascii=False),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_prompts(path) == (
        BenchPrompt("One\u2028line", "a"),
        BenchPrompt("Zwei Wörter", "other"),
    )


def test_a_line_separator_inside_a_text_does_not_end_the_line() -> None:
    """JSON allows U+2028 unescaped, and Python's splitlines would cut there."""
    assert parse_prompts('{"prompt": "a\u2028b"}', "x") == (BenchPrompt("a\u2028b", "other"),)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('["prompt"]', "is no object"),
        ("{}", '"prompt" is missing'),
        ('{"prompt": ""}', '"prompt" is missing or no text'),
        ('{"prompt": "  "}', '"prompt" is missing or no text'),
        ('{"prompt": 3}', '"prompt" is missing or no text'),
        ('{"prompt": "a", "max_tokens": 0}', '"max_tokens" is 0; a line is'),
        ('{"prompt": "a", "max_tokens": 16385}', '"max_tokens" is 16385; a line is'),
        ('{"prompt": "a", "max_tokens": true}', '"max_tokens" is True; a line is'),
        ('{"prompt": "a", "max_tokens": "9"}', "\"max_tokens\" is '9'; a line is"),
        ('{"prompt": "a", "category": null}', '"category" is missing or no text'),
        ('{"prompt": "a", "category": ["x"]}', '"category" is missing or no text'),
        ('{"prompt": "half \\ud800"}', "half a character"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_what_is_allowed(line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_prompts('{"prompt": "fine"}\n' + line, "own.jsonl")
    assert "own.jsonl:2: " in caught.value.message
    assert reason in caught.value.message
    assert 'a JSON object with "prompt"' in caught.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl: No such file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "Wörter"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(latin)


def test_a_file_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no prompts"):
        parse_prompts("\n\n", "empty.jsonl")


def test_limits_of_a_file_hold_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"prompt": "a"}\n'
    monkeypatch.setattr(module, "PROMPTS_MAX", 3)
    assert len(parse_prompts(line * 3, "x")) == 3
    with pytest.raises(ConfigError, match="more than 3 prompts"):
        parse_prompts(line * 4, "x")
    path = tmp_path / "sized.jsonl"
    path.write_text(line)
    monkeypatch.setattr(module, "PROMPT_FILE_BYTES_MAX", len(line))
    assert len(read_prompts(path)) == 1
    monkeypatch.setattr(module, "PROMPT_FILE_BYTES_MAX", len(line) - 1)
    with pytest.raises(ConfigError, match=f"at most {len(line) - 1} are allowed"):
        read_prompts(path)


def prompts_of(categories: str) -> list[BenchPrompt]:
    return [BenchPrompt(f"{name}{place}", name) for place, name in enumerate(categories)]


def test_selection_takes_the_first_of_each_category() -> None:
    chosen = select_prompts(prompts_of("aabbabcc"), 6)
    assert [prompt.text for prompt in chosen] == ["a0", "a1", "b2", "b3", "c6", "c7"]


def test_selection_gives_the_rest_to_the_first_categories() -> None:
    chosen = select_prompts(prompts_of("aaabbbccc"), 5)
    assert [prompt.text for prompt in chosen] == ["a0", "a1", "b3", "b4", "c6"]


def test_selection_of_more_than_there_are_takes_all() -> None:
    prompts = prompts_of("abc")
    assert select_prompts(prompts, 99) == tuple(prompts)


def test_selection_of_fewer_than_there_are_categories_takes_the_first_of_them() -> None:
    chosen = select_prompts(prompts_of("aabbcc"), 2)
    assert [prompt.text for prompt in chosen] == ["a0", "b2"]
    assert [prompt.text for prompt in select_prompts(prompts_of("aabbcc"), 1)] == ["a0"]
