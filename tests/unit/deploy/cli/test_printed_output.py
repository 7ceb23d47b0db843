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
from tokenizers import Tokenizer, decoders, models

from deploy.cli import generate
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


def test_what_a_detached_process_says_is_said_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without errors, which end the command, and what its libraries log; until it has recorded
    that it serves, or has gone."""
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


@pytest.mark.parametrize("known", [True, False])
def test_each_token_has_the_colour_of_its_origin(tmp_path: Path, known: bool) -> None:
    """Also where an event has text of earlier tokens, or breaks off inside one. Without a
    tokenizer all of it has the colour that most of its tokens have."""
    vocabulary = {"a": 0, "bb": 1, "ccc": 2, "?": 3}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106
    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    console = _Recorder()
    printer = Printer(str(tmp_path) if known else "", console)
    for ids, text, origins in (
        ((1, 0, 2), "bbaccc", (A, A, C)),
        ((1,), "", (A,)),
        ((2,), "bbc", (C,)),
        ((0,), "cca", (B,)),
        ((), "tail", ()),
    ):
        printer.show(Tokens(0, ids, text, origins, ()))
    each = "bba:A ccc:C bb:A c:C cc:C a:B tail:B" if known else "bbaccc:A bbc:C cca:B tail:B"
    pieces = [one.split(":") for one in each.split()]
    assert console.pieces == [(text, STYLES[{"A": A, "B": B, "C": C}[of]]) for text, of in pieces]


@pytest.mark.parametrize(
    ("given", "prompt"), [(b"a\nb\n", "a\nb"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"a", "a")]
)
def test_a_line_feed_ends_a_prompt_on_standard_input(
    given: bytes, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
    assert generate._text("-") == prompt


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

    assert rows(str(tmp_path))[1] == [str(b), '"', '"', "-10.0000"]
    assert rows("")[0] == [str(a), "-0.2500", str(a), "-0.2500,", str(b), "-12.5000"]
