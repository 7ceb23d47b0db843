"""Texts as token ids, and the files that they come from.

file in `--corpus`   content
`.txt`, `.md`        one text
`.jsonl`             one text in each line: an object with the key `text`"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from outrider.errors import SettingError

HELD_OUT_EVERY = 32
_HELD_OUT_KEY = b"outrider distill: held out"
DOCUMENT_TOKENS_MAX = 1024  # Longer texts are split. Written training texts are never longer.
CORPUS_FILES_MAX = 100_000
_SUFFIXES = (".txt", ".md", ".jsonl")
Array = npt.NDArray[Any]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Template:
    """The token ids before and after a user's turn. For a model without a template, `before` has
    the tokens that begin every text (BOS, if any), and `after` is empty."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a piece of a text. The drafter learns the tokens from index `first` on."""

    token_ids: Array
    first: int  # at least 1, because nothing predicts the first token of a text
    answer_first: int  # where the target's answer begins; `first` for a text from `--corpus`
    temperature: float | None  # of the target's answer; None for a text from `--corpus`
    is_held_out: bool = False

    @property
    def num_learned(self) -> int:
        return len(self.token_ids) - self.first

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.token_ids[: self.answer_first].tolist())


def is_kept_back(token_ids: npt.ArrayLike) -> bool:
    """Whether a text of these tokens is held out. A keyed hash decides, so all runs hold out the
    same texts. If a later run trains a drafter further, the drafter still learns none of them."""
    data = np.asarray(token_ids, dtype="<i4").tobytes()
    digest = hashlib.blake2b(data, digest_size=8, key=_HELD_OUT_KEY).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_EVERY == 0


def shuffled(documents: Sequence[Document]) -> list[Document]:
    """Returns the documents in a random order that depends only on their number. So the documents
    that the target reads in a limited time are a fair sample. The first returned document is always
    held out, so that there is at least one document to measure the drafter with."""
    permuted = [documents[index] for index in np.random.default_rng(0).permutation(len(documents))]
    chosen = next((i for i, document in enumerate(permuted) if document.is_held_out), 0)
    return [replace(permuted.pop(chosen), is_held_out=True), *permuted] if permuted else []


def corpus_files(directory: Path) -> tuple[Path, ...]:
    """Returns the files to read. Raises `SettingError` if there are none or too many."""
    if not directory.is_dir():
        raise SettingError("corpus", f"{directory} is not a folder")
    paths = sorted(directory.rglob("*"))
    files = tuple(path for path in paths if path.is_file() and path.suffix in _SUFFIXES)
    if not files or len(files) > CORPUS_FILES_MAX:
        raise SettingError(
            "corpus",
            f"{directory} holds {len(files)} files of {', '.join(_SUFFIXES)}; "
            f"1 to {CORPUS_FILES_MAX} are allowed",
        )
    return files


def read_corpus(paths: Sequence[Path], encode: Encode | None, tokens_max: int) -> list[Document]:
    """Returns the texts of these files in pieces of at most `tokens_max` tokens. Raises
    `SettingError` if a file cannot be read, and for any text if `encode` is None."""
    documents: list[Document] = []
    for text in (text for path in paths for text in _texts(path)):
        if encode is None:
            raise SettingError("corpus", "cannot be used: the target has no tokenizer")
        ids = np.array(encode(text), dtype=np.int32)
        pieces = [ids[start : start + tokens_max] for start in range(0, len(ids), tokens_max)]
        held = is_kept_back(ids)
        documents += [Document(piece, 1, 1, None, held) for piece in pieces if len(piece) > 1]
    return documents


class _Line(BaseModel):
    text: str


def _texts(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("corpus", f"{path} cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.rstrip("\n").split("\n"), start=1):
        try:
            yield _Line.model_validate_json(line, strict=True).text
        except ValueError as error:
            raise SettingError(
                "corpus", f"{path}:{number}: must be an object with a string `text`"
            ) from error
