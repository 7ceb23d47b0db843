"""The process in which a coordinator compiles constraints. Each one is compiled in a fork, which
the kernel ends where it takes too long: the compiler does not stop by itself, however long a schema
of 50 bytes takes.

It imports no numpy and starts no thread, so that forking is safe, and has about 30 MB beside the
tokenizer. Lines of JSON come on its standard input and go to what was its standard output; what a
library prints goes to standard error:

    <- {"id": 0, "tokenizer": of Hugging Face's tokenizers, as JSON, "eos_token_ids": [...]}
    <- {"id": 1, "kind": "regex", "text": "a+"}
    -> {"id": 1, "outcome": "done"}                    or "refused" or "too_slow", with a reason,
                                                       or "crashed"

It leads a process group, which ends with its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from outrider.errors import BadRequest, ConfigError
from outrider.grammar.compiler import GrammarTokenizer
from outrider.grammar.constraint import Constraint, ConstraintKind
from outrider.limits import COMPILE_BYTES_MAX, COMPILE_S_MAX, COMPILE_WAIT_S_MAX

_SECONDS = f"takes more than {COMPILE_S_MAX:g} s to compile; simplify it"
_BYTES = f"takes more than {COMPILE_BYTES_MAX} bytes to compile; simplify it"


def main() -> None:
    output, tokenizer = os.dup(1), None
    os.dup2(2, 1)  # No library's print is taken for an answer.

    def tell(outcome: str, reason: str = "") -> None:
        """In one write, so that lines of two forks do not mix: it is shorter than `PIPE_BUF`."""
        answer = {"id": asked["id"], "outcome": outcome, "reason": reason}
        os.write(output, json.dumps(answer).encode() + b"\n")

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Forks need not be waited for.
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if "tokenizer" in asked:
            try:
                tokenizer = GrammarTokenizer(asked["tokenizer"], tuple(asked["eos_token_ids"]))
                tell("done")
            except ConfigError as error:
                tell("refused", error.message)
        elif os.fork() == 0:
            _watch(tokenizer, Constraint(ConstraintKind(asked["kind"]), asked["text"]), tell)
    os.killpg(0, signal.SIGKILL)


def _watch(tokenizer: Any, constraint: Constraint, tell: Callable[..., None]) -> None:
    """In a fork, which ends here: tells how the one that compiles has ended, if it cannot."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        compiling = os.fork()
        if compiling == 0:
            _compile(tokenizer, constraint, tell)
        _, status = os.waitpid(compiling, 0)
        if os.WIFSIGNALED(status):
            too_slow = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
            tell("too_slow", _SECONDS if too_slow else _BYTES)
        elif status:
            tell("crashed")
    except BaseException:  # noqa: BLE001 (`os._exit` would hide it)
        traceback.print_exc()
        tell("crashed")
    finally:
        os._exit(0)


def _compile(tokenizer: Any, constraint: Constraint, tell: Callable[..., None]) -> None:
    """In a fork, which ends here: with 0 only where it has told."""
    status, answer = 1, ("done", "")
    try:
        _limit()
        try:
            tokenizer.compile(constraint)
        except BadRequest as error:
            answer = "refused", error.reason
        except MemoryError:
            answer = "too_slow", _BYTES
        tell(*answer)
        status = 0
    except BaseException:  # noqa: BLE001 (a panic in Rust is no `Exception`)
        traceback.print_exc()
    finally:
        os._exit(status)


def _limit() -> None:
    seconds = int(COMPILE_S_MAX)
    signal.alarm(COMPILE_WAIT_S_MAX)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux alone.
        size = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
