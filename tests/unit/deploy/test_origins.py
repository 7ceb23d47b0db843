"""Text in the colours of where its tokens came from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from deploy.cli.generate import STYLES, OriginPainter, TokenLengths
from outrider.request import Tokens
from outrider.speculation.accept_reject import Origin

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


def test_each_token_has_its_own_colour(tokenizer: str) -> None:
    """The text of one event is split where its tokens end."""
    console = _Recorder()
    OriginPainter(console, TokenLengths(tokenizer)).show(_tokens((1, 0, 2), "bbaccc", A, A, C))
    assert console.pieces == [("bb", STYLES[A]), ("a", STYLES[A]), ("ccc", STYLES[C])]


def test_text_that_lags_keeps_its_colours(tokenizer: str) -> None:
    """A delta may hold the text of earlier tokens, or break off inside one."""
    console = _Recorder()
    painter = OriginPainter(console, TokenLengths(tokenizer))
    painter.show(_tokens((1,), "", A))
    painter.show(_tokens((2,), "bbc", C))
    painter.show(_tokens((0,), "cca", B))
    assert console.pieces == [
        ("bb", STYLES[A]),
        ("c", STYLES[C]),
        ("cc", STYLES[C]),
        ("a", STYLES[B]),
    ]


def test_without_a_tokenizer_nothing_is_lost() -> None:
    """All of an event has the colour that most of its tokens have."""
    console = _Recorder()
    painter = OriginPainter(console, TokenLengths(""))
    painter.show(_tokens((1, 0, 2), "bbaccc", A, A, C))
    painter.show(_tokens((), "tail"))
    assert console.pieces == [("bbaccc", STYLES[A]), ("tail", STYLES[B])]
