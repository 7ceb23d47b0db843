"""Progress lines, and the text that `generate` and `chat` print."""

import asyncio
import io
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from deploy.cli import generate
from deploy.cli.main import main
from deploy.cli.output import Progress

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
    """With its seconds, until other work begins or it ends; with `at_once=False` only if it takes
    long."""
    told("loading")
    time.sleep(3.5 * PERIOD_S)
    told("starting")
    found = lines(capsys)
    assert len(found) >= 4
    assert found == ["loading", *["loading (0 s)"] * (len(found) - 2), "starting"]
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
    told("warning: no tokenizer")
    told.relay("outrider: loading")
    told.relay("outrider: warning: keys are seen")
    assert lines(capsys) == ["warning: no tokenizer", "warning: keys are seen"]


@pytest.mark.parametrize(
    ("given", "prompt"), [(b"a\nb\n", "a\nb"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"a", "a")]
)
def test_a_line_feed_ends_a_prompt_on_standard_input(
    given: bytes, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
    assert generate._text("-") == prompt


def test_an_interrupt_ends_the_reading_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read outside of an event loop, which would catch the first Ctrl-C and then wait for the
    end of the input."""

    class Terminal:
        def read(self) -> bytes:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Terminal()))
    assert main(["generate", "-", "--server", "127.0.0.1:1"]) == 130
