"""Files that survive a kill, complete or absent, and the time that each stage has taken so far."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.drafters.names import EAGLE3
from outrider.errors import ConfigError, SettingError
from outrider.files import locked
from outrider.models.drafter_checkpoint import (
    CONFIG_FILE,
    DESCRIPTION_FILE,
    WEIGHTS_FILE,
    is_trained_drafter,
)
from outrider.models.published_drafters import read_config

CARD_FILE = "README.md"
MADE_HERE = "Made by `outrider distill`"
"""Text on every card."""
CACHE_VERSION = 3
"""Incremented when the content of a folder changes; results of older versions are not used."""
_DRAFTER_FILES = {CONFIG_FILE, DESCRIPTION_FILE, WEIGHTS_FILE, CARD_FILE, "loss.svg"}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then replaces `path`: readers find the complete new file or the old
    one."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Keeps other runs out of the directory. Raises `ConfigError` if one is in progress."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with locked(directory / "lock", wait=False):
            yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another `outrider distill` of this target is at work in {directory}; wait until "
            "it is done, or set OUTRIDER_CACHE to another folder"
        ) from error


def folder_name(kind: str, *parts: object) -> str:
    """The name of a folder whose content depends on these parts, by their `repr`, and on nothing
    else."""
    key = hashlib.blake2b(repr((CACHE_VERSION, *parts)).encode(), digest_size=8).hexdigest()
    return f"{kind}-{key}"


class Stopwatch:
    """Seconds of work, including earlier runs."""

    def __init__(self, directory: Path | None, before: float = 0.0) -> None:
        """With a directory, the time is stored there beside the results."""
        self._path: Path | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._path = directory / "spent.json"
            before = json.loads(self._path.read_text()) if self._path.exists() else 0.0
        self._before = before
        self._start: float | None = None

    @property
    def seconds(self) -> float:
        running = 0.0 if self._start is None else time.monotonic() - self._start
        return self._before + running

    @contextmanager
    def working(self) -> Iterator[None]:
        self._start = time.monotonic()
        try:
            yield
        finally:
            self._before, self._start = self.seconds, None
            self.save()

    def save(self) -> None:
        """Stores the time for the next run, in case this one is killed."""
        if self._path is not None:
            with replacing(self._path) as partial:
                partial.write_text(json.dumps(round(self.seconds, 3)))


def check_out(out: Path) -> Path:
    """The directory with links resolved. Raises `SettingError` unless a drafter can be written
    there, which is tried, and only an earlier drafter would be lost."""
    try:
        out = out.resolve()
        if out.exists():
            names = {path.name for path in out.iterdir()} if out.is_dir() else set()
            if not out.is_dir() or (names and not _holds_drafter(out)):
                raise SettingError(
                    "out", f"{out} exists and contains no drafter made by `outrider distill`"
                )
            if others := names - _DRAFTER_FILES:
                raise SettingError(
                    "out", f"{out} holds {min(others)} beside a drafter, so it is not replaced"
                )
        out.parent.mkdir(parents=True, exist_ok=True)
        with _beside(out):
            return out
    except (OSError, RuntimeError) as error:
        raise SettingError("out", f"{out}: no drafter can be written there: {error}") from error


@contextmanager
def filled(out: Path) -> Iterator[Path]:
    """An empty directory, which then replaces `out`. The old content stays until then; after a kill
    in between it is in `.NAME.*/before`. Raises `SettingError`."""
    try:
        with _beside(out) as work:
            new, before = Path(work, "new"), Path(work, "before")
            new.mkdir()
            yield new
            check_out(out)
            if out.exists():
                out.rename(before)
            try:
                new.rename(out)
            except OSError:
                if before.exists():
                    before.rename(out)
                raise
    except OSError as error:
        raise SettingError("out", f"{out}: no drafter could be written there: {error}") from error


def _holds_drafter(directory: Path) -> bool:
    """Whether the directory has a drafter made by this command. A head in the form of speculators
    is recognised by its card."""
    try:
        is_head = read_config(directory).get("speculators_model_type") == EAGLE3 and MADE_HERE in (
            directory / CARD_FILE
        ).read_text("utf-8")
    except (OSError, ValueError):
        is_head = False
    return is_head or is_trained_drafter(directory)


def _beside(out: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
