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

from deploy.fleet.local_state import ERROR_PREFIX
from outrider.errors import BadRequest, ConfigError, OutriderError, did_you_mean

from . import secret_words
from .naming import spoken
from .progress import add_common_flags, begin_progress, progress

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
NEAR: Final = 0.75
"""How alike a flag must be to what was typed to be suggested; see `did_you_mean`."""
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
    """Tells of a flag that does not exist before anything else, as argparse would take its value
    for another argument and blame that."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # A slip is no short name.

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Of a command without commands of its own the flags are checked first."""
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            for word in words[: words.index("--")] if "--" in words else words:
                self._check_flag(word)
        return super().parse_known_args(words, namespace)

    def _check_flag(self, word: str) -> None:
        flag = word.partition("=")[0]
        if not flag.startswith("--") or " " in word or flag in self._option_string_actions:
            return
        names = [known for known in self._option_string_actions if known.startswith("--")]
        self.error(f"unrecognized arguments: {flag}{did_you_mean(flag, names, NEAR)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see {self.prog} --help)")
        sys.exit(EXIT_BAD_ARGUMENTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Without `arguments` it runs this process's own, and
    starts it again where its command line has secrets."""
    command, parsed = parse(secret_words.own_words() if arguments is None else arguments)
    if arguments is None:
        secret_words.leave_out()
    return _run(command, parsed)


def parse(arguments: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """The command that these words name, and its arguments. Exits with code 2 where they are
    wrong."""
    words = list(arguments)
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
            add_common_flags(subparser)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        # By the parser of the command itself, so that the error points to that one's help.
        flags = [word for word in unknown if word.startswith("-")]
        parsed.parser.error(f"unrecognized arguments: {' '.join(flags or unknown)}")
    parsed.words = words
    return modules[parsed.command], parsed


def _command(name: str) -> Command:
    module: object = importlib.import_module(f"deploy.cli.{name.replace('-', '_')}")
    return module  # type: ignore[return-value]


def _run(command: Command, parsed: argparse.Namespace) -> int:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if "verbose" in parsed else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    begin_progress(parsed)
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
    finally:
        progress.rest()


def _complain(message: str) -> None:
    print(f"{ERROR_PREFIX}{message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
