"""Parses the command line of `outrider`, runs the command, and reports an error in one line.

Exit codes: 0 = done; 2 = bad arguments or settings (`ConfigError`, `BadRequest`); 130 =
interrupted; 143 = ended by SIGTERM; 1 = another failure. Standard output gets only results.
"""

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

import click

from outrider.errors import BadRequest, ConfigError, OutriderError, did_you_mean
from outrider.fleet.local_state import ERROR_PREFIX

from .command import Arguments, Command, Group
from .output import hide_words, progress

COMMANDS = {
    "serve": "start a deployment: coordinators, targets and drafts",
    "gateway": "serve HTTP in front of coordinators, and resume streams when a coordinator fails",
    "stop": "stop the deployment on this machine",
    "status": "show what is running",
    "scale": "set the number of replicas",
    "upgrade": "change the settings of a running deployment, replica by replica",
    "keys": "create, list and revoke API keys",
    "certs": "create the TLS certificates of a deployment's services",
    "generate": "generate text",
    "chat": "chat with the model",
    "drafters": "list the kinds of drafters and what each needs",
    "bench": "run a benchmark",
    "plan": "predict what drafting would gain, before you deploy",
    "distill": "train a drafter for a target",
    "collect-env": "describe this machine and its packages, for a bug report",
}
_MODULES = {
    "stop": "serve",
    "status": "serve",
    "chat": "generate",
    "upgrade": "scale",
    "keys": "credentials",
    "certs": "credentials",
    "drafters": "describe",
    "collect-env": "describe",
}


def _load(name: str) -> Command:
    module = importlib.import_module(f"outrider.cli.{_MODULES.get(name, name)}")
    command: Command = getattr(module, name.replace("-", "_"))
    return command


outrider = click.version_option(package_name="outrider", message="outrider %(version)s")(
    Group(
        "outrider",
        COMMANDS,
        _load,
        subcommand_metavar="COMMAND [ARGS]...",
        help="Disaggregated speculative decoding for language models.",
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of this process. Returns the exit code."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        hide_words(parsed.given)
    return _run(parsed)


def parse(words: Sequence[str]) -> Arguments:
    """Parses a command line. If the command line is wrong, exits with code 2."""
    try:
        arguments = outrider.main(
            list(map(str, words)), prog_name="outrider", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        message = error.format_message()
        if isinstance(error, click.BadParameter) and error.param and error.message:
            message = f"{max(error.param.opts, key=len)}: {error.message}"
        path = "outrider" if error.ctx is None else error.ctx.command_path
        if isinstance(error, click.NoSuchOption):
            from .vllm_flags import hint

            flag = error.option_name
            if not flag.startswith("--"):  # Of `-tp`, click names only `-t`.
                flag = next((word for word in map(str, words) if word.startswith(flag)), flag)
            near = did_you_mean(error.option_name, error.possibilities or ())
            message = f"No such option '{error.option_name}'{near}"
            if instead := hint(path, flag):
                message = f"No such option '{flag}': {instead}"
        _complain(f"{message.rstrip('.')} (see {path} --help)")
        sys.exit(2)
    except click.Abort:  # Ctrl-C while modules are imported.
        sys.exit(128 + signal.SIGINT)
    if not isinstance(arguments, Arguments):
        sys.exit(arguments)  # The help or the version was shown.
    return arguments


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
        return 2 if isinstance(error, (ConfigError, BadRequest)) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:  # SIGTERM, in a command with a temporary deployment.
        return 128 + signal.SIGTERM
    except BrokenPipeError:
        # The reader of the output is gone. When the interpreter exits, it flushes the output once
        # more. This flush must not fail, so the output now goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        progress.rest()


def _complain(message: str) -> None:
    print(f"{ERROR_PREFIX}{message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
