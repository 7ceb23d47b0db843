"""The process's own end of an `AnsweringProcess` that plays a role until its input ends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError

from .answering import LINE_BYTES_MAX, AnswerWriter


@dataclass(frozen=True, slots=True)
class Role:
    """What a process is once it has been set up."""

    ready: Mapping[str, object]
    """Its answer to its first line."""
    answer: Callable[[dict[str, Any]], Mapping[str, object]]
    """Its answer to every later line."""


Roles = Mapping[str, Callable[[dict[str, Any]], AbstractAsyncContextManager[Role]]]
"""By name: opens a role from the first line, whose `role` is the name."""


def play(roles: Roles, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Answers lines until the input ends, on an event loop of asyncio's own choice or another."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_play(roles, AnswerWriter()))


async def _play(roles: Roles, answers: AnswerWriter) -> None:
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    first = await reader.readline()
    if not first:
        return  # whoever started this ended first
    setup = json.loads(first)
    try:
        async with roles[setup["role"]](setup) as role:
            answers.write(role.ready)
            while line := await reader.readline():
                answers.write(role.answer(json.loads(line)))
    except OutriderError as error:
        answers.write({"error": error.message})
