"""`python -m tests.clients`: starts the demo, lets each load generator loose on each endpoint of
its HTTP port, and holds their reports against what was asked. Exit code 1 where one is not right.
"""

from __future__ import annotations

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

from tests.clients.outcome import Asked, faults
from tests.clients.tools import TOOLS, Tool

ENDPOINTS: Final = ("chat", "completions")
SERVE_S: Final = 600.0
RUN_S: Final = 300.0
"""The longest that one tool may take for one endpoint."""
TAIL_CHARS: Final = 4000
"""Of what a tool that fails has printed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("--environments", type=Path, default=Path(".venv/clients"))
    parser.add_argument("--requests", type=int, default=6, help="of each run")
    parser.add_argument("--input-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--only", choices=[tool.name for tool in TOOLS], help="this one alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    tools = [tool(arguments.environments) for tool in TOOLS if arguments.only in (None, tool.name)]
    num_wrong = 0
    with (
        tempfile.TemporaryDirectory(prefix="outrider-clients-") as directory,
        _served(Path(directory) / "state") as record,
    ):
        for tool in tools:
            for endpoint in ENDPOINTS:
                asked = Asked(
                    endpoint, arguments.requests, arguments.input_tokens, arguments.output_tokens
                )
                num_wrong += not _is_right(tool, asked, record, Path(directory))
    return 1 if num_wrong else 0


@contextmanager
def _served(state: Path) -> Iterator[dict[str, Any]]:
    """The demo's record, while it runs."""
    environment = os.environ | {"OUTRIDER_STATE_DIR": str(state)}
    program = [sys.executable, "-m", "deploy.cli.main"]
    try:
        words = ["serve", "demo", "--grpc-port", "0", "--port", "0", "--detach"]
        code, printed = _run([*program, *words], environment, Path.cwd(), SERVE_S)
        if code:
            raise SystemExit(f"the demo did not start:\n{printed}")
        yield json.loads((state / "deployment.json").read_text("utf-8"))
    finally:
        _run([*program, "stop", "--quiet"], environment, Path.cwd(), SERVE_S)


def _is_right(tool: Tool, asked: Asked, record: Mapping[str, Any], directory: Path) -> bool:
    """One run, and a line or more of what came of it."""
    name = f"{tool.name}, {asked.endpoint}"
    out = directory / tool.name / asked.endpoint
    out.mkdir(parents=True)
    words = tool.words(
        f"http://{record['http_address']}",
        record["served_model_name"],
        Path(record["tokenizer_directory"]),
        asked,
        out,
    )
    began, printed = time.monotonic(), ""
    try:
        code, printed = _run(words, tool.environment(os.environ, directory / "home"), out, RUN_S)
        if code:
            raise ValueError(f"exit code {code}")
        found = tool.read(out)
        wrong = faults(asked, found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        print(f"{name}: WRONG", *wrong, printed[-TAIL_CHARS:], sep="\n  ", flush=True)
        return False
    took = time.monotonic() - began
    rounds = "" if found.accepted is None else f", {found.accepted:.2f} tokens a round"
    print(
        f"{name}: {found.completed} requests, none failed, {sum(found.output_tokens):.0f} tokens, "
        f"first ones after {median(found.ttft_ms):.0f} ms{rounds} ({took:.0f} s)",
        flush=True,
    )
    return True


def _run(
    words: list[str], environment: Mapping[str, str], directory: Path, limit_s: float
) -> tuple[int, str]:
    """Exit code, and all that was printed. Ends it, and what it started, in the end."""
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
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return code, printed.read()


if __name__ == "__main__":
    sys.exit(main())
