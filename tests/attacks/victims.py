"""The systems under attack and alice, each in a process of its own, and the judgement of an
attack."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).parents[2]
GAP_S: Final = 1.0
"""Alice may be without an event for this time."""
STRANGER: Final = "127.0.0.66"
"""Address of the strangers. Alice has another one, so that a limit by address spares her."""
START_S: Final = 120.0
ANSWER_S: Final = 60.0
QUIET_S: Final = 4.0
QUIET_TRIES: Final = 15


def judge(attack: Callable[[], tuple[bool, str]]) -> None:
    """Runs an attack, which returns whether the system withstood it, and figures. Exits with 1 if
    the system did not withstand it."""
    is_held, figures = attack()
    print(figures, flush=True)
    sys.exit(0 if is_held else 1)


class Child:
    """A process that runs a module of this package. It prints a line of JSON when it is ready, and
    answers each line on its standard input with a line of JSON. It ends when its standard input is
    closed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="outrider-attack-"))
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"tests.attacks.{module}", *arguments, str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        try:
            self.told = self._line(START_S)
        except BaseException:
            print(self._log()[-3000:], file=sys.stderr)
            self.stop()
            raise

    def ask(self) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self._line(ANSWER_S)

    def _line(self, timeout_s: float) -> Any:
        # No line is buffered, because each question is asked after the last answer was read.
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise RuntimeError(f"a process did not answer within {timeout_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended: {self._log()[-500:]}")
        return json.loads(line)

    def _log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class System(Child):
    """A whole system, whose target and draft are processes of their own (`whole_system.py`)."""

    MODULE = "whole_system"

    def __init__(self, **options: Any) -> None:
        super().__init__(self.MODULE, json.dumps(options))
        self.addresses: dict[str, str] = self.told["addresses"]
        self.keys: dict[str, str] = self.told["keys"]

    def headers(self, caller: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[caller]}", "content-type": "application/json"}

    @property
    def _folders(self) -> list[Path]:
        """Folders of the server's process and of its replicas in /proc."""
        return [Path(f"/proc/{pid}") for pid in (self.process.pid, *self.told.get("replicas", ()))]

    def memory_mib(self, field: str = "VmRSS") -> int:
        """The resident memory of the server and of its replicas, if they are processes, in all; or
        with "VmHWM" their peaks since `forget_peak`."""
        statuses = [(one / "status").read_text() for one in self._folders]
        return sum(int(one.split(f"{field}:")[1].split()[0]) for one in statuses) // 1024

    def forget_peak(self) -> int:
        """Forgets the peaks of the resident memory, and returns the memory now, MiB."""
        for one in self._folders:
            (one / "clear_refs").write_text("5")
        return self.memory_mib()


class Doors(System):
    """Only the servers, with scripted answers (`doors.py`)."""

    MODULE = "doors"


class Alice(Child):
    """The victim (`alice.py`). She calls one of the system's addresses without a pause."""

    def __init__(self, system: System, door: str = "http") -> None:
        super().__init__("alice", door, system.addresses[door], system.keys["alice"])

    def wait_for_calm(self) -> None:
        """Waits until she is without long gaps for `QUIET_S`, because an attack on a busy machine
        proves nothing. Raises `RuntimeError` if this takes too long."""
        for _ in range(QUIET_TRIES):
            self.ask()
            time.sleep(QUIET_S)
            seen = self.ask()
            if seen["events"] and seen["longest_gap_s"] <= GAP_S / 2:
                print("alice before:", seen, flush=True)
                return
        raise RuntimeError(f"alice waits without an attack: {seen}")

    def during(self) -> dict[str, Any]:
        """Her number of events, longest time without one, s, and refusals since the last call."""
        seen: dict[str, Any] = self.ask()
        print("alice during:", seen, flush=True)
        return seen
