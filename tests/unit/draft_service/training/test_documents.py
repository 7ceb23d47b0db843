"""Given texts: what is read, and what of it is held out."""

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from draft_service.training.documents import Document, corpus_files, read_corpus, shuffled
from outrider.errors import SettingError


def write_conversations(path: Path, *records: Any) -> Path:
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, records)))
    return path


def test_a_folder_of_texts_and_conversations_is_read(tmp_path: Path) -> None:
    """Long texts in pieces; the common beginning of all prompts is not learned, and what does not
    fit is dropped."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("x" * 25)
    (tmp_path / "ignored.py").write_text("x")
    write_conversations(
        tmp_path / "a.jsonl.gz",
        {"prompt": [1, 2, 3, 4], "answer": [5] * 20, "temperature": 0},
        {"prompt": [1, 2, 9, 9], "answer": [6], "temperature": 1.0},
        {"prompt": [1] * 10, "answer": [6], "temperature": 1.0},
    )
    files = corpus_files(tmp_path)
    found = read_corpus(files, 50, lambda text: [7] * len(text), 10)
    assert [len(document.token_ids) for document in found] == [10, 5, 10, 10, 5]
    assert [document.first for document in found] == [1, 1, 1, 1, 1]
    assert [document.temperature for document in found] == [0.0, 1.0, None, None, None]
    write_conversations(
        tmp_path / "a.jsonl.gz",
        {"prompt": [1, 2, 3, 4], "answer": [5, 5], "temperature": 0},
        {"prompt": [1, 2, 9, 9], "answer": [6], "temperature": 1.0},
    )
    found = read_corpus(files[:1], 50, None, 10)
    assert [(document.first, document.answer_first) for document in found] == [(2, 4), (2, 4)]


def read(directory: Path, numbers: range) -> list[list[Document]]:
    """A corpus for these numbers: texts of up to four pieces, and conversations with three answers
    to each prompt."""
    directory.mkdir()
    texts = [{"text": f"{number} " * (1 + 5 * (number % 4))} for number in numbers]
    conversations = [
        {"prompt": [1, 2 + number // 40, 2 + number % 40], "answer": [answer] * 9, "temperature": 1}
        for number in numbers
        for answer in range(3)
    ]
    for name, records in (("a.jsonl", texts), ("b.jsonl", conversations)):
        (directory / name).write_text("\n".join(map(json.dumps, records)))
    found = iter(read_corpus(corpus_files(directory), 50, lambda text: list(map(ord, text)), 12))
    # A last piece of one token is left out.
    sizes = [-(-(len(record["text"]) - 1) // 12) for record in texts]
    pieces = [list(islice(found, size)) for size in sizes]
    return [*pieces, *([document] for document in found)]


def test_texts_are_held_out_whole_and_for_ever(tmp_path: Path) -> None:
    """With all pieces, and conversations with all answers to a prompt: one in 32 (of 1,000, 31 +-
    5.5 expected; the result is fixed by the key). A corpus that has grown holds out nothing that
    was learned before."""
    texts = read(tmp_path / "first", range(1000))
    assert all(len({piece.is_held_out for piece in pieces}) == 1 for pieces in texts)
    assert any(len(pieces) > 1 and pieces[0].is_held_out for pieces in texts)
    by_prompt = {(document.prompt, document.is_held_out) for [document] in texts[1000:]}
    assert (len(by_prompt), len(texts)) == (1000, 4000)
    for kind in (texts[:1000], texts[1000::3]):
        assert 20 <= sum(pieces[0].is_held_out for pieces in kind) <= 42
    known = {piece.token_ids.tobytes(): piece.is_held_out for pieces in texts for piece in pieces}
    for pieces in read(tmp_path / "grown", range(600, 1072)):
        for piece in pieces:
            held_out = known.get(piece.token_ids.tobytes(), piece.is_held_out)
            assert held_out == piece.is_held_out
    pieces = [piece for pieces in texts for piece in pieces]
    found = shuffled(pieces)
    assert sorted(map(id, found)) == sorted(map(id, pieces))
    assert list(map(id, found)) != list(map(id, pieces))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [1], "answer": [50], "temperature": 1},
        {"prompt": [1], "answer": [5]},
        {"text": 5},
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, record: Any) -> None:
    path = write_conversations(tmp_path / "a.jsonl.gz", {"text": ""}, record)
    with pytest.raises(SettingError, match=r"a\.jsonl\.gz:2: ") as bad:
        read_corpus([path], 50, lambda text: [1], 10)
    assert bad.value.key == "corpus"


def test_folders_without_texts_and_texts_without_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="holds 0 files"):
        corpus_files(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SettingError, match="no tokenizer"):
        read_corpus(corpus_files(tmp_path), 50, None, 10)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(SettingError, match="not UTF-8"):
        read_corpus(corpus_files(tmp_path), 50, lambda text: [1], 10)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "a.jsonl.gz", *[{"text": str(i**9)} for i in range(99)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SettingError, match=r"a\.jsonl\.gz cannot be read") as bad:
        read_corpus([path], 50, lambda text: [1, 2], 10)
    assert bad.value.key == "corpus"
