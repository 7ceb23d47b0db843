"""Runs `outrider` in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.documents import README


class Shell:
    """Runs `outrider` with a state directory of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.directory = Path.cwd()
        """The folder in which commands run."""
        self.shown = ""
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("OUTRIDER_") or name == "OUTRIDER_CACHE"
        } | {"OUTRIDER_STATE_DIR": str(state)}

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "outrider.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | variables,
            cwd=self.directory,
            start_new_session=True,
        )

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **variables)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def paste(self, line: str, *, anywhere: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a line in a shell in the project's root; with `anywhere` in another folder without
        the variable of the state directory, so that only the line says where the deployment is."""
        environment = self.environment
        if anywhere:
            environment = {k: v for k, v in environment.items() if k != "OUTRIDER_STATE_DIR"}
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.state if anywhere else README.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def record(self) -> dict[str, Any]:
        return json.loads((self.state / "deployment.json").read_text("utf-8"))
