"""Output of commands: progress on standard error, results on standard output. Removes secrets from
output and from the process list."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.report import Report, to_json
from outrider.fleet.local_state import ERROR_PREFIX, state_directory

if TYPE_CHECKING:
    from rich.console import RenderableType

PERIOD_S = 5.0
PREFIX = "outrider: "
_WARNING = "warning: "
_WIDTH = 160
"""Width of tables in a file or a pipe. Rich's default of 80 characters would cut cells."""
MASK = "***"
_SECRETS = re.compile(r"\bor-[A-Za-z0-9_-]{43}|(?i:\bbearer)\s+[!-~]+|(?<=://)\S*(?=@)|(?<=\?)\S+")
"""Matches API keys, bearer tokens, and the user, password and query of URLs."""


class Progress:
    """Prints what a command is doing. While one piece of work lasts, its line is repeated with the
    elapsed seconds. Thread-safe."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self.quiet = False
        self._period_s = period_s
        self._changed = threading.Condition()
        self._stage = ""
        self._since = 0.0
        self._thread: threading.Thread | None = None

    def __call__(self, line: str, *, at_once: bool = True) -> None:
        """Prints `line`. The work that it describes lasts until the next call or `rest`. Unless
        `at_once`, the line is first printed after `period_s`. A warning does not end the work."""
        if line.startswith(_WARNING):
            note(line)
        elif not self.quiet:
            with self._changed:
                if at_once:
                    note(line)
                self._stage, self._since = line, time.monotonic()
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._repeat, daemon=True)
                    self._thread.start()

    def relay(self, line: str) -> None:
        """Prints a line of another Outrider process if the line is progress or a warning."""
        text = line.removeprefix(PREFIX)
        if text == line or line.startswith(ERROR_PREFIX):
            return
        if text.startswith(_WARNING) or not self.quiet:
            note(text)

    def update(self, line: str, stage: str = "") -> None:
        """Replaces the line of the current work. The new line appears at the next repetition. If
        the current line does not begin with `stage`, first prints `stage` as new work."""
        if not self._stage.startswith(stage):
            self(stage)
        with self._changed:
            if self._stage:
                self._stage = line

    def rest(self) -> None:
        with self._changed:
            self._stage = ""
            self._changed.notify()

    def _repeat(self) -> None:
        with self._changed:
            while True:
                if not self._changed.wait(self._period_s) and self._stage:
                    note(f"{self._stage} ({time.monotonic() - self._since:.0f} s)")


progress = Progress()


def note(line: str) -> None:
    """Prints a line on standard error, even if `progress` is quiet."""
    print(f"{PREFIX}{line}", file=sys.stderr, flush=True)


def show(table: RenderableType, *, soft_wrap: bool = False, clear: bool = False) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    if clear:
        console.clear()
    console.print(table, soft_wrap=soft_wrap)


def tell(report: Report, as_json: bool) -> int:
    """Prints a report to stdout, and its warnings to stderr. Returns the exit code."""
    if as_json:
        print(to_json(report.values), flush=True)
    for part in () if as_json else report.shown:
        if isinstance(part, str):
            print(part, flush=True)
        else:
            show(part)
    for warning in report.warnings:
        progress(warning)
    return 1 if report.values.get("failed") else 0


def program() -> str:
    """The word `outrider`, or its path beside this Python if PATH does not have `outrider`."""
    beside = Path(sys.executable).with_name("outrider")
    return "outrider" if shutil.which("outrider") or not beside.exists() else str(beside)


def shell_command() -> str:
    """The words of a shell command that calls this program with the same state directory."""
    ours = shlex.quote(program())
    if not os.environ.get("OUTRIDER_STATE_DIR"):
        return ours
    return f"OUTRIDER_STATE_DIR={shlex.quote(str(state_directory(os.environ)))} {ours}"


def hide_words(given: frozenset[str]) -> None:
    """If a secret is among the `given` options, hides all options in the process list. Other users
    see this list, and `ray.init` sends this process's entry to Ray's head node."""
    from outrider.config.deployment import deployment_settings

    if any(setting.secret and setting.key in given for setting in deployment_settings().values()):
        from setproctitle import setproctitle

        words = sys.argv[1:]
        setproctitle(shlex.join([*sys.orig_argv[: -len(words)], words[0]]))


def masked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Masks secrets inside settings that are not secret as a whole, such as a password in a URL."""
    return {
        key: _SECRETS.sub(MASK, value) if isinstance(value, str) else value
        for key, value in settings.items()
    }
