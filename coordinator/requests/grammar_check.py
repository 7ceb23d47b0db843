"""Checks in child processes whether constraints can be compiled within limits of time and memory.

If a constraint cannot be compiled, its request is refused. A compiled grammar is not kept, because
each replica compiles the constraint for itself. Tenants take turns.
"""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

from outrider import limits
from outrider.errors import BadRequest, ConfigError, InvariantError, OutriderError, Overloaded
from outrider.foundation.bounded_dict import BoundedDict
from outrider.foundation.fair_turns import FairQueue, WaitingLimits, WaitingWork
from outrider.foundation.shared_calls import SharedCalls
from outrider.grammar.constraint import Constraint

_log = logging.getLogger(__name__)

_UNAVAILABLE = "constraints cannot be compiled now; try again later"
_TOO_SLOW = f"takes more than {limits.COMPILE_S_MAX:g} s to compile; simplify it"
_TOO_LARGE = f"takes more than {limits.COMPILE_BYTES_MAX} bytes to compile; simplify it"
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from coordinator.requests.grammar_process import main; main()"
)
_Key = tuple[str, bytes]


class ConstraintChecks:
    """Checks the constraints of one coordinator's requests. Tenants share no results, because
    response times would reveal the constraints of other tenants."""

    def __init__(self, load: Callable[[], tuple[str, tuple[int, ...]]]) -> None:
        """`load` returns the tokenizer, as JSON of Hugging Face's `tokenizers`, and the EOS ids. It
        runs on a thread. If it raises `ConfigError`, every constraint is refused."""

        @cache
        def first_line() -> bytes:
            tokenizer, eos_token_ids = load()
            return _line({"tokenizer": tokenizer, "eos_token_ids": eos_token_ids})

        self._compilers = [_Compiler(first_line) for _ in range(limits.COMPILE_THREADS)]
        self._reasons: BoundedDict[_Key, str] = BoundedDict(limits.CHECKED_CONSTRAINTS_MAX)
        """(tenant, digest of a constraint) -> why it is refused; empty = it can be compiled."""
        self._running: SharedCalls[_Key, None] = SharedCalls()
        allowed = WaitingLimits(
            limits.COMPILATIONS_PER_TENANT_MAX,
            limits.COMPILATIONS_MAX,
            "constraints await compilation",
            "compilations",
        )
        self._turns = FairQueue(self._compilers, WaitingWork(allowed))

    async def check(self, constraint: Constraint, tenant: str) -> None:
        key = tenant, constraint.digest()
        if key not in self._reasons:
            try:
                async with asyncio.timeout(limits.COMPILE_WAIT_S_MAX):
                    await self._running.share(
                        key, lambda: asyncio.create_task(self._compile(key, constraint))
                    )
            except TimeoutError:
                raise Overloaded(
                    "other constraints are being compiled; try again later",
                    limit="compile_wait",
                    of_server=True,
                ) from None
        self._reasons.move_to_end(key)
        if reason := self._reasons[key]:
            raise BadRequest(constraint.field or constraint.kind, reason)

    async def close(self) -> None:
        for compiler in self._compilers:
            await compiler.close()

    async def _compile(self, key: _Key, constraint: Constraint) -> None:
        compiler = await self._turns.acquire(key[0])
        # If all requests stop waiting, the compilation continues, and its result is kept.
        judging = asyncio.create_task(self._judge(compiler, key, constraint))
        judging.add_done_callback(lambda _: self._turns.release(compiler))
        await asyncio.shield(judging)

    async def _judge(self, compiler: "_Compiler", key: _Key, constraint: Constraint) -> None:
        reason = self._reasons[key] = await compiler.compile(constraint)
        if reason in (_TOO_SLOW, _TOO_LARGE):
            # The machine may only have been busy, so the constraint may be checked again later.
            asyncio.get_running_loop().call_later(limits.TOO_SLOW_S, self._reasons.pop, key, None)


class _Compiler:
    """Runs `coordinator.requests.grammar_process` in a child process. Starts the process for the
    first constraint, and a new process if it dies."""

    def __init__(self, first_line: Callable[[], bytes]) -> None:
        self._first_line = first_line
        self.process: asyncio.subprocess.Process | None = None
        self._pipes: tuple[asyncio.StreamWriter, asyncio.StreamReader]
        """The process's standard input and output."""
        self._is_closed = False

    async def compile(self, constraint: Constraint) -> str:
        """Returns the reason to refuse the constraint; empty = the constraint can be compiled.
        Raises `Overloaded` if the process did not answer or was killed, and `InvariantError` if it
        died for an unknown reason."""
        process = self.process
        if process is None or process.returncode is not None:
            try:
                process = await self._start()
            except ConfigError as error:
                return error.message
        stdin, stdout = self._pipes
        stdin.write(_line({"kind": constraint.kind, "text": constraint.text}))
        line = b""
        try:
            # The process sets an alarm, which should kill the process after half of this time.
            async with asyncio.timeout(2 * limits.COMPILE_WAIT_S_MAX):
                line = await stdout.readline()
        except TimeoutError:
            _log.warning("the process that compiles constraints does not answer; it is killed")
            process.kill()
        if line:
            return str(json.loads(line))
        status = -await process.wait()
        # Start the next process now, so that the next constraint does not wait for the start.
        with suppress(OSError, OutriderError):
            await self._start()
        match status:
            case signal.SIGPROF | signal.SIGALRM:
                return _TOO_SLOW
            case signal.SIGABRT | signal.SIGSEGV:  # The compiler is out of memory.
                return _TOO_LARGE
            case signal.SIGKILL | signal.SIGTERM:
                raise Overloaded(_UNAVAILABLE)
        raise InvariantError(f"{constraint.kind}: could not be compiled, because of a server bug")

    async def _start(self) -> asyncio.subprocess.Process:
        first = await asyncio.to_thread(self._first_line)
        if self._is_closed:
            raise Overloaded(_UNAVAILABLE)
        self.process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _PROGRAM,
            json.dumps(sys.path),
            start_new_session=True,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        if process.stdin is None or process.stdout is None:
            raise InvariantError("a process without the pipes that it was started with")
        self._pipes = process.stdin, process.stdout
        process.stdin.write(first)
        if self._is_closed:
            process.kill()
        return process

    async def close(self) -> None:
        self._is_closed = True
        if (process := self.process) is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"
