"""A short run of the command of `make fuzz`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("redis")]

ROOT = Path(__file__).parents[2]
LAST = re.compile(r"requests=(\d+) http=(\d+) grpc=(\d+) frames=(\d+) failed=(\d+) control=(\d+)")
LEAST = 6
CONTROL_S = "20"
"""Other tests use the machine, too."""


def test_nothing_that_is_sent_does_any_harm() -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.fuzz",
            "--seconds",
            "6",
            "--least",
            str(LEAST),
            "--seed",
            "1",
            "--control-s",
            CONTROL_S,
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    last = LAST.fullmatch(found.stdout.splitlines()[-1])
    assert last is not None, found.stdout
    requests, http, grpc, frames, failed, control = map(int, last.groups())
    assert (found.returncode, failed) == (0, 0), found.stdout
    assert requests == http + grpc + frames
    assert min(http, grpc, frames) >= LEAST, found.stdout
    assert control > 0, found.stdout
