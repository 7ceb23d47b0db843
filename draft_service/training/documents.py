"""Texts as the token ids that a student learns from, and where they come from.

file in `--corpus`          what it is
`.txt`, `.md`               one text
`.jsonl`, `.jsonl.gz`       a line each: `text`; or `prompt` and `answer` as token ids, with the
                            `temperature` that the target wrote the answer at
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.errors import SettingError

HELD_OUT_EVERY: Final = 32
"""One text in so many is never learned from, with all its pieces: see `is_kept_back`."""
_HELD_OUT_KEY: Final = b"outrider distill: held out"
BEGINNING: Final = 16
"""Tokens of an answer that tell it from others where its prompt does not. No more are looked at, so
that one that was cut off behind them is held out as the whole one is."""
DOCUMENT_TOKENS_MAX: Final = 1024
"""Longer texts are cut into pieces; of a conversation that is longer the end is left out. Targets
may take less."""
CORPUS_FILES_MAX: Final = 100_000
_SUFFIXES: Final = (".txt", ".md", ".jsonl", ".jsonl.gz")
Encode = Callable[[str], Sequence[int]]
"""A text's token ids."""


@dataclass(frozen=True, slots=True)
class Template:
    """What surrounds a user's turn, as token ids; for a model without one, a text's beginning and
    no turn."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    """Up to where the answer begins; empty = there are no turns."""

    @property
    def num_bare(self) -> int:
        return max(1, 0 if self.after else len(self.before))


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a piece of one. Tokens from `first` on are learned; those before are only read."""

    token_ids: npt.NDArray[np.int32]
    first: int
    """At least 1: nothing says what begins a text."""
    answer_first: int
    """Where begins what is measured, at `first` or behind it: of a conversation the answer, for the
    target writes turns otherwise than answers."""
    temperature: float | None
    """That the target wrote the answer at; None for a text by others."""
    is_held_out: bool = False
    """Whether it is never learned from, but measured on."""

    @property
    def num_learned(self) -> int:
        return len(self.token_ids) - self.first

    @property
    def num_before_answer(self) -> int:
        return self.answer_first - self.first

    @property
    def prompt(self) -> tuple[int, ...] | None:
        """What a conversation's answer is to; None for a text by others."""
        if self.temperature is None:
            return None
        return tuple(self.token_ids[: self.answer_first].tolist())


def is_kept_back(token_ids: Sequence[int]) -> bool:
    """Whether a text of these tokens is held out: by a keyed hash of it and nothing else, so that
    every run holds out the same ones, whatever else there is to learn from, and a drafter that
    learns on is not measured on what it has learned."""
    data = np.asarray(token_ids, dtype="<i4").tobytes()
    digest = hashlib.blake2b(data, digest_size=8, key=_HELD_OUT_KEY).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_EVERY == 0


def conversation(
    prompt: Sequence[int],
    answer: Sequence[int],
    first: int,
    temperature: float,
    tokens_max: int,
    num_bare: int = 1,
) -> Document | None:
    """One that the target wrote, from `first` of the prompt on; None where nothing of the answer
    fits into `tokens_max`. It is held out by its prompt, for answers to the same one are alike; by
    its beginning where the prompt has `num_bare` tokens or fewer, which begin any text."""
    if len(prompt) >= tokens_max or not answer:
        return None
    token_ids = np.array([*prompt, *answer][:tokens_max], dtype=np.int32)
    held = is_kept_back(prompt if len(prompt) > num_bare else [*prompt, *answer[:BEGINNING]])
    return Document(token_ids, max(1, first), len(prompt), temperature, held)


def shuffled(texts: Sequence[Sequence[Document]]) -> list[Document]:
    """The pieces of these texts in an order that depends on their number alone, so that those that
    are read in time are a fair sample."""
    pieces = [piece for text in texts for piece in text]
    return [pieces[index] for index in np.random.default_rng(0).permutation(len(pieces))]


def fingerprint_of(documents: Sequence[Document]) -> str:
    """Of all that a target can be asked about these: every token, in order, and which of them are
    learned."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        digest.update(np.array([len(document.token_ids), document.first], np.int32).tobytes())
        digest.update(document.token_ids.tobytes())
    return digest.hexdigest()


def split_of(documents: Sequence[Document]) -> str:
    flags = bytes(document.is_held_out for document in documents)
    return hashlib.blake2b(flags, digest_size=8).hexdigest()


def corpus_files(directory: Path) -> list[Path]:
    """The files that are read, sorted. Raises `SettingError` where there are none."""
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
    num_bare: int = 1,
) -> list[list[Document]]:
    """The texts of these files, in order, in pieces of at most so many tokens. `encode` is None for
    a target without a tokenizer; `num_bare` as for `conversation`. Raises `SettingError` naming
    file and line."""
    found: list[list[Document]] = []
    for path in paths:
        if path.name.endswith((".txt", ".md")):
            found.append(_pieces(_text(path), path.name, encode, tokens_max))
            continue
        records = list(_records(path, vocab_size))
        first = _common_prefix([record["prompt"] for record in records if "prompt" in record])
        for number, record in enumerate(records, start=1):
            if "text" in record:
                place = f"{path.name}:{number}"
                found.append(_pieces(record["text"], place, encode, tokens_max))
            else:
                known = conversation(
                    record["prompt"],
                    record["answer"],
                    first,
                    float(record["temperature"]),
                    tokens_max,
                    num_bare,
                )
                found.append([] if known is None else [known])
    return [pieces for pieces in found if pieces]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError("corpus", f"{path} is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise SettingError("corpus", f"{path} cannot be read: {error}") from error


def _pieces(text: str, place: str, encode: Encode | None, tokens_max: int) -> list[Document]:
    if encode is None:
        raise SettingError("corpus", f"{place}: the target has no tokenizer, and takes no text")
    token_ids = encode(text)
    ids = np.array(token_ids, dtype=np.int32)
    pieces = [ids[start : start + tokens_max] for start in range(0, len(ids), tokens_max)]
    held = is_kept_back(token_ids)
    return [Document(piece, 1, 1, None, held) for piece in pieces if len(piece) > 1]


def _records(path: Path, vocab_size: int) -> Iterator[dict[str, Any]]:
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                record = json.loads(line)
                if not _is_record(record, vocab_size):
                    raise SettingError(
                        "corpus",
                        f"{path}:{number}: a line has `text`, or `prompt` and `answer` as ids "
                        f"below {vocab_size} and `temperature`",
                    )
                yield record
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SettingError("corpus", f"{path} cannot be read: {error}") from error


def _is_record(record: Any, vocab_size: int) -> bool:
    if not isinstance(record, dict):
        return False
    if "text" in record:
        return isinstance(record["text"], str)
    parts = [record.get("prompt"), record.get("answer")]
    if not isinstance(record.get("temperature"), (int, float)):
        return False
    return all(
        isinstance(part, list)
        and len(part) > 0
        and all(type(v) is int and 0 <= v < vocab_size for v in part)
        for part in parts
    )


def _common_prefix(prompts: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with: a template's, which nobody wrote."""
    if len(prompts) < 2:
        return len(prompts[0]) if prompts else 1
    low, high = min(prompts), max(prompts)
    pairs = zip(low, high, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(low), len(high)))
