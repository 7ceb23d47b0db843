"""Mutants as changes of lines, which are found again where code has moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import __main__ as running
from tests.mutants.areas import AREAS, Area, Mutant

BEFORE = "a = 1\nif a > 0:\n    a += 1\nb = 2\n"
AFTER = BEFORE.replace("> 0", ">= 0")


def mutant(before: str = BEFORE, after: str = AFTER) -> Mutant:
    return Mutant.between("core", Path("code.py"), "core/Some", before, after)


def test_a_mutant_is_found_where_its_lines_have_moved() -> None:
    found = mutant()
    assert (found.line, found.before, found.after) == (2, ("if a > 0:",), ("if a >= 0:",))
    assert Mutant.from_json(found.to_json()) == found
    assert found.applied(BEFORE) == AFTER
    assert found.applied("# moved\n" + BEFORE) == "# moved\n" + AFTER
    assert found.applied(BEFORE.replace("a > 0", "a > 9")) is None
    assert found.applied("c = 0\n" + BEFORE + BEFORE) is None  # Either of two, and neither there.
    assert found.applied(BEFORE + BEFORE) == AFTER + BEFORE


def test_what_the_tests_catch_is_told_from_what_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an area whose tests see one of its lines."""
    root = tmp_path / "root"
    root.mkdir()
    source = "def twice(x):\n    return 2 * x\n\n\ndef spare(x):\n    return x\n"
    (root / "code.py").write_text(source)
    monkeypatch.setattr(running, "_COPIED", ("code.py",))
    monkeypatch.setattr(
        running, "_passes", lambda _, copy: "2 * x" in (copy / "code.py").read_text()
    )
    monkeypatch.setitem(AREAS, "core", Area(("code.py",), ("tests",)))
    caught = mutant(source, source.replace("2 * x", "3 * x"))
    mutants = [
        caught,
        mutant(source, source.replace("return x", "return -x")),
        mutant("gone = 1\n", "gone = 2\n"),
        replace(caught, file="before_it_moved.py"),
    ]
    found = running.run(mutants, root, tmp_path / "copies", workers=1)
    assert [one["outcome"] for one in found] == ["caught", "survived", "missing", "caught"]
    assert (root / "code.py").read_text() == source
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(capsys.readouterr().out)
    assert running._compared(found, earlier) == 0
    assert running._compared([{**found[0], "outcome": "survived"}], earlier) == 1
    assert "caught before, and not now" in capsys.readouterr().err
