"""What commands print while they work, and the text that `generate` and `chat` print."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import byte_level_tokenizer
from recorded import record, run_here
from rich.console import Console
from tokenizers import Tokenizer, models

from deploy.cli import describe, generate
from deploy.cli.generate import STYLES, Printer, logprob_table
from deploy.cli.main import main
from deploy.cli.output import Progress, progress, show
from deploy.cli.serve import _record_once_ready
from outrider.client import Completion, Metrics, Usage
from outrider.messages import PositionLogprobs
from outrider.request import Tokens
from outrider.sessions.store import FinishReason
from outrider.speculation.accept_reject import Origin
from outrider.speculation.sampling_params import Rule

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
    """With its seconds, until other work begins or none goes on; work that may be short is said
    only where it is not."""
    told("loading")
    time.sleep(3.5 * PERIOD_S)
    told("starting")
    found = lines(capsys)
    assert len(found) >= 4
    assert found == ["loading", *["loading (0 s)"] * (len(found) - 2), "starting"]
    told.update("starting: 1 of 2")
    time.sleep(1.5 * PERIOD_S)
    assert lines(capsys)[0] == "starting: 1 of 2 (0 s)"
    told.rest()
    told.update("nothing goes on")
    time.sleep(2 * PERIOD_S)
    assert lines(capsys) == []
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
    """As it comes, without errors, which end the command, and without what its libraries log;
    until it has recorded that it serves, or has gone."""
    said = b"outrider: loading\nI0000 a library\noutrider: error: none\n"
    monkeypatch.setattr(progress, "quiet", False)
    (tmp_path / "serve.log").write_bytes(said)
    monkeypatch.setattr(os, "waitpid", lambda pid, _: (0 if pid == os.getpid() else pid, 2 << 8))
    ready = record()
    threading.Timer(0.1, run_here, (tmp_path, ready)).start()
    assert _record_once_ready(tmp_path, os.getpid()) == (ready, 0)
    assert lines(capsys) == ["loading"]
    assert _record_once_ready(tmp_path, 1) == (None, 2)


A, C, B = Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS


class _Recorder(Console):
    """Keeps what is printed, with its style."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO())
        self.pieces: list[tuple[str, str]] = []

    def print(self, text: str, *, style: str, **_: object) -> None:  # type: ignore[override]
        self.pieces.append((text, style))


def _tokens(ids: tuple[int, ...], text: str, *origins: Origin) -> Tokens:
    return Tokens(0, ids, text, origins, ())


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Token 0 is `a`, 1 is `bb`, 2 is `ccc`."""
    vocabulary = {"a": 0, "bb": 1, "ccc": 2, "?": 3}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106
    from tokenizers import decoders

    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.mark.parametrize("known", [True, False])
def test_each_token_has_the_colour_of_its_origin(tokenizer: str, known: bool) -> None:
    """The text of an event is split where its tokens end. Without a tokenizer all of it has the
    colour that most of its tokens have."""
    console = _Recorder()
    printer = Printer(tokenizer if known else "", console)
    printer.show(_tokens((1, 0, 2), "bbaccc", A, A, C))
    split = [("bba", STYLES[A]), ("ccc", STYLES[C])] if known else [("bbaccc", STYLES[A])]
    assert console.pieces == split
    printer.show(_tokens((), "tail"))
    assert console.pieces[len(split) :] == [("tail", STYLES[B])]


def test_text_that_lags_keeps_its_colours(tokenizer: str) -> None:
    """A delta may hold the text of earlier tokens, or break off inside one."""
    console = _Recorder()
    printer = Printer(tokenizer, console)
    printer.show(_tokens((1,), "", A))
    printer.show(_tokens((2,), "bbc", C))
    printer.show(_tokens((0,), "cca", B))
    assert console.pieces == [
        ("bb", STYLES[A]), ("c", STYLES[C]), ("cc", STYLES[C]), ("a", STYLES[B]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "prompt"),
    [(b"a\nb\n", "a\nb"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"a", "a"), (b" \n", " ")],
)
def test_a_line_feed_ends_a_prompt_on_standard_input(
    given: bytes, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
    assert generate._text("-") == prompt


def test_an_empty_line_on_standard_input_is_no_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\r\n")))
    assert main(["generate", "-", "--server", "127.0.0.1:1"]) == 2
    said = "outrider: error: PROMPT: standard input has no text; it must have a character or more\n"
    assert capsys.readouterr().err == said


def test_an_interrupt_ends_the_reading_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read where no event loop runs, which would take the first Ctrl-C for itself and then
    wait for the end of the input."""

    class Terminal:
        def read(self) -> bytes:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Terminal()))
    assert main(["generate", "-", "--server", "127.0.0.1:1"]) == 130


def test_log_probabilities_are_a_line_per_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tokens' texts where the tokenizer is here, by their ids alone elsewhere."""
    tokenizer = byte_level_tokenizer(320)
    tokenizer.save_pretrained(tmp_path)
    a, b = tokenizer.encode("a")[0], tokenizer.encode(" ")[0]
    completion = Completion(
        session_id="", model="", seed=0, rule=Rule.GREEDY, text="a ", token_ids=(a, b),
        origins=(), rounds=(), finish_reason=FinishReason.LENGTH, usage=Usage(1, 2),
        metrics=Metrics(2, 0, 0, 1.0, 1.0, 1.0),
        logprobs=(
            PositionLogprobs(-0.25, ((a, -0.25), (b, -12.5))),
            PositionLogprobs(-10.0, ()),
        ),
    )  # fmt: skip

    def rows(directory: str) -> list[list[str]]:
        show(logprob_table(completion, directory))
        return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]

    assert rows(str(tmp_path)) == [
        [str(a), '"a"', "-0.2500", str(a), '"a"', "-0.2500,", str(b), '"', '"', "-12.5000"],
        [str(b), '"', '"', "-10.0000"],
    ]
    assert rows("")[0] == [str(a), "-0.2500", str(a), "-0.2500,", str(b), "-12.5000"]
