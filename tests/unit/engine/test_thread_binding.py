"""Threads that help a step give way to the others of the process."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
import torch

from outrider.engine.threads import NICENESS, start_workers
from outrider.replica.scheduler import ThreadExecutor

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


@linux
async def test_helpers_of_a_step_are_nicer_than_its_own_thread() -> None:
    """In a process of its own, since the threads of a numeric library stay."""
    code = (
        "import os, threading, torch; torch.set_num_threads(3)\n"
        "from outrider.replica.scheduler import ThreadExecutor\n"
        "from outrider.engine.threads import start_workers\n"
        "import asyncio\n"
        "found = []\n"
        "executor = ThreadExecutor('step', lambda: 0.0, lambda: found.extend(start_workers()))\n"
        "own = asyncio.run(executor.run(lambda: os.getpriority(os.PRIO_PROCESS, 0)))\n"
        "print(own, *[os.getpriority(os.PRIO_PROCESS, t) for t in found])\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    own = niceness(0)
    assert output.decode().split() == [str(own), str(own + NICENESS), str(own + NICENESS)]


@linux
def test_a_thread_without_helpers_starts_none() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert start_workers() == []
    finally:
        torch.set_num_threads(before)


def test_an_executor_is_ready_when_it_is_made() -> None:
    prepared: list[str] = []
    executor = ThreadExecutor("step", lambda: 0.0, lambda: prepared.append("yes"))
    assert prepared == ["yes"]
    executor.close()
