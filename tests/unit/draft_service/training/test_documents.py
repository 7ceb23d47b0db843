"""Texts that are given: what is read, and what is held out."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from draft_service.training.documents import Document, corpus_files, read_corpus, shuffled
from outrider.errors import SettingError


def write(path: Path, *records: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)))


def read(directory: Path) -> list[Document]:
    """Reads texts with a token for each character."""
    return read_corpus(corpus_files(directory), lambda text: list(map(ord, text)), 12)


def test_a_folder_of_texts_is_read(tmp_path: Path) -> None:
    """Long texts are cut into pieces. No piece has one token only."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("x" * 25)
    (tmp_path / "c.txt").write_text("x" * 7)
    (tmp_path / "ignored.py").write_text("x")
    write(tmp_path / "a.jsonl", {"text": "xy"}, {"text": ""}, {"text": "x" * 14})
    found = read(tmp_path)
    assert [len(document.token_ids) for document in found] == [2, 12, 2, 7, 12, 12]
    assert {(one.first, one.answer_first, one.temperature) for one in found} == {(1, 1, None)}


def texts(directory: Path, numbers: range) -> list[list[Document]]:
    """The pieces of each of these texts."""
    records = [{"text": f"{number} " * (1 + 5 * (number % 4))} for number in numbers]
    write(directory / "a.jsonl", *records)
    found = iter(read(directory))
    sizes = [-(-(len(record["text"]) - 1) // 12) for record in records]
    return [list(islice(found, size)) for size in sizes]


def test_texts_are_held_out_whole_and_for_ever(tmp_path: Path) -> None:
    """One text in 32 is held out. Of 1,000, 31 +- 5.5 are expected, and the key fixes the result. A
    corpus that has grown holds out no text that was learned before."""
    first = texts(tmp_path / "first", range(1000))
    assert all(len({piece.is_held_out for piece in pieces}) == 1 for pieces in first)
    assert any(len(pieces) > 1 and pieces[0].is_held_out for pieces in first)
    assert 20 <= sum(pieces[0].is_held_out for pieces in first) <= 42
    pieces = [piece for pieces in first for piece in pieces]
    known = {piece.token_ids.tobytes(): piece.is_held_out for piece in pieces}
    for piece in (
        piece for pieces in texts(tmp_path / "new", range(600, 1072)) for piece in pieces
    ):
        assert known.get(piece.token_ids.tobytes(), piece.is_held_out) == piece.is_held_out
    found, learned = shuffled(pieces), [piece for piece in pieces if not piece.is_held_out]
    read = [piece.token_ids.tobytes() for piece in found]
    assert sorted(read) == sorted(piece.token_ids.tobytes() for piece in pieces)
    assert read != [piece.token_ids.tobytes() for piece in pieces]
    assert found[0].is_held_out
    assert [piece.is_held_out for piece in shuffled(learned)[:3]] == [True, False, False]
    assert shuffled([]) == []


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="holds 0 files"):
        corpus_files(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SettingError, match="no tokenizer") as bad:
        read_corpus(corpus_files(tmp_path), None, 10)
    assert bad.value.key == "corpus"
    write(tmp_path / "a.jsonl", {"text": ""}, {"text": 5})
    with pytest.raises(SettingError, match=r"a\.jsonl:2: must be an object with a string `text`"):
        read(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"\xff")
    with pytest.raises(SettingError, match=r"a\.jsonl cannot be read: .* decode"):
        read(tmp_path)
