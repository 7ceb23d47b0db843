"""What commands say while they work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import describe
from deploy.cli.main import main
from deploy.cli.output import Progress, progress
from deploy.cli.serve import _ready_word

PERIOD_S = 0.1


@pytest.fixture
def told() -> Iterator[Progress]:
    found = Progress(PERIOD_S)
    yield found
    found.rest()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("outrider: ") for line in err.splitlines()]


def test_work_that_takes_long_is_said_again(
    told: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    """Off a terminal, with its seconds, until other work begins or none goes on."""
    told("loading")
    time.sleep(3.5 * PERIOD_S)
    told("starting")
    found = lines(capsys)
    assert found[0] == "loading"
    assert found[1:-1] == ["loading (0 s)"] * len(found[1:-1])
    assert len(found) >= 4
    assert found[-1] == "starting"
    told.update("starting: 1 of 2")
    time.sleep(1.5 * PERIOD_S)
    assert lines(capsys)[0] == "starting: 1 of 2 (0 s)"
    told.rest()
    time.sleep(2 * PERIOD_S)
    assert lines(capsys) == []
    told.update("nothing goes on")
    time.sleep(2 * PERIOD_S)
    assert lines(capsys) == []
    told("loading again")
    time.sleep(1.5 * PERIOD_S)
    assert lines(capsys)[:2] == ["loading again", "loading again (0 s)"]


def test_work_that_may_be_short_is_said_only_where_it_is_not(
    told: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    told("stopping", at_once=False)
    told.rest()
    time.sleep(2 * PERIOD_S)
    assert lines(capsys) == []
    told("stopping", at_once=False)
    time.sleep(1.5 * PERIOD_S)
    assert lines(capsys)[0] == "stopping (0 s)"


def test_a_quiet_one_says_warnings_alone(
    told: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    told.quiet = True
    told("loading")
    told.begin("training")
    told("warning: no tokenizer")
    told.relay("outrider: loading")
    told.relay("outrider: warning: keys are seen")
    time.sleep(1.5 * PERIOD_S)
    assert lines(capsys) == ["warning: no tokenizer", "warning: keys are seen"]


@pytest.mark.parametrize(("words", "quiet"), [((), False), (("--json",), True), (("-q",), True)])
def test_json_and_quiet_turn_it_off(
    words: tuple[str, ...], quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(describe.drafters, "callback", lambda _: found.append(progress.quiet) or 0)
    assert main(["drafters", *words]) == 0
    assert found == [quiet]


def test_what_a_detached_process_says_is_said_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it comes, without errors, which end the command, and without what its libraries log."""
    log_path = tmp_path / "serve.log"
    program = (
        "import os, sys, time\n"
        "for line in ('outrider: loading', 'outrider: loading (5 s)', 'I0000 a library',\n"
        "             'outrider: error: none'):\n"
        "    print(line, flush=True)\n"
        "    time.sleep(0.3)\n"
        "os.write(int(sys.argv[1]), b'ready')\n"
    )
    monkeypatch.setattr(progress, "quiet", False)
    read_end, write_end = os.pipe()
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", program, str(write_end)], stdout=log, pass_fds=(write_end,)
        ),
    ):
        os.close(write_end)
        assert _ready_word(read_end, log_path) == b"ready"
    assert _ready_word(read_end, log_path) == b""
    os.close(read_end)
    assert lines(capsys) == ["loading", "loading (5 s)"] * 2
