"""Processes that answer: how one ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.answering import ending


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "ended with exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed, as the system does where memory"),
    ],
)
def test_a_kill_is_told_as_one(program: str, said: str) -> None:
    status = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert said in ending(status)
