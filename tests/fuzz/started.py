"""The process that is fuzzed, from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Final

IDLE_S: Final = 20.0
"""In which what was left has ended."""
STOP_S: Final = 60.0
TASKS_MORE: Final = 4
FILES_MORE: Final = 24
"""Connections that clients keep."""
MEMORY_MORE_MIB: Final = 256
_BUG: Final = re.compile(
    r"Traceback \(most recent call last\)|was never retrieved|was never awaited|Task was destroyed"
)
_CALLER_LEFT: Final = re.compile(
    r"^ERROR:grpc\._cython\.cygrpc:ExecuteBatchError raised in core by servicer method .*\n"
    r"Traceback \(most recent call last\):\n(?:  File \"src/python/grpcio/.*\n)+"
    r"grpc\._cython\.cygrpc\.ExecuteBatchError: .*\n",
    re.MULTILINE,
)
"""gRPC's own, by no code but its own: it refused a method to a caller who was gone already."""


class Started:
    """Starts it, asks it for figures, and ends it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                # Not as a module: processes that it starts would import it all once more.
                [sys.executable, "-c", "from tests.fuzz.system import run; run()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip
        told = self._line()
        self.addresses: dict[str, str] = told["addresses"]
        self.keys: dict[str, str] = told["keys"]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def figures(self) -> dict[str, int]:
        """Tasks, open files, memory and sessions of the process."""
        self._pipe(self._process.stdin).write(b"\n")
        self._pipe(self._process.stdin).flush()
        found: dict[str, int] = self._line()
        return found

    def left_behind(self, before: dict[str, int]) -> list[str]:
        """What there is more of than before, once nobody has called for a while."""
        ends_at = time.monotonic() + IDLE_S
        while (more := _more(before, self.figures())) and time.monotonic() < ends_at:
            time.sleep(0.5)
        return more

    def stop(self) -> list[str]:
        """Ends it; what was wrong, by its exit code and its log."""
        wrong = []
        if self._process.poll() is not None:
            wrong.append(f"the process has ended with {self._process.returncode}")
        self._pipe(self._process.stdin).close()
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
            wrong.append("the process did not end")
        self._pipe(self._process.stdout).close()
        if code and not wrong:
            wrong.append(f"the process ended with {code}")
        wrong += bugs_in(self._log.read_text(encoding="utf-8", errors="replace"))
        return wrong

    def _line(self) -> Any:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the process says nothing:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def _more(before: dict[str, int], now: dict[str, int]) -> list[str]:
    bounds = {
        "tasks": TASKS_MORE, "files": FILES_MORE, "memory_mib": MEMORY_MORE_MIB, "sessions": 0,
        "admitted": 0,
    }  # fmt: skip
    return [
        f"{name}: {before[name]} before, {now[name]} now"
        for name, bound in bounds.items()
        if now[name] > before[name] + bound
    ]


def bugs_in(log: str) -> list[str]:
    """The first bug that a log tells of, with what stands around it."""
    text = _CALLER_LEFT.sub("", log)
    found = _BUG.search(text)
    if found is None:
        return []
    return [f"its log has a bug:\n{text[max(0, found.start() - 500) :][:6000]}"]
