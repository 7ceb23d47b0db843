"""`python -m tests.clients`: starts the demo, runs each load generator against each endpoint of its
HTTP port, and checks the reports against the requests; then lm-eval, against the library, and an
agent that calls a tool. Exit code 1 if one is wrong."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.clients import harness
from tests.clients.tools import READERS, Asked, command_of, environment_of, faults

ENDPOINTS: Final = ("chat", "completions")
SERVE_S: Final = 600.0
HARNESS: Final = "lm-eval"
AGENT: Final = "openai-agents"
RUN_S: Final = 300.0
"""Timeout of a tool for one endpoint."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("--environments", type=Path, default=Path(".venv/clients"))
    parser.add_argument("--requests", type=int, default=6, help="of each run")
    parser.add_argument("--only", choices=[*READERS, HARNESS, AGENT], help="this one alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory(prefix="outrider-clients-") as directory,
        _served(Path(directory) / "state") as record,
    ):
        are_right = [
            _is_right(tool, Asked(endpoint, arguments.requests), arguments, record, Path(directory))
            for tool in READERS
            if arguments.only in (None, tool)
            for endpoint in ENDPOINTS
        ]
        if arguments.only in (None, HARNESS):
            are_right.append(_harness_is_right(arguments, record, Path(directory)))
        if arguments.only in (None, AGENT):
            are_right.append(_agent_is_right(arguments, record, Path(directory)))
    return 0 if all(are_right) else 1


@contextmanager
def _served(state: Path) -> Iterator[dict[str, Any]]:
    environment = os.environ | {"OUTRIDER_STATE_DIR": str(state)}
    program = [sys.executable, "-m", "deploy.cli.main"]
    try:
        words = ["serve", "demo", "--grpc-port", "0", "--port", "0", "--detach"]
        words += ["--chat-template", "hermes"]
        code, printed = _run([*program, *words], environment, Path.cwd(), SERVE_S)
        if code:
            raise SystemExit(f"the demo did not start:\n{printed}")
        yield json.loads((state / "deployment.json").read_text("utf-8"))
    finally:
        _run([*program, "stop", "--quiet"], environment, Path.cwd(), SERVE_S)


def _is_right(
    tool: str, asked: Asked, arguments: argparse.Namespace, record: Mapping[str, Any], root: Path
) -> bool:
    """Runs one tool, and prints its outcome."""
    out = root / tool / asked.endpoint
    out.mkdir(parents=True)
    program = (arguments.environments / tool / "bin" / tool).absolute()
    words = [str(program), *command_of(tool, asked, record, out)]
    began, printed = time.monotonic(), ""
    try:
        code, printed = _run(words, environment_of(tool, root / "home"), out, RUN_S)
        if code:
            raise ValueError(f"exit code {code}")
        found = READERS[tool](out)
        wrong = faults(asked, found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        print(f"{tool}, {asked.endpoint}: WRONG", *wrong, printed[-4000:], sep="\n  ", flush=True)
        return False
    rounds = "" if found.accepted is None else f", {found.accepted:.2f} tokens a round"
    print(
        f"{tool}, {asked.endpoint}: {found.completed} requests, none failed, "
        f"{sum(found.output_tokens):.0f} tokens, first ones after {median(found.ttft_ms):.0f} ms"
        f"{rounds} ({time.monotonic() - began:.0f} s)",
        flush=True,
    )
    return True


def _harness_is_right(arguments: argparse.Namespace, record: Mapping[str, Any], root: Path) -> bool:
    out, began, all_printed = root / HARNESS, time.monotonic(), ""
    program = str((arguments.environments / HARNESS / "bin" / HARNESS).absolute())
    try:
        for name, words in harness.commands(record, out).items():
            environment = environment_of(HARNESS, root / "home")
            code, printed = _run([program, *words], environment, harness.TASKS, RUN_S)
            all_printed += printed[-4000:]
            if code:
                raise ValueError(f"exit code {code} for {name}")
        wrong, told = harness.compared(out)
    except (OSError, ValueError, LookupError, TypeError) as error:
        wrong, told = [f"{type(error).__name__}: {error}"], ""
    if wrong:
        print(f"{HARNESS}: WRONG", *wrong, all_printed, sep="\n  ", flush=True)
        return False
    print(f"{HARNESS}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    return True


def _agent_is_right(arguments: argparse.Namespace, record: Mapping[str, Any], root: Path) -> bool:
    program = (arguments.environments / AGENT / "bin" / "python").absolute()
    words = [str(program), str(Path(__file__).with_name("agent.py").absolute())]
    words += [f"http://{record['http_address']}/v1", record["served_model_name"]]
    code, printed = _run(words, environment_of(AGENT, root / "home"), root, RUN_S)
    print(f"{AGENT}:{' WRONG' if code else ''}", *printed.splitlines(), sep="\n  ", flush=True)
    return code == 0


def _run(
    words: list[str], environment: Mapping[str, str], directory: Path, limit_s: float
) -> tuple[int, str]:
    """Exit code and output. Ends it, and its child processes, at the end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            words, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=printed,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code = -signal.SIGKILL
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return code, printed.read()


if __name__ == "__main__":
    sys.exit(main())
