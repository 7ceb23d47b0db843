"""The tables that commands print, and how they fit a terminal."""

from typing import Any

import pytest

from outrider.bench.report import DataTable, Report, table
from tests.support.command_lines import printed


def at_width(width: int, part: Any) -> list[str]:
    text = printed(part, width=width)
    assert "…" not in text
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def cells_of(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [30, 40, 80, 160])
def test_a_table_shows_every_cell_at_every_width(width: int) -> None:
    names = [f"figure_{number}_tokens_per_second" for number in range(12)]
    rows = [
        {"way": f"a head on {row} devices"}
        | {name: row * 1000 + place + 0.125 for place, name in enumerate(names)}
        for row in range(3)
    ]
    shown = cells_of(at_width(width, table("A title", rows)))
    assert shown.startswith("A title")
    for row in rows:
        assert all(f"{row[name]:.3f}" in shown for name in names)


def test_a_table_that_fits_is_one_table() -> None:
    rows = [{"way": "a", "first": 1, "second": 2.0, "third": None}]
    title, names, _, values = (line.split() for line in at_width(80, table("T", rows)))
    assert (title, names) == (["T"], ["way", "first", "second", "third"])
    assert values == ["a", "1", "2.000", "-"]


def test_a_table_that_does_not_fit_continues_below_and_repeats_its_first_column() -> None:
    rows = [{"way": "one", "first": "1" * 20, "second": "2" * 20}]
    lines = [line.split() for line in at_width(30, table("T", rows))]
    assert [line[0] for line in lines if line].count("one") == 2
    assert ["one", "1" * 20] in lines
    assert ["one", "2" * 20] in lines


def test_each_part_of_a_table_has_all_columns_that_name_a_row() -> None:
    rows = [{"rule": "token", "K": k, "first": "1" * 20, "second": f"{k}" * 20} for k in (3, 4)]
    lines = [line.split() for line in at_width(36, table("T", rows, num_keys=2))]
    assert ["token", "4", "1" * 20] in lines
    assert ["token", "4", "4" * 20] in lines


def test_equal_rows_of_a_table_without_a_joined_column_all_appear() -> None:
    assert len(table("T", [{"way": "a", "value": 1}] * 2).rows) == 2


def test_a_cell_that_is_wider_than_the_terminal_is_folded() -> None:
    letters = "".join(chr(ord("a") + place % 26) for place in range(150))
    lines = at_width(40, table("T", [{"figure": letters, "value": letters[::-1]}]))
    folded = "".join("".join(line.split()) for line in lines)
    assert len(folded) - len("Tfigurevalue") == 2 * len(letters) + sum("─" in one for one in folded)


def test_text_with_brackets_is_shown_as_it_is() -> None:
    assert "[bold]x" in cells_of(at_width(80, table("[red]", [{"way": "[bold]x", "a": "[b]"}])))


def test_rows_that_differ_only_in_the_joined_column_are_one_row() -> None:
    rows = [
        {"prompts": group, "rule": rule, "chance": chance}
        for group, rule, chance in (
            ("all", "token", 0.5),
            ("all", "block", 0.5),
            ("all", "coupled", 0.25),
            ("code", "token", 0.5),
        )
    ]
    found = table("T", rows, joined="rule", bold=2)
    assert found.rows == [
        ["all", "token, block", "0.500"],
        ["all", "coupled", "0.250"],
        ["code", "token", "0.500"],
    ]
    assert found.bold == 1


def test_a_report_of_figures_names_each() -> None:
    values = {"num_rounds": 3, "parts_ms": {"draft": 1.5, "verify": None}}
    [shown] = Report.of("rounds", values).shown
    assert isinstance(shown, DataTable)
    assert shown.rows == [["num rounds", "3"], ["parts ms: draft", "1.500"]]
