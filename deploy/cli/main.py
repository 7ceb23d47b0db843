"""`outrider COMMAND ...`: reads the command line, runs the command, turns errors into one line.

Exit codes: 0 done; 2 bad arguments or settings (`ConfigError`, `BadRequest`); 130 interrupted;
1 everything else. Standard output is for results alone.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final, NoReturn, Protocol

from deploy.state import ERROR_PREFIX
from outrider.errors import BadRequest, ConfigError, OutriderError

from .naming import spoken

COMMANDS: Final = {
    "serve": "start coordinators, targets and drafts",
    "stop": "stop the deployment that runs detached",
    "status": "say what runs",
    "scale": "change how many replicas a deployment has",
    "autoscale": "let the load decide how many replicas a deployment has",
    "upgrade": "give a deployment other settings, replica by replica",
    "keys": "make and revoke the keys that callers show",
    "certs": "make certificates by which the services of a deployment know each other",
    "generate": "generate text",
    "chat": "talk with the model",
    "drafters": "list who can draft, and what each needs",
    "bench": "measure",
    "plan": "say what drafting would bring, before anything is deployed",
    "distill": "make a drafter for a target",
    "collect-env": "describe this machine and what is installed, for a report",
}
EXIT_BAD_ARGUMENTS: Final = 2
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


class Command(Protocol):
    """A module of this package that holds one command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares its arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs it; returns the exit code."""
        ...


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # A slip is no short name.

    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see {self.prog} --help)")
        sys.exit(EXIT_BAD_ARGUMENTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(
        prog="outrider", description="Disaggregated speculative decoding for language models."
    )
    parser.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, Command] = {}
    for name, purpose in COMMANDS.items():
        subparser = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
        subparser.set_defaults(parser=subparser)
        if name in words:
            # Only the command that runs pays for its imports.
            modules[name] = _command(name)
            modules[name].add_arguments(subparser)
            subparser.add_argument(
                "-v", "--verbose", action="store_true", help="log what happens to standard error"
            )
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        # By the parser of the command itself, so that the error points to that one's help.
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    parsed.words = words
    return _run(modules[parsed.command], parsed)


def _command(name: str) -> Command:
    module: object = importlib.import_module(f"deploy.cli.{name.replace('-', '_')}")
    return module  # type: ignore[return-value]


def _run(command: Command, parsed: argparse.Namespace) -> int:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if parsed.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        code = command.run(parsed)
        sys.stdout.flush()
        return code
    except OutriderError as error:
        _complain(spoken(error, parsed))
        return EXIT_BAD_ARGUMENTS if isinstance(error, (ConfigError, BadRequest)) else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _complain(message: str) -> None:
    print(f"{ERROR_PREFIX}{message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
