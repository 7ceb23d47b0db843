"""llama.cpp as a side of a measurement: in a process and an environment of its own, on the CPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import SettingError
from outrider.speculation.sampling import Rule

from .answering import AnsweringProcess
from .measurement import Completion, Decoding, Side
from .prompts import BenchPrompt
from .references import decoded, reference_environment

LLAMA_CPP_LOOKUP_TOKENS: Final = 2
"""Tokens that its prompt lookup copies at most: what the binding's manual says for CPUs."""
_IMPORT_TIMEOUT_S: Final = 120.0
_ISOLATED: Final = "-I"
"""Keeps the modules of this repository, and of whoever set PYTHONPATH, out of the interpreter."""
_INSTALL: Final = "PYTHON -m venv DIR && DIR/bin/pip install llama-cpp-python"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppModel:
    """What it loads: the target of the deployment, once more."""

    python: Path
    """The interpreter of an environment with `llama_cpp`."""
    gguf: Path
    num_threads: int
    context_tokens: int
    """Room for the longest prompt, its completion and drafts."""
    eos_token_ids: Sequence[int]


class LlamaCppProcess(AnsweringProcess):
    """Decodes with llama.cpp. An async context manager: entering loads the model."""

    def __init__(
        self, side: Side, model: LlamaCppModel, encode: Callable[[BenchPrompt], list[int]]
    ) -> None:
        """`side` is `LLAMA_CPP` or `LLAMA_CPP_LOOKUP`; `encode` gives the tokens of a prompt, chat
        template included."""
        lookup = LLAMA_CPP_LOOKUP_TOKENS if side is Side.LLAMA_CPP_LOOKUP else 0
        super().__init__(
            str(Path(__file__).with_name("llama_cpp_process.py")),
            side.value,
            {
                "model": str(model.gguf),
                "num_threads": model.num_threads,
                "context_tokens": model.context_tokens,
                "eos_token_ids": list(model.eos_token_ids),
                "lookup_tokens": lookup,
            },
            environment=reference_environment(os.environ),
            python=(str(model.python), _ISOLATED),
        )
        self._encode = encode

    async def generate(self, prompt: BenchPrompt, decoding: Decoding) -> Completion:
        """Decodes one prompt; one at a time. Raises `Unavailable` where the process is gone and
        `ConfigError` where it refuses."""
        request = {
            "prompt_ids": self._encode(prompt),
            "max_tokens": decoding.max_tokens,
            "temperature": 0.0 if decoding.rule is Rule.GREEDY else decoding.temperature,
            "seed": decoding.seed,
        }
        return await decoded(self, request)


def llama_cpp_version(python: Path) -> str:
    """The version of `llama_cpp` that an interpreter has. Raises `SettingError` where it has none
    that can be imported."""
    program = "import llama_cpp; print(llama_cpp.__version__)"
    try:
        found = subprocess.run(
            [python, _ISOLATED, "-c", program],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S,
            env=reference_environment(os.environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _wrong(python, str(error)) from error
    if found.returncode != 0 or not found.stdout.strip():
        said = found.stderr.strip().splitlines() or [f"exit status {found.returncode}"]
        raise _wrong(python, said[-1])
    return found.stdout.strip().splitlines()[-1]


def _wrong(python: Path, reason: str) -> SettingError:
    return SettingError(
        "llama_cpp_python",
        f"{python} is no Python that can import llama_cpp ({reason}); one is made by: {_INSTALL}",
    )
