"""`python -m tests.clients`: starts the demo, runs each load generator against each endpoint of the
demo's HTTP port, and compares the reports with the requests. Then runs lm-eval, whose results are
compared with the library's, and an agent that calls a tool. The exit code is 1 if one of them is
wrong."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
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
"""Time limit of a tool for one endpoint."""


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
        given, num = (arguments.environments, record, Path(directory)), arguments.requests
        checks: dict[tuple[str, ...], Callable[[], tuple[list[str], str]]] = {
            (tool, endpoint): partial(_check_tool, tool, Asked(endpoint, num), *given)
            for tool in READERS
            for endpoint in ENDPOINTS
        }
        checks |= {(HARNESS,): partial(_check_harness, *given)}
        checks |= {(AGENT,): partial(_check_agent, *given)}
        are_right = [
            _is_right(", ".join(name), check)
            for name, check in checks.items()
            if arguments.only in (None, name[0])
        ]
    return 0 if all(are_right) else 1


@contextmanager
def _served(state: Path) -> Iterator[dict[str, Any]]:
    environment = os.environ | {"OUTRIDER_STATE_DIR": str(state)}
    program = [sys.executable, "-m", "outrider.cli.main"]
    try:
        words = ["serve", "demo", "--grpc-port", "0", "--port", "0", "--detach"]
        words += ["--chat-template", "hermes"]
        code, printed = _run([*program, *words], environment, Path.cwd(), SERVE_S)
        if code:
            raise SystemExit(f"the demo did not start:\n{printed}")
        yield json.loads((state / "deployment.json").read_text("utf-8"))
    finally:
        _run([*program, "stop", "--quiet"], environment, Path.cwd(), SERVE_S)


def _is_right(name: str, check: Callable[[], tuple[list[str], str]]) -> bool:
    """Runs a check, which returns its faults and figures, and prints the outcome."""
    began = time.monotonic()
    try:
        wrong, told = check()
    except (OSError, ValueError, LookupError, TypeError) as error:
        wrong, told = [f"{type(error).__name__}: {error}"], ""
    if wrong:
        print(f"{name}: WRONG", *wrong, sep="\n  ", flush=True)
        return False
    print(f"{name}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    return True


def _check_tool(
    tool: str, asked: Asked, environments: Path, record: Mapping[str, Any], root: Path
) -> tuple[list[str], str]:
    out = root / tool / asked.endpoint
    out.mkdir(parents=True)
    words = [_program(environments, tool), *command_of(tool, asked, record, out)]
    printed = _succeeded(words, environment_of(tool, root / "home"), out)
    found = READERS[tool](out)
    if wrong := faults(asked, found):
        return [*wrong, printed], ""
    rounds = "" if found.accepted is None else f", {found.accepted:.2f} tokens a round"
    return [], (
        f"{found.completed} requests, none failed, {sum(found.output_tokens):.0f} tokens, "
        f"first ones after {median(found.ttft_ms):.0f} ms{rounds}"
    )


def _check_harness(
    environments: Path, record: Mapping[str, Any], root: Path
) -> tuple[list[str], str]:
    out, program = root / HARNESS, _program(environments, HARNESS)
    for words in harness.commands(record, out).values():
        _succeeded([program, *words], environment_of(HARNESS, root / "home"), harness.TASKS)
    return harness.compared(out)


def _check_agent(
    environments: Path, record: Mapping[str, Any], root: Path
) -> tuple[list[str], str]:
    script = str(Path(__file__).with_name("agent.py").absolute())
    url = f"http://{record['http_address']}/v1"
    words = [_program(environments, AGENT, "python"), script, url, record["served_model_name"]]
    return [], _succeeded(words, environment_of(AGENT, root / "home"), root)


def _program(environments: Path, tool: str, name: str = "") -> str:
    return str((environments / tool / "bin" / (name or tool)).absolute())


def _succeeded(words: list[str], environment: Mapping[str, str], directory: Path) -> str:
    """The end of a program's output. Raises `ValueError` if the exit code is not 0."""
    code, printed = _run(words, environment, directory, RUN_S)
    if code:
        raise ValueError(f"exit code {code}:\n{printed[-4000:]}")
    return printed[-4000:]


def _run(
    words: list[str], environment: Mapping[str, str], directory: Path, limit_s: float
) -> tuple[int, str]:
    """Runs a program; returns its exit code and output. At the end kills the program and its child
    processes."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            words,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
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
