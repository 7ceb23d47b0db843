"""Whether constraints can be compiled, asked of a process that can be killed.

A coordinator needs no compiled constraint; replicas compile their own. It refuses what cannot be
compiled, or not in time, before a session is opened and a replica sees it. Tenants take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

from outrider.errors import BadRequest, ConfigError, InvariantError, OutriderError, Overloaded
from outrider.grammar.constraint import Constraint
from outrider.limits import (
    CHECKED_CONSTRAINTS_MAX,
    COMPILATIONS_MAX,
    COMPILATIONS_PER_TENANT_MAX,
    COMPILE_THREADS,
    COMPILE_WAIT_S_MAX,
    TOO_SLOW_S,
)
from outrider.shared_calls import SharedCalls

_log = logging.getLogger(__name__)

_RETRY_MS: Final = 1_000
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from coordinator.requests.grammar_process import main; main()"
)
_Key = tuple[str, bytes]
"""A tenant, and the digest of a constraint."""
_Answer = dict[str, Any]


class FairQueue:
    """Places for work on an event loop. Among tenants that wait, the one that holds the fewest
    places is next, then the one that has waited longest for its turn; within a tenant the first
    comes first."""

    def __init__(self, num_places: int, waiting_max: int, per_tenant_max: int, what: str) -> None:
        """So many hold a place at a time; of those that wait there are at most `waiting_max`, and
        of one tenant `per_tenant_max`. `what` names them in errors."""
        self._num_free = num_places
        self._limits = (per_tenant_max, "of yours "), (waiting_max, "")
        self._what = what
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """By tenant; the one whose turn is longest ago comes first."""

    async def take(self, tenant: str) -> None:
        """Waits for a place, which the tenant holds until it is given back. Raises `Overloaded`
        where too many wait already."""
        if self._num_free:
            self._give(tenant)
            return
        num_waiting = len(self._waiting.get(tenant, ())), sum(map(len, self._waiting.values()))
        for number, (most, whose) in zip(num_waiting, self._limits, strict=True):
            if number >= most:
                raise Overloaded(f"{most} {self._what} {whose}wait already; try again later")
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, []).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # It was given a place just now.
                self.give_back(tenant)
            elif future in (own := self._waiting.get(tenant, [])):
                own.remove(future)
                if not own:
                    del self._waiting[tenant]
            raise

    def give_back(self, tenant: str) -> None:
        """The place goes to the next that waits for one."""
        self._held[tenant] -= 1
        self._held += Counter()  # Forgets tenants without places.
        self._num_free += 1
        while self._num_free and self._waiting:
            tenant = min(self._waiting, key=lambda name: self._held[name])
            future, *own = self._waiting.pop(tenant)
            if own:
                self._waiting[tenant] = own
            if not future.done():
                self._give(tenant)
                future.set_result(None)

    def _give(self, tenant: str) -> None:
        self._num_free -= 1
        self._held[tenant] += 1


class ConstraintChecks:
    """Checks the constraints of one coordinator's requests. Tenants take turns, and share no
    verdicts, so that none learns by times or refusals what others ask."""

    def __init__(self, load: Callable[[], tuple[str, tuple[int, ...]]]) -> None:
        """`load`, which may block, gives the tokenizer, as the JSON of Hugging Face's tokenizers,
        and the tokens that end a text; it is called with the first constraint. Where it raises
        `ConfigError` every constraint is refused."""
        self._compiler = _Compiler(load)
        self._errors: OrderedDict[_Key, OutriderError | None] = OrderedDict()
        """Of constraints that were compiled; None = it can be."""
        self._running: SharedCalls[_Key, None] = SharedCalls()
        self._turns = FairQueue(
            COMPILE_THREADS, COMPILATIONS_MAX, COMPILATIONS_PER_TENANT_MAX, "constraints"
        )

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Raises `BadRequest`, with the kind as its field, for a constraint that cannot be compiled
        or takes more than `COMPILE_S_MAX`, and `Overloaded` where too many wait."""
        key = tenant, constraint.digest()
        if key not in self._errors:
            try:
                async with asyncio.timeout(COMPILE_WAIT_S_MAX):
                    await self._running.share(
                        key, lambda: asyncio.create_task(self._compile(key, constraint))
                    )
            except TimeoutError:
                raise Overloaded("other constraints are being compiled; try later") from None
        self._errors.move_to_end(key)
        if error := self._errors[key]:
            raise error

    async def close(self) -> None:
        """Ends the process, and what it compiles. Raises nothing."""
        await self._compiler.close()

    async def _compile(self, key: _Key, constraint: Constraint) -> None:
        tenant = key[0]
        await self._turns.take(tenant)

        def end(judging: asyncio.Task[None]) -> None:
            self._turns.give_back(tenant)
            if not judging.cancelled():
                judging.exception()  # Or asyncio would log it where nobody waits any more.

        # It goes on where nobody waits for it any more: its place and its verdict are kept.
        judging = asyncio.create_task(self._judge(key, constraint))
        judging.add_done_callback(end)
        await asyncio.wait([judging])
        judging.result()

    async def _judge(self, key: _Key, constraint: Constraint) -> None:
        field = constraint.kind
        error: OutriderError | None = None
        answer = await self._compiler.compile(constraint)
        match answer:
            case {"outcome": "crashed"}:
                error = InvariantError(f"{field}: could not be compiled, by a fault of ours")
            case {"outcome": "refused" | "too_slow", "reason": reason}:
                error = BadRequest(field, reason)
        self._errors[key] = error
        if len(self._errors) > CHECKED_CONSTRAINTS_MAX:
            self._errors.popitem(last=False)
        if answer["outcome"] in ("too_slow", "crashed"):  # Perhaps by chance.
            asyncio.get_running_loop().call_later(TOO_SLOW_S, self._errors.pop, key, None)


class _Compiler:
    """`coordinator.requests.grammar_process`, started with the first constraint, and again where it
    has ended."""

    _stdin: Any

    def __init__(self, load: Callable[[], tuple[str, tuple[int, ...]]]) -> None:
        self._load = load
        self.process: asyncio.subprocess.Process | None = None
        self._refused: _Answer | None = None
        self._started: asyncio.Future[_Answer] | None = None
        """What the tokenizer was answered."""
        self._running: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[_Answer]] = {}
        self._numbers = itertools.count(1)
        self._is_closed = False

    async def compile(self, constraint: Constraint) -> _Answer:
        """The process' answer. Raises `Overloaded` where the process ends meanwhile, which it is
        made to do where it does not answer."""
        try:
            async with asyncio.timeout(2 * COMPILE_WAIT_S_MAX):  # It gives up before that itself.
                return await self._ask(constraint)
        except TimeoutError:
            _log.warning("the process that compiles constraints does not answer; it is killed")
            if self._running is not None:
                self._running.cancel()
            raise _ended() from None

    async def _ask(self, constraint: Constraint) -> _Answer:
        if self._refused is not None:
            return self._refused
        if self._is_closed:
            raise _ended()
        loop = asyncio.get_running_loop()
        if self._started is None:
            self._started = loop.create_future()
            self._running = asyncio.create_task(self._run(self._started))
        started = self._started
        first: _Answer = await asyncio.shield(started)
        if first["outcome"] != "done":
            return first
        if self._started is not started:  # It has ended again.
            raise _ended()
        number = next(self._numbers)
        answer: asyncio.Future[_Answer] = loop.create_future()
        self._answers[number] = answer
        self._send({"id": number, "kind": constraint.kind, "text": constraint.text})
        return await answer

    def _send(self, message: dict[str, Any]) -> None:
        self._stdin.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        """Ends the process, and what it compiles, and starts no other. Raises nothing."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, started: asyncio.Future[_Answer]) -> None:
        """Hands out the answers of a process until it ends, or writes what is no answer; then the
        next constraint starts another one."""
        process = None
        try:
            tokenizer, eos_token_ids = await asyncio.to_thread(self._load)
            process = self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _PROGRAM, json.dumps(sys.path), start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            self._stdin, stdout = process.stdin, cast(asyncio.StreamReader, process.stdout)
            self._answers[0] = started
            self._send({"id": 0, "tokenizer": tokenizer, "eos_token_ids": eos_token_ids})
            while line := await stdout.readline():
                answer = json.loads(line)
                asking = self._answers.pop(answer["id"], None)
                if asking is not None and not asking.done():  # A fork may tell two outcomes.
                    asking.set_result(answer)
            _log.warning("the process that compiles constraints has ended")
        except ConfigError as error:
            self._refused = {"outcome": "refused", "reason": error.message}
            started.set_result(self._refused)
        except Exception:  # noqa: BLE001 (whatever it is, another one is started)
            _log.exception("the process that compiles constraints wrote no message")
        finally:
            self._started = None
            for waiting in {started, *self._answers.values()}:
                if not waiting.done():
                    waiting.set_exception(_ended())
                    waiting.exception()  # Or asyncio would log it where nobody waits any more.
            self._answers.clear()
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await cast(Any, process.stdout).read()  # Or `wait` may not see that it is closed.
                await process.wait()


def _ended() -> Overloaded:
    message = "constraints cannot be compiled now; try later"
    return Overloaded(message, retry_after_ms=_RETRY_MS)
