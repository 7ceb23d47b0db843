"""`outrider bench front-door`: what gRPC and HTTP add to what a coordinator has ready."""

from __future__ import annotations

import argparse
import asyncio

from benchmarks import front_door

from .measuring import AddMeasurement
from .progress import progress
from .tables import show


def add_measurement(measurement: AddMeasurement) -> None:
    """Adds the command."""
    parser = measurement(
        "front-door", "what gRPC and HTTP add to a request and to each of its chunks", run
    )
    front_door.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints a table or one JSON object."""
    from benchmarks.front_door_turns import run as take_turns

    options = front_door.FrontDoorOptions.from_arguments(arguments)
    report = asyncio.run(take_turns(options, progress))
    if arguments.json:
        print(report.to_json())
    else:
        show(front_door.render(report))
    return 0
