"""`outrider bench WHAT`: measurements of a deployment, or of one that the command starts."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import speedup
from outrider.config import CoordinatorConfig
from outrider.hosting import available_cores

from .connection import Connection, add_connection_flags, connected

if TYPE_CHECKING:
    from benchmarks.references import ReferenceModel
    from benchmarks.report import SpeedupReport

OWN_FLAGS: Final = ("seed", "num_draft_tokens", "deadline_ms")
"""Settings that are flags of the requests here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per measurement."""
    measurements = parser.add_subparsers(dest="measurement", required=True, metavar="WHAT")
    purpose = "speculative against plain decoding, prompt by prompt"
    parser = measurements.add_parser(
        "speedup", help=purpose, description=purpose.capitalize() + "."
    )
    speedup.add_arguments(parser)
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="K",
        help="draft tokens a round [the deployment's own]",
    )  # fmt: skip
    add_connection_flags(parser, without=OWN_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints a table or one JSON object."""
    options = speedup.SpeedupOptions.from_arguments(
        arguments, num_draft_tokens=arguments.num_draft_tokens
    )
    options.load_prompts()  # What is wrong with them shows before anything is started.
    report = asyncio.run(_speedup(options, arguments))
    if arguments.json:
        print(report.to_json())
        return 0
    from rich.console import Console

    from benchmarks.report import render

    Console().print(render(report))
    found = report.overall
    print(
        f"speculative decoding runs at {found.speedup:.2f}x the speed of plain decoding "
        f"({found.speculative_tokens_per_second:.1f} against "
        f"{found.plain_tokens_per_second:.1f} tokens/s over all)"
    )
    return 0


async def _speedup(options: speedup.SpeedupOptions, arguments: argparse.Namespace) -> SpeedupReport:
    from outrider.client import Client

    async with connected(arguments) as connection, Client(connection.address) as client:
        settings = connection.settings
        subject = speedup.Subject(
            client=speedup.ServiceClient(client, raw=options.raw),
            model=str(settings.get("model", connection.address)),
            draft_model=str(settings.get("draft_model", "its own")),
            dtype=_dtype(connection),
            num_draft_tokens=int(
                settings.get("num_draft_tokens") or CoordinatorConfig().num_draft_tokens
            ),
            reference=_reference(connection),
        )
        return await speedup.run(options, subject, _progress)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _dtype(connection: Connection) -> str:
    """What the target runs in: `auto` is what its files say."""
    asked = str(connection.settings.get("dtype", "unknown"))
    path = Path(connection.target_directory) / "config.json"
    if asked != "auto" or not connection.target_directory:
        return asked
    values = json.loads(path.read_text(encoding="utf-8"))
    return str(values.get("dtype") or values.get("torch_dtype") or asked)


def _reference(connection: Connection) -> ReferenceModel | None:
    """The target once more, without services; None where its files are not here."""
    if not connection.target_directory:
        return None
    from benchmarks.references import ReferenceModel

    settings = connection.settings
    return ReferenceModel(
        directory=connection.target_directory,
        dtype=str(settings["dtype"]),
        device=str(settings["device"]),
        num_threads=int(settings["target_num_threads"] or available_cores()),
        trust_remote_code=bool(settings["trust_remote_code"]),
    )
