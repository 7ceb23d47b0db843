"""Progress lines, and the text that `generate` and `chat` print."""

import asyncio
import io
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, decoders, models

from outrider.cli import generate
from outrider.cli.generate import STYLES, Printer
from outrider.cli.main import main
from outrider.cli.output import Progress
from outrider.interfaces.request import Tokens
from outrider.speculation.accept_reject import Origin

PERIOD_S = 0.1


@pytest.fixture
def told() -> Iterator[Progress]:
    found = Progress(PERIOD_S)
    yield found
    found.rest()


def lines(capsys: pytest.CaptureFixture[str], at_least: int = 0) -> list[str]:
    """The lines that come, without the seconds in them. Waits for this many."""
    found: list[str] = []
    while True:
        out, err = capsys.readouterr()
        assert out == ""
        found += [re.sub(r"\d+ s", "N s", line) for line in err.splitlines()]
        if len(found) >= at_least:
            return [line.removeprefix("outrider: ") for line in found]
        time.sleep(0.01)


def test_work_that_takes_long_is_said_again(
    told: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until other work begins or the work ends. With `at_once=False` only after the period."""
    told("loading")
    found = lines(capsys, at_least=3)
    told("starting")
    found += lines(capsys)
    assert found == ["loading", *["loading (N s)"] * (len(found) - 2), "starting"]
    told("stopping", at_once=False)
    told.rest()
    time.sleep(2 * PERIOD_S)
    assert lines(capsys) == []
    told("stopping", at_once=False)
    assert lines(capsys, at_least=1)[0] == "stopping (N s)"


def test_a_quiet_one_says_warnings_alone(
    told: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    told.quiet = True
    told("loading")
    told("warning: no tokenizer")
    told.relay("outrider: loading")
    told.relay("outrider: warning: keys are seen")
    assert lines(capsys) == ["warning: no tokenizer", "warning: keys are seen"]


A, C, B = Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS


@pytest.mark.parametrize("known", [True, False])
def test_each_token_has_the_colour_of_its_origin(tmp_path: Path, known: bool) -> None:
    """Also inside a token's text. Without a tokenizer, the commonest origin of an event counts."""
    vocabulary = {"a": 0, "bb": 1, "ccc": 2, "?": 3}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106
    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    printer = Printer(str(tmp_path) if known else "")
    printer.console = Mock()
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
    calls = printer.console.print.call_args_list
    assert [(*call.args, call.kwargs["style"]) for call in calls] == [
        (text, STYLES[{"A": A, "B": B, "C": C}[of]]) for text, of in pieces
    ]


@pytest.mark.parametrize(
    ("given", "prompt"), [(b"a\nb\n", "a\nb"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"a", "a")]
)
def test_a_line_feed_ends_a_prompt_on_standard_input(
    given: bytes, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
    assert generate._text("-") == prompt


def test_statistics_count_the_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "figures", lambda answer: "3 tokens")
    mock = Mock()
    generate.Chat(mock, mock, mock, {}, False, answers=[mock])._run_command("/stats")
    assert capsys.readouterr().err == "3 tokens\n1 complete answer, 0 messages\n"


def test_an_interrupt_ends_the_reading_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read outside of an event loop, which would catch the first Ctrl-C."""

    def read() -> bytes:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Mock(**{"buffer.read": read}))
    assert main(["generate", "-", "--server", "127.0.0.1:1"]) == 130
