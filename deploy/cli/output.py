"""What commands say: progress on standard error, tables on standard output, and what to type."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Report, to_json
from deploy.fleet.local_state import ERROR_PREFIX, state_directory

if TYPE_CHECKING:
    from rich.console import RenderableType

PERIOD_S = 5.0
"""Between two lines about work that goes on."""
PREFIX = "outrider: "
_WARNING = "warning: "
_WIDTH = 160
"""Of a table in a file or a pipe, in characters; Rich would take 80, and cut what is wider."""


class Progress:
    """Says what a command does, and says it again, with its seconds, while it goes on. Any number
    of threads may share one."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self.quiet = False
        """Whether nothing but warnings is said."""
        self._period_s = period_s
        self._changed = threading.Condition()
        self._doing = ""
        """Empty while nothing is going on."""
        self._since = 0.0
        self._thread: threading.Thread | None = None

    def __call__(self, line: str, *, at_once: bool = True) -> None:
        """Says what begins now: `at_once`, or only where it takes long. Another line or `rest` ends
        it. A warning is said once, whatever else goes on."""
        if line.startswith(_WARNING):
            note(line)
        elif not self.quiet:
            with self._changed:
                if at_once:
                    note(line)
                self._doing, self._since = line, time.monotonic()
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._repeat, daemon=True)
                    self._thread.start()

    def begin(self, stage: str) -> None:
        """Says that a stage begins, unless it is the one that goes on."""
        if not self._doing.startswith(stage):
            self(stage)

    def relay(self, line: str) -> None:
        """Says what another process of ours has said, which repeats it by itself; no errors."""
        text = line.removeprefix(PREFIX)
        if text == line or line.startswith(ERROR_PREFIX):
            return
        if text.startswith(_WARNING) or not self.quiet:
            note(text)

    def update(self, line: str) -> None:
        """Says from the next time on how far the work has come that began last."""
        with self._changed:
            if self._doing:
                self._doing = line

    def rest(self) -> None:
        """The work is over, or says enough by itself."""
        with self._changed:
            self._doing = ""
            self._changed.notify()

    def _repeat(self) -> None:
        with self._changed:
            while True:
                if not self._changed.wait(self._period_s) and self._doing:
                    note(f"{self._doing} ({time.monotonic() - self._since:.0f} s)")


progress = Progress()
"""Of the command that this process runs."""


def note(line: str) -> None:
    """Says what is to be read whether or not progress is."""
    print(f"{PREFIX}{line}", file=sys.stderr, flush=True)


def show(table: RenderableType, *, soft_wrap: bool = False, clear: bool = False) -> None:
    """On standard output. With `soft_wrap` lines are left to the terminal to wrap; `clear` empties
    a terminal first."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    if clear:
        console.clear()
    console.print(table, soft_wrap=soft_wrap)


def tell(report: Report, as_json: bool) -> int:
    """Prints a report, and its warnings on standard error. The exit status of the command."""
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
    """What to type for this program: its path where a shell does not find it by name."""
    beside = Path(sys.argv[0] if Path(sys.argv[0]).name == "outrider" else sys.executable)
    found = shutil.which("outrider") and "outrider"
    return found or shutil.which("outrider", path=str(beside.parent)) or "outrider"


def shell_command() -> str:
    """What to type before a command's name, quoted for a shell, so that it finds the deployments
    that this process finds: this program, behind OUTRIDER_STATE_DIR where that is set."""
    ours = shlex.quote(program())
    if not os.environ.get("OUTRIDER_STATE_DIR"):
        return ours
    return f"OUTRIDER_STATE_DIR={shlex.quote(str(state_directory(os.environ)))} {ours}"
