"""What `outrider stop` finds, says and leaves. A deployment that runs is stopped in
`tests/integration/test_cli.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import record

from deploy.cli.main import main
from deploy.fleet.local_state import (
    FILE_NAME,
    LOCK_NAME,
    LOG_NAME,
    locks_known,
    process_start,
    publish,
    state_directory,
)


@pytest.fixture
def state() -> Path:
    return state_directory(os.environ)


def test_nothing_to_stop_is_no_error(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    """Also where the last deployment was stopped as it should be."""
    (state / LOG_NAME).write_text("outrider: starting\noutrider: stopping\n", "utf-8")
    assert main(["stop"]) == 0
    assert capsys.readouterr().err == "nothing runs\n"


def test_a_deployment_that_ended_by_itself_is_told_with_its_reason(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    log = "outrider: stopping\noutrider: error: the coordinator actor died\n"
    (state / LOG_NAME).write_text(log, "utf-8")
    assert main(["stop", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["stop"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("nothing runs: ")
    assert "ended by itself: the coordinator actor died" in said
    assert str(state / LOG_NAME) in said


def test_a_record_without_a_process_is_told_and_removed(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    """As a deployment that was killed leaves it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start(child.pid) or 0
    child.communicate()
    publish(state, record(pid=child.pid, process_start=start, grpc_address="127.0.0.1:50051"))
    assert main(["stop"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"nothing runs: the deployment at 127.0.0.1:50051 (pid {child.pid})")
    assert str(state / FILE_NAME) in said
    assert not (state / FILE_NAME).exists()
    assert main(["stop"]) == 0
    assert capsys.readouterr().err == "nothing runs\n"


@pytest.mark.skipif(not locks_known(), reason="the kernel does not say who holds a lock")
def test_a_deployment_that_is_starting_is_stopped(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    """It has no record yet; the lock tells its process."""
    program = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(state / LOCK_NAME)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        assert main(["stop"]) == 0
        assert child.wait(10) == -signal.SIGTERM
    said = capsys.readouterr().err
    assert said == f"stopped a deployment that was starting or stopping (pid {child.pid})\n"
