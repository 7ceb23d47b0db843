"""The record of a running deployment."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import recorded

from deploy.fleet.local_state import (
    FILE_NAME,
    DeploymentRecord,
    exclusive,
    process_start,
    publish,
    running_deployment,
    state_directory,
    withdraw,
)
from outrider.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return state_directory({"OUTRIDER_STATE_DIR": str(tmp_path / "a" / "state")})


@pytest.fixture
def record() -> DeploymentRecord:
    return recorded.record()


def test_what_is_published_is_found(directory: Path, record: DeploymentRecord) -> None:
    """Written for the owner only, read back as it was, gone once withdrawn."""
    assert running_deployment(directory) is None
    publish(directory, record)
    assert running_deployment(directory) == record
    assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [path.name for path in directory.iterdir()] == [FILE_NAME]
    withdraw(directory)
    assert running_deployment(directory) is None
    withdraw(directory)


def test_a_record_of_a_dead_process_is_removed(directory: Path, record: DeploymentRecord) -> None:
    """A deployment that was killed leaves a record that nobody is misled by."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    start = process_start(child.pid) or 0
    child.wait()
    publish(directory, replace(record, pid=child.pid, process_start=start))
    assert running_deployment(directory) is None
    assert not (directory / FILE_NAME).exists()


def test_a_later_process_with_the_same_pid_is_not_taken_for_it(
    directory: Path, record: DeploymentRecord
) -> None:
    """Kernels use pids again."""
    publish(directory, replace(record, process_start=record.process_start - 1))
    assert running_deployment(directory) is None


def test_a_damaged_record_is_named(directory: Path) -> None:
    """It is not silently taken for none, because something may run."""
    for text in ("{", "[]", json.dumps({"pid": 1})):
        (directory / FILE_NAME).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=FILE_NAME):
            running_deployment(directory)


def test_only_one_holds_the_lock(directory: Path, record: DeploymentRecord) -> None:
    """A second deployment is refused with what is known of the first."""
    with exclusive(directory):
        with pytest.raises(ConfigError, match="is starting"), exclusive(directory):
            pass
        publish(directory, record)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), exclusive(directory):
            pass
    with exclusive(directory):
        pass


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """The error names the variable."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"^OUTRIDER_STATE_DIR: "):
        state_directory({"OUTRIDER_STATE_DIR": str(file / "below")})
