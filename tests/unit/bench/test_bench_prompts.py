"""The prompts of benchmarks, and the limits of their options."""

import json
from collections import Counter
from pathlib import Path

import pytest

from outrider.bench.prompts import CATEGORIES, BenchPrompt, read_prompts, select_prompts
from outrider.errors import ConfigError
from tests.support.command_lines import refusal


def test_built_in_prompts_are_eight_of_each_category_and_all_different() -> None:
    prompts = read_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 8)
    assert len({prompt.text for prompt in prompts}) == 48
    assert tuple(dict.fromkeys(prompt.category for prompt in prompts)) == CATEGORIES
    for prompt in prompts:
        if prompt.category in ("rewrite", "summary", "extract"):
            assert len(prompt.text.partition("\n\n")[2].split()) >= 150


def test_a_file_keeps_order_skips_empty_lines_and_ignores_other_columns(tmp_path: Path) -> None:
    """JSON allows unescaped line separators within a string. They do not end the line."""
    path = tmp_path / "own.jsonl"
    first = json.dumps({"prompt": "One\u2028line", "category": "a", "question_id": 81})
    second = json.dumps({"prompt": "Zwei\u2028Wörter"}, ensure_ascii=False)
    path.write_text(f"{first}\n   \n{second}\n", encoding="utf-8")
    expected = (BenchPrompt("One\u2028line", "a"), BenchPrompt("Zwei\u2028Wörter", "other"))
    assert read_prompts(path) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "Invalid JSON"),
        ('{"prompt": "  "}', '"prompt": String should match'),
        ('{"prompt": "a", "max_tokens": 16385}', '"max_tokens": Input should be less than'),
    ],
)
def test_a_wrong_line_is_named_with_what_is_allowed(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert "own.jsonl:2: " in caught.value.message
    assert reason in caught.value.message
    assert 'a JSON object with "prompt"' in caught.value.message


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "Wörter"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cannot read .*'utf-8' codec"):
        read_prompts(path)
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match=r"latin\.jsonl has no prompts"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("categories", "number", "expected"),
    [("aabbabcc", 6, "a0 a1 b2 b3 c6 c7"), ("aaab", 3, "a0 a1 b3"), ("aabbcc", 2, "a0 b2")],
)
def test_a_selection_has_as_many_of_each_kind(categories: str, number: int, expected: str) -> None:
    prompts = [BenchPrompt(f"{name}{place}", name) for place, name in enumerate(categories)]
    assert [prompt.text for prompt in select_prompts(prompts, number)] == expected.split()


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [
        ("speedup", "num-prompts", "100001"),
        ("speedup", "temperature", "nan"),
        ("speedup", "rule", "greedy"),
        ("peers", "concurrency", "4,4097"),
        ("overhead", "parts", "rounds,all"),
    ],
)
def test_a_wrong_value_of_an_option_is_named(
    name: str, option: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = f"error: --{option}: {wrong!r} is wrong; it must be "
    assert error in refusal(capsys, "bench", name, f"--{option}", wrong)
