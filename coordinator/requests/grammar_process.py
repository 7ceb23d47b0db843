"""The process in which a coordinator compiles constraints. Each one is compiled in a fork of it,
which can be killed: the compiler does not stop by itself, however long a schema of 50 bytes takes.

It imports no numpy and starts no thread, so that forking is safe, and has about 30 MB beside the
tokenizer. Lines of JSON come on its standard input and go to what was its standard output; what a
library prints goes to standard error:

    <- {"tokenizer": of Hugging Face's tokenizers, as JSON, "eos_token_ids": [...]}
    -> {"error": null or why the tokenizer does not serve}
    <- {"id": 1, "kind": "regex", "text": "a+"}        or {"cancel": 1}
    -> {"id": 1, "outcome": "compiled"}                or "refused", with a reason,
                                                       or "too_slow", "too_large", "crashed"

It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from outrider.errors import BadRequest, ConfigError
from outrider.grammar.compiler import GrammarTokenizer
from outrider.grammar.constraint import Constraint, ConstraintKind
from outrider.limits import COMPILE_BYTES_MAX, COMPILE_S_MAX, COMPILE_WAIT_S_MAX

_POLL_S: Final = 0.005
"""Between two looks at forks that run."""
_READ_BYTES: Final = 2**16
_INPUT: Final = 0


class CompilerProcess:
    """The loop of the process."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._unread = bytearray()
        self._tokenizer: GrammarTokenizer | None = None
        self._forks: dict[int, tuple[int, float]] = {}
        """By process id: the request, and when it is killed, whatever it has worked."""

    def run(self) -> None:
        try:
            while True:
                wait_s = _POLL_S if self._forks else None
                if select.select([_INPUT], [], [], wait_s)[0]:
                    data = os.read(_INPUT, _READ_BYTES)
                    if not data:
                        return
                    for message in self._messages(data):
                        self._hear(message)
                self._reap()
        finally:
            for process_id in self._forks:
                os.kill(process_id, signal.SIGKILL)

    def _messages(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._unread += data
        if b"\n" not in data:  # The tokenizer has megabytes.
            return iter(())
        *lines, self._unread = self._unread.split(b"\n")
        return map(json.loads, lines)

    def _hear(self, message: dict[str, Any]) -> None:
        match message:
            case {"tokenizer": tokenizer, "eos_token_ids": eos_token_ids}:
                error = None
                try:
                    self._tokenizer = GrammarTokenizer(tokenizer, tuple(eos_token_ids))
                except ConfigError as refused:
                    error = refused.message
                self._tell({"error": error})
            case {"cancel": request_id}:
                for process_id, (own_id, _) in self._forks.items():
                    if own_id == request_id:
                        os.kill(process_id, signal.SIGKILL)
            case {"id": request_id, "kind": kind, "text": text}:
                process_id = os.fork()
                if process_id == 0:
                    self._compile(request_id, Constraint(ConstraintKind(kind), text))
                self._forks[process_id] = request_id, time.monotonic() + COMPILE_WAIT_S_MAX

    def _compile(self, request_id: int, constraint: Constraint) -> None:
        """In a fork, which ends here. The kernel ends it before where it takes too long."""
        status = 1
        try:
            _limit()
            answer: dict[str, Any] = {"id": request_id, "outcome": "compiled"}
            try:
                if self._tokenizer is not None:
                    self._tokenizer.compile(constraint)
                    status = 0
            except BadRequest as error:
                answer |= {"outcome": "refused", "reason": error.reason}
                status = 0
            except MemoryError:
                answer |= {"outcome": "too_large"}
                status = 0
            if status == 0:
                self._tell(answer)
        except Exception:  # noqa: BLE001 (`os._exit` would hide it)
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        now = time.monotonic()
        for process_id, (request_id, end) in list(self._forks.items()):
            ended, status = os.waitpid(process_id, os.WNOHANG)
            if not ended:
                if now > end:
                    os.kill(process_id, signal.SIGKILL)
                continue
            del self._forks[process_id]
            if os.WIFSIGNALED(status):
                too_slow = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
                self._tell({"id": request_id, "outcome": "too_slow" if too_slow else "too_large"})
            elif status:
                self._tell({"id": request_id, "outcome": "crashed"})

    def _tell(self, message: dict[str, Any]) -> None:
        """In one write, so that lines of two forks do not mix: it is shorter than `PIPE_BUF`."""
        os.write(self._output, json.dumps(message).encode() + b"\n")


def _limit() -> None:
    seconds = int(COMPILE_S_MAX)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux alone.
        size = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The terminal's goes to the coordinator, too.
    output = os.dup(1)
    os.dup2(2, 1)  # No library's print is taken for an answer.
    CompilerProcess(output).run()
