"""`outrider COMMAND ...`: reads the command line, runs the command, turns errors into one line.

Exit codes: 0 done; 2 bad arguments or settings (`ConfigError`, `BadRequest`); 130 interrupted;
1 everything else. Standard output is for results alone.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import click

from deploy.fleet.local_state import ERROR_PREFIX
from outrider.errors import BadRequest, ConfigError, OutriderError

from . import masking
from .command import Arguments, Command, Group, usage_message
from .output import progress

COMMANDS: Final = {
    "serve": ("serve", "start coordinators, targets and drafts"),
    "stop": ("serve", "stop the deployment that runs detached"),
    "status": ("status", "say what runs"),
    "scale": ("scale", "change how many replicas a deployment has"),
    "autoscale": ("scale", "let the load decide how many replicas a deployment has"),
    "upgrade": ("scale", "give a deployment other settings, replica by replica"),
    "keys": ("credentials", "make and revoke the keys that callers show"),
    "certs": (
        "credentials",
        "make certificates by which the services of a deployment know each other",
    ),
    "generate": ("generate", "generate text"),
    "chat": ("chat", "talk with the model"),
    "drafters": ("describe", "list the kinds of drafters, and what each needs"),
    "bench": ("bench", "measure"),
    "plan": ("plan", "say what drafting would bring, before anything is deployed"),
    "distill": ("distill", "make a drafter for a target"),
    "collect-env": (
        "describe",
        "describe this machine and what is installed, for a report",
    ),
}
"""By name the module that has the command, and what it is for."""
EXIT_BAD_ARGUMENTS: Final = 2
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


class Outrider(Group):
    """All commands. Only the one that runs pays for its imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of this name, imported now."""
        if name not in COMMANDS:
            return None
        module, purpose = COMMANDS[name]
        found: Command = getattr(
            importlib.import_module(f"deploy.cli.{module}"), name.replace("-", "_")
        )
        found.help = f"{purpose.capitalize()}."
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each with its purpose, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, purpose) for name, (_, purpose) in COMMANDS.items()])


outrider: Final = click.version_option(package_name="outrider", message="outrider %(version)s")(
    Outrider(
        "outrider", subcommand_metavar="COMMAND [ARGS]...",
        help="Disaggregated speculative decoding for language models.",
    )
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Without `arguments` it runs this process's own, and
    starts it again where its command line has secrets."""
    parsed = parse(masking.own_words() if arguments is None else arguments)
    if arguments is None:
        masking.leave_out()
    return _run(parsed)


def parse(words: Sequence[str]) -> Arguments:
    """What these words say. Exits with code 2 where they are wrong."""
    try:
        found = outrider.main(list(words), prog_name="outrider", standalone_mode=False)
    except click.UsageError as error:
        _complain(usage_message(error))
        sys.exit(EXIT_BAD_ARGUMENTS)
    if not isinstance(found, Arguments):
        sys.exit(found)  # Help was asked for.
    found.words = list(words)
    return found


def _run(arguments: Arguments) -> int:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if arguments.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    progress.rest()
    progress.quiet = arguments.quiet or getattr(arguments, "json", False)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except OutriderError as error:
        from .options import error_line

        _complain(error_line(error, arguments))
        return EXIT_BAD_ARGUMENTS if isinstance(error, (ConfigError, BadRequest)) else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        progress.rest()


def _complain(message: str) -> None:
    print(f"{ERROR_PREFIX}{message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
