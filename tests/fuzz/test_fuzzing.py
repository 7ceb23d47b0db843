"""A short run of `make fuzz`, as a command; and that it finds what there is to find."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("redis")]

ROOT = Path(__file__).parents[2]
SECONDS = 15
LAST = re.compile(r"requests=(\d+) http=(\d+) grpc=(\d+) raw=(\d+) failed=(\d+) control=(\d+)")


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def test_nothing_that_is_sent_does_any_harm() -> None:
    """All seeds, and 15 s of what is drawn; the same in each run."""
    found = fuzz("--seconds", str(SECONDS), "--seed", "1")
    last = LAST.fullmatch(found.stdout.splitlines()[-1])
    assert last is not None, found.stdout
    requests, http, grpc, raw, failed, control = map(int, last.groups())
    assert (found.returncode, failed) == (0, 0), found.stdout
    assert requests == http + grpc + raw
    assert min(http, raw) > 50, found.stdout
    assert min(grpc, control) > 20, found.stdout


def test_a_planted_fault_is_found() -> None:
    """At the one input that it breaks down at, which is shown, and in the log."""
    found = fuzz(
        "--seconds", "1", "--seed", "1", "--only", "seeds", "--system", "tests.fuzz.planted"
    )
    assert found.returncode == 1, found.stdout
    assert "--seed 1 --only seeds: refused: " in found.stdout
    assert "RuntimeError: the planted fault" in found.stdout
