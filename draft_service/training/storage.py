"""Writes files so that a killed `outrider distill` leaves no incomplete file, and times stages."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ConfigError, SettingError
from outrider.foundation.files import locked, write_whole

CACHE_VERSION = 6
"""Increment this number if the format of cached folders changes. Older folders are then ignored."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path for a new file, which is renamed to `path` when the caller has written it."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


@contextmanager
def exclusive_use(directory: Path) -> Iterator[None]:
    """Locks the directory. Raises `ConfigError` if another run is using it."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with locked(directory / "lock", wait=False):
            yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another `outrider distill` of this target is using {directory}; wait until it has "
            "ended, or set OUTRIDER_CACHE to another folder"
        ) from error


def folder_name(kind: str, *parts: object) -> str:
    """Returns the name of a folder whose content depends only on the `repr` of `parts`."""
    key = hashlib.blake2b(repr((CACHE_VERSION, *parts)).encode(), digest_size=8).hexdigest()
    return f"{kind}-{key}"


class Stopwatch:
    """Counts the seconds of a stage, including earlier runs with the same folder."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "spent.json"
        self._before = json.loads(self._path.read_text()) if self._path.exists() else 0.0
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
        write_whole(self._path, json.dumps(round(self.seconds, 3)))


def check_out(out: Path) -> Path:
    """Returns `out` with links resolved. Raises `SettingError` if `out` is a file or not empty, or
    if a drafter cannot be written there."""
    try:
        out = out.resolve()
        if out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None):
            raise SettingError("out", f"{out} exists; it must be a new or an empty directory")
        out.parent.mkdir(parents=True, exist_ok=True)
        with _sibling_directory(out):
            return out
    except (OSError, RuntimeError) as error:
        raise SettingError("out", f"{out}: no drafter can be written there: {error}") from error


@contextmanager
def filled(out: Path) -> Iterator[Path]:
    """Yields an empty directory, which is renamed to `out` when the caller has filled it. Raises
    `SettingError` if a file cannot be written."""
    try:
        with _sibling_directory(out) as work:
            new = Path(work, "new")
            new.mkdir()
            yield new
            new.rename(out)  # Replaces an empty directory.
    except OSError as error:
        raise SettingError("out", f"{out}: no drafter could be written there: {error}") from error


def _sibling_directory(out: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
