"""Whether constraints can be compiled, asked of a process that can be killed.

A coordinator needs no compiled constraint; replicas compile their own. It refuses what cannot be
compiled, or not in time, before a session is opened and a replica sees it. Tenants take turns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

from outrider.errors import BadRequest, ConfigError, InvariantError, OutriderError, Overloaded
from outrider.grammar.constraint import Constraint
from outrider.limits import (
    CHECKED_CONSTRAINTS_MAX,
    COMPILATIONS_MAX,
    COMPILATIONS_PER_TENANT_MAX,
    COMPILE_BYTES_MAX,
    COMPILE_S_MAX,
    COMPILE_THREADS,
    COMPILE_WAIT_S_MAX,
    TOO_SLOW_S,
)


class FairQueue:
    """Places for work on an event loop. Among tenants that wait, the one that holds the fewest
    places is next, then the one that has waited longest for its turn; within a tenant the first
    comes first."""

    def __init__(self, num_places: int, waiting_max: int, per_tenant_max: int, what: str) -> None:
        """So many hold a place at a time; of those that wait there are at most `waiting_max`, and
        of one tenant `per_tenant_max`. `what` names them in errors."""
        self._num_free = num_places
        self._waiting_max = waiting_max
        self._per_tenant_max = per_tenant_max
        self._what = what
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant; the one whose turn is longest ago comes first."""

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """A place of the tenant's, while the context lasts. Raises `Overloaded` where too many
        wait already."""
        if self._num_free:
            self._take(tenant)
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._held[tenant] -= 1
            self._held += Counter()  # Forgets tenants without places.
            self._num_free += 1
            self._next()

    async def _wait(self, tenant: str) -> None:
        own = self._waiting.get(tenant, ())
        for num_waiting, most, whose in (
            (len(own), self._per_tenant_max, "of yours "),
            (sum(map(len, self._waiting.values())), self._waiting_max, ""),
        ):
            if num_waiting >= most:
                raise Overloaded(f"{most} {self._what} {whose}wait already; try again later")
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # It was given a place just now.
                self._held[tenant] -= 1
                self._num_free += 1
                self._next()
            else:
                self._forget(tenant, future)
            raise

    def _take(self, tenant: str) -> None:
        self._num_free -= 1
        self._held[tenant] += 1

    def _next(self) -> None:
        while self._num_free and self._waiting:
            tenant = min(self._waiting, key=lambda name: self._held[name])
            future = self._waiting[tenant][0]
            self._forget(tenant, future)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)
            self._take(tenant)
            future.set_result(None)

    def _forget(self, tenant: str, future: asyncio.Future[None]) -> None:
        self._waiting[tenant].remove(future)
        if not self._waiting[tenant]:
            del self._waiting[tenant]


_log = logging.getLogger(__name__)

_RETRY_MS: Final = 1_000
_READ_BYTES: Final = 2**16
_END_S: Final = 5.0
"""How long the process may take to end by itself."""
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from coordinator.requests.grammar_process import main; main()"
)
_Key = tuple[str, bytes]
"""A tenant, and the digest of a constraint."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    error: OutriderError | None
    """None = it can be compiled."""
    until_s: float = math.inf
    """When to ask again: what took too long may have been slow by chance."""


class ConstraintChecks:
    """Checks the constraints of one coordinator's requests. Tenants take turns, and share no
    verdicts, so that none learns by times or refusals what others ask."""

    def __init__(
        self,
        load: Callable[[], tuple[str, tuple[int, ...]]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load`, which may block, gives the tokenizer, as the JSON of Hugging Face's tokenizers,
        and the tokens that end a text; it is called with the first constraint. Where it raises
        `ConfigError` every constraint is refused. `now` counts seconds."""
        self._compiler = _Compiler(load)
        self._now = now
        self._verdicts: OrderedDict[_Key, _Verdict] = OrderedDict()
        self._asking: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        """The same constraint of one tenant is compiled once for all that wait for it."""
        self._turns = FairQueue(
            COMPILE_THREADS, COMPILATIONS_MAX, COMPILATIONS_PER_TENANT_MAX, "constraints"
        )

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Raises `BadRequest`, with the kind as its field, for a constraint that cannot be compiled
        or takes more than `COMPILE_S_MAX`, and `Overloaded` where too many wait."""
        key = tenant, constraint.digest()
        verdict = self._find(key)
        if verdict is None:
            try:
                async with asyncio.timeout(COMPILE_WAIT_S_MAX):
                    verdict = await self._ask(key, constraint, tenant)
            except TimeoutError:
                raise Overloaded("other constraints are being compiled; try later") from None
        if verdict.error is not None:
            raise verdict.error

    async def close(self) -> None:
        """Ends the process, and what it compiles. Raises nothing."""
        await self._compiler.close()

    async def _ask(self, key: _Key, constraint: Constraint, tenant: str) -> _Verdict:
        lock = self._asking.get(key)
        if lock is None:
            lock = self._asking[key] = asyncio.Lock()
        async with lock:
            verdict = self._find(key)
            if verdict is None:
                async with self._turns.place(tenant):
                    verdict = self._judge(constraint, await self._compiler.compile(constraint))
                self._verdicts[key] = verdict
                if len(self._verdicts) > CHECKED_CONSTRAINTS_MAX:
                    self._verdicts.popitem(last=False)
            return verdict

    def _find(self, key: _Key) -> _Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None:
            return None
        if verdict.until_s <= self._now():
            del self._verdicts[key]
            return None
        self._verdicts.move_to_end(key)
        return verdict

    def _judge(self, constraint: Constraint, answer: dict[str, Any]) -> _Verdict:
        field, later = constraint.kind, self._now() + TOO_SLOW_S
        match answer.get("outcome"):
            case "compiled":
                return _Verdict(None)
            case "refused":
                return _Verdict(BadRequest(field, answer["reason"]))
            case "too_slow":
                reason = f"takes more than {COMPILE_S_MAX:g} s to compile; simplify it"
                return _Verdict(BadRequest(field, reason), later)
            case "too_large":
                reason = f"takes more than {COMPILE_BYTES_MAX} bytes to compile; simplify it"
                return _Verdict(BadRequest(field, reason), later)
            case _:
                error = InvariantError(f"{field}: could not be compiled, by a fault of ours")
                return _Verdict(error, later)


class _Compiler:
    """`coordinator.requests.grammar_process`, started with the first constraint, and again where it
    has ended."""

    def __init__(self, load: Callable[[], tuple[str, tuple[int, ...]]]) -> None:
        self._load = load
        self._refused: ConfigError | None = None
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = 0
        self._closed = False

    async def compile(self, constraint: Constraint) -> dict[str, Any]:
        """The process' answer. Where nobody waits for it any more, it ends the compilation. Raises
        `Overloaded` where the process ends meanwhile."""
        try:
            process = await self._started()
        except ConfigError as error:
            return {"outcome": "refused", "reason": error.message}
        self._num_asked += 1
        request_id = self._num_asked
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        try:
            _send(process, {"id": request_id, "kind": constraint.kind, "text": constraint.text})
            return await answer
        except asyncio.CancelledError:
            _send(process, {"cancel": request_id})
            raise
        finally:
            del self._answers[request_id]

    async def close(self) -> None:
        """Ends the process, which ends what it compiles. Raises nothing."""
        self._closed = True
        if self._process is not None:
            _end_input(self._process)
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._refused is not None:
                raise self._refused
            if self._process is None:
                try:
                    self._process = await self._start()
                except ConfigError as error:
                    self._refused = error
                    raise
            return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        tokenizer, eos_token_ids = await asyncio.to_thread(self._load)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROGRAM, json.dumps(sys.path),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _send(process, {"tokenizer": tokenizer, "eos_token_ids": eos_token_ids})
            first = await _read(process)
            if first is None or "error" not in first or self._closed:
                raise _ended()
            if first["error"] is not None:
                raise ConfigError(first["error"])
        except BaseException:
            await _end(process)
            raise
        reading = asyncio.create_task(self._read_all(process))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return process

    async def _read_all(self, process: asyncio.subprocess.Process) -> None:
        """Hands out the answers of a process until it ends, or writes a line that is no message;
        then the next check starts another one."""
        try:
            while (answer := await _read(process)) is not None:
                waiting = self._answers.get(answer.get("id", 0))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            self._process = None
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(_ended())
            if not self._closed:
                _log.warning("the process that compiles constraints has ended; it is started again")
            await _end(process)


def _ended() -> Overloaded:
    return Overloaded("constraints cannot be compiled now; try later", retry_after_ms=_RETRY_MS)


def _end_input(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """The process ends, and ends its forks, when its input does; else it is killed. The only reader
    of its output calls this."""
    _end_input(process)
    try:
        async with asyncio.timeout(_END_S):
            await _ends(process)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await _ends(process)


async def _ends(process: asyncio.subprocess.Process) -> None:
    """`Process.wait` alone may wait for ever, for a full pipe is not seen to be closed."""
    while process.stdout is not None and await process.stdout.read(_READ_BYTES):
        pass
    await process.wait()


def _send(process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(json.dumps(message).encode() + b"\n")


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
    """Its next message; None where it has ended, or has written a line that is no message."""
    line = b""
    try:
        line = b"" if process.stdout is None else await process.stdout.readline()
        found = json.loads(line) if line else None
    except ValueError as error:  # No JSON, no UTF-8, or a line beyond the reader's limit.
        found = error
    if found is None or isinstance(found, dict):
        return found
    _log.error("the process that compiles constraints wrote no message: %.200r", line or found)
    return None
