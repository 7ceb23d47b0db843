"""A short run of `make fuzz`, as a command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.started import bugs_in

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("redis")]

LEFT = """\
ERROR:grpc._cython.cygrpc:ExecuteBatchError raised in core by servicer method [/a.B/Nothing]
Traceback (most recent call last):
  File "src/python/grpcio/grpc/_cython/_cygrpc/aio/server.pyx.pxi", line 710, in _handle_exceptions
  File "src/python/grpcio/grpc/_cython/_cygrpc/aio/callback_common.pyx.pxi", line 99, in execute
grpc._cython.cygrpc.ExecuteBatchError: Failed "execute_batch": (<a>, <b>)
"""
ROOT = Path(__file__).parents[2]
LAST = re.compile(r"requests=(\d+) http=(\d+) grpc=(\d+) raw=(\d+) failed=(\d+) control=(\d+)")


def test_nothing_that_is_sent_does_any_harm() -> None:
    """All seeds, and some seconds of what is drawn; the same in each run."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seconds", "5", "--seed", "1"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    last = LAST.fullmatch(found.stdout.splitlines()[-1])
    assert last is not None, found.stdout
    requests, http, grpc, raw, failed, control = map(int, last.groups())
    assert (found.returncode, failed) == (0, 0), found.stdout
    assert requests == http + grpc + raw
    assert min(http, raw, grpc) > 20, found.stdout
    assert control > 5, found.stdout


def test_a_caller_who_left_is_no_bug_but_what_our_code_raised_is() -> None:
    assert bugs_in(f"INFO:a\n{LEFT}{LEFT}WARNING:b\n") == []
    [found] = bugs_in(LEFT.replace("src/python/grpcio/grpc/_cython/_cygrpc/aio/callback", "/a/b"))
    assert "/a/b" in found
    assert bugs_in(f"{LEFT}Task was destroyed but it is pending!\n")
