"""The record of a running deployment."""

import errno
import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from outrider.errors import ConfigError
from outrider.fleet.local_state import (
    FILE_NAME,
    LOCK_NAME,
    exclusive,
    is_stopping,
    local_key,
    lock_holder,
    mark_stopping,
    publish,
    recorded_deployment,
    running_deployment,
    state_directory,
    withdraw,
)
from tests.support.recorded import record

RECORD = record()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return state_directory({"OUTRIDER_STATE_DIR": str(tmp_path / "a" / "state")})


def test_what_is_published_is_found(directory: Path) -> None:
    assert running_deployment(directory) is None
    with exclusive(directory):
        publish(directory, RECORD)
        assert running_deployment(directory) == RECORD
        assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {path.name for path in directory.iterdir()} == {FILE_NAME, LOCK_NAME}
        withdraw(directory)
        assert running_deployment(directory) is None
        withdraw(directory)


def test_what_one_that_was_killed_has_left_misleads_nobody(directory: Path) -> None:
    publish(directory, RECORD, "a key")
    assert running_deployment(directory) is None
    assert recorded_deployment(directory) == RECORD
    with exclusive(directory):
        assert running_deployment(directory) is recorded_deployment(directory) is None
        assert local_key(directory) == ""


def test_a_record_that_cannot_be_written_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    with pytest.raises(ConfigError, match=f"{FILE_NAME}: cannot be written: No space left"):
        publish(directory, RECORD)


def test_a_damaged_record_is_named(directory: Path) -> None:
    for text in ("{", "[]", json.dumps({"pid": 1})):
        (directory / FILE_NAME).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=FILE_NAME):
            running_deployment(directory)


def test_only_one_holds_the_lock(directory: Path) -> None:
    with exclusive(directory):
        with pytest.raises(ConfigError, match="but is not ready"), exclusive(directory):
            pass
        publish(directory, RECORD)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), exclusive(directory):
            pass
        assert (lock_holder(directory), is_stopping(directory)) == (os.getpid(), False)
        for _ in range(2):
            mark_stopping(directory)
        assert (lock_holder(directory), is_stopping(directory)) == (os.getpid(), True)
        with pytest.raises(ConfigError, match="is being stopped"), exclusive(directory):
            pass
    assert not is_stopping(directory)
    with exclusive(directory):
        assert not is_stopping(directory)
    assert lock_holder(directory) is None
