"""`outrider bench front-door`: what gRPC and HTTP add to what a coordinator has ready."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks import front_door

from .command import Arguments, declared
from .output import progress, show


def add_measurement(measurement: Any) -> None:
    """Adds the command."""
    measurement(
        "front-door", "what gRPC and HTTP add to a request and to each of its chunks", run,
        *declared(front_door.add_arguments),
    )  # fmt: skip


def run(arguments: Arguments) -> int:
    """Measures, and prints a table or one JSON object."""
    from benchmarks.front_door_turns import run as take_turns

    options = front_door.FrontDoorOptions.from_arguments(arguments)
    report = asyncio.run(take_turns(options, progress))
    if arguments.json:
        print(report.to_json())
    else:
        show(front_door.render(report))
    return 0
