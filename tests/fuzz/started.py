"""Starts the process under test and observes it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

IDLE_S: Final = 20.0
"""Time in which all tasks, sessions and files of the calls must be gone."""
STOP_S: Final = 60.0
MORE: Final = {"tasks": 4, "files": 24, "memory_mib": 256, "sessions": 0, "admitted": 0}
"""Increases that are allowed at the end, because clients keep connections."""
_BUG: Final = re.compile(
    r"Traceback \(most recent call last\)|was never retrieved|was never awaited|Task was destroyed"
)
_CALLER_LEFT: Final = re.compile(
    r"^ERROR:grpc\._cython\.cygrpc:ExecuteBatchError raised in core by servicer method .*\n"
    r"Traceback \(most recent call last\):\n(?:  File \"src/python/grpcio/.*\n)+"
    r"grpc\._cython\.cygrpc\.ExecuteBatchError: .*\n",
    re.MULTILINE,
)
"""Not a bug in Outrider: gRPC refused a method to a caller that had disconnected."""


class Started:
    """The process under test: starts it, reads its figures, and stops it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                # Not a module: its own child processes would then import everything again.
                [sys.executable, "-c", "from tests.fuzz.system import run; run()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )
        told = self._line()
        self.addresses: dict[str, str] = told["addresses"]
        self.keys: dict[str, str] = told["keys"]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def figures(self) -> dict[str, int]:
        """Tasks, open files, memory and sessions of the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        found: dict[str, int] = self._line()
        return found

    def left_behind(self, before: dict[str, int]) -> list[str]:
        """Figures that are still higher than before, some time after the last call."""
        for left in reversed(range(int(IDLE_S / 0.5))):
            now = self.figures()
            more = [name for name, bound in MORE.items() if now[name] > before[name] + bound]
            if not (more and left):
                break
            time.sleep(0.5)
        return [f"{name}: {before[name]} before, {now[name]} now" for name in more]

    def stop(self) -> list[str]:
        """Stops the process. Returns the problems that its exit code and its log show."""
        ended_before = self._process.poll() is not None
        try:
            self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        code = self._process.returncode
        wrong = [f"the process has ended with {code}"] if ended_before or code else []
        return wrong + bugs_in(self._log.read_text(encoding="utf-8", errors="replace"))

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process prints nothing:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)


def bugs_in(log: str) -> list[str]:
    """The first bug that a log shows, with its context."""
    text = _CALLER_LEFT.sub("", log)
    found = _BUG.search(text)
    if found is None:
        return []
    return [f"its log has a bug:\n{text[max(0, found.start() - 500) :][:6000]}"]
