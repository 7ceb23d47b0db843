"""The directory that a drafter goes to: tried before the work begins, filled at once when it is
done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from outrider.errors import SettingError
from outrider.models.drafter_checkpoint import (
    CONFIG_FILE,
    DESCRIPTION_FILE,
    WEIGHTS_FILE,
    is_trained_drafter,
)

from .card import CARD_FILE, PLOT_FILE

_DRAFTER_FILES: Final = {CONFIG_FILE, DESCRIPTION_FILE, WEIGHTS_FILE, CARD_FILE, PLOT_FILE}


def check_out(out: Path) -> Path:
    """The directory itself, behind links. Raises `SettingError` unless a drafter can be written
    there, which is tried, and nothing but an earlier drafter is lost by that."""
    try:
        out = out.resolve()
        if out.exists():
            _check_contents(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with _beside(out):
            return out
    except (OSError, RuntimeError) as error:
        raise SettingError("out", f"{out}: no drafter can be written there: {error}") from error


def _check_contents(out: Path) -> None:
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if not out.is_dir() or (names and not is_trained_drafter(out)):
        raise SettingError("out", f"{out} is there already, and is no drafter's directory")
    if names - _DRAFTER_FILES:
        raise SettingError(
            "out",
            f"{out} holds {min(names - _DRAFTER_FILES)} beside a drafter, and is not replaced",
        )
    if os.path.ismount(out):
        raise SettingError("out", f"{out} is a mount point; name a directory in it")


@contextmanager
def filled(out: Path) -> Iterator[Path]:
    """An empty directory, which then takes the place of `out`. What is at `out` before is there
    until then; where a kill falls between, it lies beside, in `.NAME.*/before`. Raises
    `SettingError`."""
    try:
        with _beside(out) as work:
            new, before = work / "new", work / "before"
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


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A directory for work, on the same file system."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        yield Path(work)
