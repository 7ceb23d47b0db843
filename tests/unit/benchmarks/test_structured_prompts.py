"""What the measurement of structured output asks for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from constrained import tokens

from benchmarks.structured import Mode, ModeReport, _asked, _is_valid, _missed
from benchmarks.structured_prompts import TASKS
from outrider.grammar.constraint import Constraint


def asked(**options: Any) -> list[tuple[dict[str, Any], str]]:
    given = {"prompts": None, "prompts_per_schema": 20} | options
    return list(_asked(argparse.Namespace(**given)))


def test_there_are_two_hundred_prompts_over_ten_schemas_that_can_be_met() -> None:
    assert len(TASKS) == 10
    assert len(set(map(str, asked()))) == 200
    assert len(asked(prompts_per_schema=2)) == 20
    for task in TASKS:
        jsonschema.Draft202012Validator.check_schema(task.schema)
        tokens().compile(Constraint.of_schema(task.schema))


def test_others_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"schema": {"type": "object"}, "prompt": "a"}\n\n')
    assert asked(prompts=file) == [({"type": "object"}, "a")]
    for line in ("{}", "[]", "x", '{"schema": 1, "prompt": "a"}'):
        file.write_text(line)
        with pytest.raises(SystemExit, match="line 1 is no JSON object"):
            asked(prompts=file)


def test_what_is_not_of_the_schema_is_not_valid() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"format": "date"}}}
    assert _is_valid(schema, '{"a": "2026-11-22"}')
    for text in ("{}", '{"a": 1}{', '{"a": "2026-13-22"}'):
        assert not _is_valid(schema, text)


def report(*, masks: bool = True, **numbers: int) -> ModeReport:
    """Of 200 prompts, at the very edge of what must be."""
    given = {"num_ended": 140, "num_valid": 140, "num_draft_tokens": 100, "num_accepted": 30}
    return ModeReport(
        mode=Mode("token", 4, draft_masks=masks), num_prompts=200,
        mean_acceptance_length=2.0, invalid=(), **(given | numbers),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([report(), report(masks=False)], []),
        ([report(num_accepted=0)], []),
        ([report(num_valid=139)], ["token K=4 masks=both: 1 ended and are not valid"]),
        (
            [report(masks=False, num_ended=139, num_valid=139)],
            ["token K=4 masks=target: 0.695 ended, less than 0.7"],
        ),
        (
            [report(num_accepted=29), report(masks=False)],
            ["token K=4: acceptance 0.290 with both masks, 0.300 with the target's alone"],
        ),
    ],
)
def test_what_is_not_as_it_must_be_is_told(reports: list[ModeReport], said: list[str]) -> None:
    assert _missed(reports) == said
