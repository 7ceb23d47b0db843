"""Schemathesis on the server's own OpenAPI document, by its command line, from an environment of
its own: its plugin for pytest does not go with ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

from tests.fuzz.ledger import SHOWN_CHARS_MAX, Ledger
from tests.fuzz.started import Started

KIND: Final = "schemathesis"
_CHECKS: Final = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,allow_header_conformance"
)
_REQUEST_S: Final = 60
_ENDING_S: Final = 60.0


def run_schemathesis(
    program: Path, started: Started, ledger: Ledger, seconds: float, seed: int, directory: Path
) -> None:
    """For so many seconds, with a key; each answer counts, and what it finds is a failure."""
    report = directory / "schemathesis.json"
    command = [
        str(program), "run", f"http://{started.addresses['locked_http']}/openapi.json",
        "--header", f"Authorization: Bearer {started.keys['fuzzer']}",
        "--checks", _CHECKS, "--phases", "examples,coverage,fuzzing",
        "--max-time", str(max(1, round(seconds))), "--seed", str(seed),
        "--request-timeout", str(_REQUEST_S), "--continue-on-failure", "--no-color",
        "--suppress-health-check", "all", "--generation-database", "none",
        "--report", "json", "--report-json-path", str(report),
    ]  # fmt: skip
    again = f"--seed {seed} --only {KIND}"
    try:
        done = subprocess.run(
            command, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=seconds + _ENDING_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        ledger.fail(again, f"it did not end: {error!r}", command[2])
        return
    if done.returncode:
        ledger.fail(again, f"it found:\n{done.stdout[-SHOWN_CHARS_MAX:]}", command[2])
    if report.exists():
        number = json.loads(report.read_text(encoding="utf-8"))["test_cases"]["generated"]
        ledger.count_more(KIND, number)
    else:
        ledger.fail(again, f"it has no report:\n{done.stdout[-SHOWN_CHARS_MAX:]}", command[2])
