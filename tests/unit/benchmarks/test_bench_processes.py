"""The processes of a benchmark, and services that answer late."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.processes import Process, delayed
from outrider.clock import run_virtually
from outrider.errors import ConfigError


def test_each_message_takes_longer_in_each_direction_and_waits_for_no_other() -> None:
    """The service answers each item at once, with the time at which it got the item."""
    arrived: list[Any] = []

    async def run() -> None:
        clock = asyncio.get_running_loop().time

        def connect(send: Any) -> Any:
            return SimpleNamespace(receive=lambda item: send((item, clock())), close=None)

        def note(answer: Any) -> None:
            arrived.append((*answer, clock()))

        connection = delayed(SimpleNamespace(connect=connect), 0.5).connect(note)
        for item in range(3):
            connection.receive(item)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)

    run_virtually(run())
    assert arrived == [
        (item, pytest.approx(0.5 + item / 10), pytest.approx(1.0 + item / 10)) for item in range(3)
    ]


async def test_a_process_that_cannot_start_says_why() -> None:
    setup = {"service": "target", "config": {"engine": "emulated:no=1"}, "delay_ms": 0}
    process = Process("benchmarks.processes:service", "the target process", setup)
    with pytest.raises(ConfigError, match="the target process: emulated: no="):
        async with process:
            pass
