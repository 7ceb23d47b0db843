"""Whether constraints can be compiled, tried in worker processes that can be killed.

A coordinator needs no compiled constraint; replicas compile their own. It refuses what cannot be
compiled, or not in time, before a session is opened and a replica sees it. The compiler does not
stop by itself, however long a schema of 50 bytes takes: the kernel ends its process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import resource
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from pebble import ProcessExpired, ProcessPool

from outrider.errors import BadRequest, ConfigError, InvariantError, OutriderError, Overloaded
from outrider.grammar.compiler import GrammarTokenizer
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

logger = logging.getLogger(__name__)

_RETRY_MS: Final = 1_000
_Key = tuple[str, bytes]
"""A tenant, and the digest of a constraint."""
TokenizerParts = tuple[str, tuple[int, ...]]
"""A tokenizer as the JSON of Hugging Face's tokenizers, and the tokens that end a text."""


class FairQueue:
    """Places for work on an event loop. The first to come is the next, of at most as many of each
    tenant as there are places: so tenants take turns, and the others of a tenant wait behind."""

    def __init__(self, num_places: int, waiting_max: int, per_tenant_max: int, what: str) -> None:
        """So many hold a place at a time; beside them there are at most `waiting_max` that wait,
        and of one tenant `per_tenant_max`. `what` names them in errors."""
        self._num_places = num_places
        self._places = asyncio.Semaphore(num_places)
        self._limits = per_tenant_max, waiting_max
        self._what = what
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Places in the queue, by tenant."""
        self._num_here: Counter[str] = Counter()
        """Of each tenant, with or without a place."""

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """A place of the tenant's, while the context lasts. Raises `Overloaded` where too many
        wait already."""
        of_tenant, waiting_max = self._limits
        if self._num_here[tenant] >= of_tenant + self._num_places:
            raise Overloaded(f"{of_tenant} {self._what} of yours wait already; try again later")
        if self._num_here.total() >= waiting_max + self._num_places:
            raise Overloaded(f"{waiting_max} {self._what} wait already; try again later")
        own = self._own.setdefault(tenant, asyncio.Semaphore(self._num_places))
        self._num_here[tenant] += 1
        try:
            async with own, self._places:
                yield
        finally:
            self._num_here[tenant] -= 1
            self._num_here += Counter()  # Forgets tenants that are not here.


class _Worker:
    """State of a worker process."""

    parts: TokenizerParts
    tokenizer: GrammarTokenizer | None = None


def _set_up(parts: TokenizerParts) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # No handler of Python runs while one compiles.
    _Worker.parts = parts


def _reason_against(constraint: Constraint) -> str | None:
    """Compiles a constraint in a worker. The kernel ends the process where that takes too long."""
    try:
        if _Worker.tokenizer is None:
            _Worker.tokenizer = GrammarTokenizer(*_Worker.parts)
        _limit()
        _Worker.tokenizer.compile(constraint)
    except ConfigError as error:
        return error.message
    except BadRequest as error:
        return error.reason
    return None


def _limit() -> None:
    """Limits the CPU time and the memory that this process may take from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = math.ceil(time.process_time() + COMPILE_S_MAX)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    with suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:  # Linux alone.
        size = int(file.read().split()[0]) * resource.getpagesize() + COMPILE_BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


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
        self, load: Callable[[], TokenizerParts], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`load`, which may block, is called with the first constraint. Where it raises
        `ConfigError` every constraint is refused. `now` counts seconds."""
        self._load = load
        self._now = now
        self._starting = asyncio.Lock()
        self._pool: ProcessPool | ConfigError | None = None
        self._compiling: set[Future[str | None]] = set()
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
        """Ends the processes, and what they compile."""
        pool, self._pool = self._pool, ConfigError("the coordinator ends")
        for compiling in list(self._compiling):
            compiling.cancel()
        if isinstance(pool, ProcessPool):
            pool.stop()  # type: ignore[no-untyped-call]
            await asyncio.to_thread(pool.join)

    async def _ask(self, key: _Key, constraint: Constraint, tenant: str) -> _Verdict:
        lock = self._asking.get(key)
        if lock is None:
            lock = self._asking[key] = asyncio.Lock()
        async with lock:
            verdict = self._find(key)
            if verdict is None:
                async with self._turns.place(tenant):
                    verdict = await self._compile(constraint)
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

    async def _compile(self, constraint: Constraint) -> _Verdict:
        """Compiles in a worker. Where nobody waits for it any more, that one is killed. Raises
        `Overloaded` where it is killed by others."""
        kind, later = constraint.kind, self._now() + TOO_SLOW_S
        try:
            compiling = (await self._started()).schedule(_reason_against, args=(constraint,))
            self._compiling.add(compiling)
            compiling.add_done_callback(self._compiling.discard)
            reason = await asyncio.wrap_future(compiling)
            return _Verdict(None if reason is None else BadRequest(kind, reason))
        except ConfigError as error:
            return _Verdict(BadRequest(kind, error.message))
        except (ProcessExpired, BrokenProcessPool, MemoryError) as error:
            exit_code = error.exitcode if isinstance(error, ProcessExpired) else 0
            if exit_code == -signal.SIGXCPU:
                most = f"{COMPILE_S_MAX:g} s"
            elif exit_code == -signal.SIGABRT or isinstance(error, MemoryError):
                most = f"{COMPILE_BYTES_MAX} bytes"
            else:
                raise Overloaded(
                    "constraints cannot be compiled now; try later", retry_after_ms=_RETRY_MS
                ) from error
            reason = f"takes more than {most} to compile; simplify it"
            return _Verdict(BadRequest(kind, reason), later)
        except Exception:
            logger.exception("a constraint could not be compiled")
            ours = InvariantError(f"{kind}: could not be compiled, by a fault of ours")
            return _Verdict(ours, later)

    async def _started(self) -> ProcessPool:
        async with self._starting:
            if self._pool is None:
                try:
                    parts = await asyncio.to_thread(self._load)
                except ConfigError as error:
                    self._pool = error
                else:
                    self._pool = ProcessPool(
                        COMPILE_THREADS, initializer=_set_up, initargs=(parts,),
                        context=multiprocessing.get_context("spawn"),
                    )  # fmt: skip
            if isinstance(self._pool, ConfigError):
                raise self._pool
            return self._pool
