"""Texts as token ids, and where they come from.

file in `--corpus`          content
`.txt`, `.md`               one text
`.jsonl`, `.jsonl.gz`       a line each: `text`; or `prompt` and `answer` as token ids, with the
                            `temperature` at which the target wrote the answer
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, TypeAdapter

from outrider.errors import SettingError

HELD_OUT_EVERY = 32
"""One text in this many is held out, with all its pieces."""
_HELD_OUT_KEY = b"outrider distill: held out"
BEGINNING = 16
"""Tokens of an answer that distinguish it if its prompt does not. An answer that was cut off after
these is held out if the whole answer is."""
DOCUMENT_TOKENS_MAX = 1024
"""Longer texts are cut into pieces; a longer conversation loses its end."""
CORPUS_FILES_MAX = 100_000
_TEXTS = (".txt", ".md")
_SUFFIXES = (*_TEXTS, ".jsonl", ".jsonl.gz")
Array = npt.NDArray[Any]
Encode = Callable[[str], Sequence[int]]
"""Text to token ids."""


@dataclass(frozen=True, slots=True)
class Template:
    """The token ids around a user's turn; for a model without a template the beginning of a text,
    and no turn."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    """Up to the beginning of the answer; empty = there are no turns."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a piece of one. Tokens from `first` on are learned; those before are only read."""

    token_ids: Array
    first: int
    """At least 1, since nothing predicts the first token of a text."""
    answer_first: int
    """Measurement begins here, at `first` or later: in a conversation at the answer."""
    temperature: float | None
    """At which the target wrote the answer; None for a text by others."""
    is_held_out: bool = False
    """Whether it is measured on and not learned from."""
    is_given: bool = False
    """Whether it comes from `--corpus`."""

    @property
    def num_learned(self) -> int:
        return len(self.token_ids) - self.first

    @property
    def prompt(self) -> tuple[int, ...] | None:
        """The prompt of a conversation; None for a text by others."""
        if self.temperature is None:
            return None
        return tuple(self.token_ids[: self.answer_first].tolist())


def is_kept_back(token_ids: npt.ArrayLike) -> bool:
    """Whether a text of these tokens is held out. A keyed hash of the tokens alone decides, so that
    all runs hold out the same texts, and a drafter that is trained further is not measured on what
    it has learned."""
    data = np.asarray(token_ids, dtype="<i4").tobytes()
    digest = hashlib.blake2b(data, digest_size=8, key=_HELD_OUT_KEY).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_EVERY == 0


def conversation(
    prompt: Sequence[int],
    answer: Sequence[int],
    first: int,
    temperature: float,
    tokens_max: int,
) -> list[Document]:
    """A conversation that the target wrote, learned from token `first` of the prompt on; none if no
    part of the answer fits `tokens_max`. Whether it is held out depends on its prompt, since
    answers to one prompt are alike; or on its beginning, if the prompt has no tokens after `first`
    and may begin any text."""
    first = max(1, first)
    if len(prompt) >= tokens_max or not answer:
        return []
    token_ids = np.array([*prompt, *answer][:tokens_max], dtype=np.int32)
    held = is_kept_back(prompt if len(prompt) > first else [*prompt, *answer[:BEGINNING]])
    return [Document(token_ids, first, len(prompt), temperature, held)]


def shuffled(documents: Sequence[Document]) -> list[Document]:
    """In an order that depends on their number alone, so that a run that is short of time reads a
    fair sample."""
    order = np.random.default_rng(0).permutation(len(documents))
    return [documents[index] for index in order]


def corpus_files(directory: Path) -> list[Path]:
    """The files to read, sorted. Raises `SettingError` if there are none."""
    if not directory.is_dir():
        raise SettingError("corpus", f"{directory} is not a folder")
    found = sorted(
        path for path in directory.rglob("*") if path.is_file() and path.name.endswith(_SUFFIXES)
    )
    if not found or len(found) > CORPUS_FILES_MAX:
        raise SettingError(
            "corpus",
            f"{directory} holds {len(found)} files of {', '.join(_SUFFIXES)}; "
            f"1 to {CORPUS_FILES_MAX} are read",
        )
    return found


def read_corpus(
    paths: Sequence[Path],
    vocab_size: int,
    encode: Encode | None,
    tokens_max: int,
) -> list[Document]:
    """The texts of these files, in order, in pieces of at most `tokens_max` tokens. `encode` is
    None for a target without a tokenizer. Raises `SettingError` naming file and line."""
    found: list[Document] = []
    for path in paths:
        records = [*_records(path, vocab_size)]
        prompts = [record.prompt for record in records if isinstance(record, _Conversation)]
        # What all prompts begin with belongs to the template.
        first = len(os.path.commonprefix(prompts)) if prompts else 1  # noqa: RUF071 (lists of ids)
        for number, record in enumerate(records, start=1):
            if isinstance(record, _Text):
                place = path.name + ("" if path.name.endswith(_TEXTS) else f":{number}")
                found += _pieces(record.text, place, encode, tokens_max)
            else:
                found += conversation(
                    record.prompt, record.answer, first, record.temperature, tokens_max
                )
    return [replace(piece, is_given=True) for piece in found]


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class _Text(BaseModel):
    text: str


class _Conversation(BaseModel):
    prompt: TokenIds
    answer: TokenIds
    temperature: float


_RECORD: TypeAdapter[_Text | _Conversation] = TypeAdapter(_Text | _Conversation)


def _pieces(text: str, place: str, encode: Encode | None, tokens_max: int) -> list[Document]:
    if encode is None:
        raise SettingError("corpus", f"{place}: the target has no tokenizer, and takes no text")
    ids = np.array(encode(text), dtype=np.int32)
    pieces = [ids[start : start + tokens_max] for start in range(0, len(ids), tokens_max)]
    held = is_kept_back(ids)
    return [Document(piece, 1, 1, None, held) for piece in pieces if len(piece) > 1]


def _records(path: Path, vocab_size: int) -> Iterator[_Text | _Conversation]:
    opened: Any = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            if path.name.endswith(_TEXTS):
                yield _Text(text=lines.read())
                return
            for number, line in enumerate(lines, start=1):
                try:
                    record = _RECORD.validate_json(line, strict=True)
                    ids = [] if isinstance(record, _Text) else record.prompt + record.answer
                    if max(ids, default=0) >= vocab_size:
                        raise ValueError(f"{max(ids)} is not a token id")
                except ValueError as error:
                    raise SettingError(
                        "corpus",
                        f"{path}:{number}: a line has `text`, or `prompt` and `answer` as ids "
                        f"below {vocab_size} and `temperature`",
                    ) from error
                yield record
    except UnicodeDecodeError as error:
        raise SettingError("corpus", f"{path} is not UTF-8: {error.reason}") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SettingError("corpus", f"{path} cannot be read: {error}") from error
