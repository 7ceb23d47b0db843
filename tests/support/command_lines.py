"""Runs commands in this process, and reads their output."""

import io
import json
from typing import Any

import pytest
from rich.console import Console, RenderableType

from outrider.cli.main import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error line of a command that refuses these words, and prints nothing else."""
    try:
        code: object = main(words)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


def reported(
    capsys: pytest.CaptureFixture[str], *words: str, code: int = 0
) -> tuple[dict[str, Any], str]:
    """The JSON object that a command prints with `--json`, and its other output."""
    assert main([*words, "--json"]) == code
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    return json.loads(out), err


def printed(*parts: RenderableType, width: int = 400) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(*parts, sep="\n")
    return text.getvalue()
