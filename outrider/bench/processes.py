"""Starts and calls the processes of a benchmark. Each process has a *role*, such as a service of a
deployment. No process uses Ray.

A process reads JSON lines until its input ends, and answers each line with one line. The first line
sets the process up. If the first answer has no `error`, the process is ready. The roles of this
module answer the first line with an `address`, and further lines with the CPU time so far of the
process and its children (`cpu_s`)."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import selectors
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TextIO

from pydantic import TypeAdapter

from outrider.client import Client
from outrider.config.deployment import (
    CoordinatorConfig,
    DraftConfig,
    TargetConfig,
    without_security,
)
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.redis.address import RedisAddress
from outrider.redis.embedded import EmbeddedRedis

START_TIMEOUT_S = 900.0
"""A process may take this long to be ready, because it may load a model."""
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
LINE_BYTES_MAX = 2**26
DRAFT_TIMEOUT_MS = 30_000
"""Time limit for a proposal. It is long, so that benchmarks use the proposals of a slow draft."""
EXACT_TIMERS = "--exact-timers"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GRACE_S = 1.0


class Process:
    """One process. Entering the context starts the process. Leaving the context ends the process
    and all its children."""

    def __init__(
        self,
        command: str | Sequence[str],
        name: str,
        setup: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is a sequence of words, or a string with the arguments of this module's `main`.
        Error messages begin with `name`. `setup` is the first line. The process inherits all
        environment variables except those that limit threads. `environment` adds variables."""
        if isinstance(command, str):
            command = (sys.executable, "-m", "outrider.bench.processes", *command.split())
        self._command, self._name, self._setup = command, name, setup
        own = {key: value for key, value in os.environ.items() if key not in _THREAD_VARIABLES}
        self._environment = own | dict(environment or {})
        self._process: Any = None
        self.address = ""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            limit=LINE_BYTES_MAX,
            env=self._environment,
            # Ctrl-C must not reach the new process, which `__aexit__` ends.
            start_new_session=True,
        )
        try:
            self.address = (await self.ask(self._setup, START_TIMEOUT_S)).get("address", "")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        self.kill()
        await process.wait()

    def kill(self) -> None:
        """Ends the process and all its children at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ask(
        self, question: Mapping[str, object], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        """Sends a line and returns the answer. Only one call may run at a time. Raises
        `Unavailable` if the process has ended or is late, and `ConfigError` for an error answer."""
        process = self._process
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer within {timeout_s:.0f} s") from None
        except (ConnectionError, ValueError) as error:
            raise Unavailable(f"{self._name} closed its input or output: {error}") from error
        if not line.endswith(b"\n"):
            status = await process.wait()
            how = f"ended with exit status {status}"
            if status == -signal.SIGKILL:
                how = "was killed, perhaps because memory ran out"
            raise Unavailable(f"{self._name} {how}; see its output on standard error")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"{self._name}: {answer['error']}")
        return answer


Role = Callable[[dict[str, Any]], AbstractAsyncContextManager[str]]
"""Sets up a role from the first line. Yields the role's address."""


def main(words: Sequence[str]) -> None:
    """Runs a role until the input ends. The first word names the `Role`, as MODULE:FUNCTION. With
    the word `EXACT_TIMERS`, the event loop uses `select`, as timers of `epoll` may be 1 ms late."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Text that libraries print must go to standard error, not into the answers.
    module, _, name = words[0].partition(":")
    role: Role = getattr(importlib.import_module(module), name)
    selector = selectors.SelectSelector if EXACT_TIMERS in words else selectors.DefaultSelector
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector())) as runner:
        runner.run(_play(role, output))


async def _play(role: Role, output: TextIO) -> None:
    async with AsyncExitStack() as stack:
        setup = json.loads(await asyncio.to_thread(sys.stdin.readline))
        try:
            answer = {"address": await stack.enter_async_context(role(setup))}
        except OutriderError as error:
            answer = {"error": error.message}
        print(json.dumps(answer), file=output, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"cpu_s": cpu_time()}), file=output, flush=True)


def cpu_time() -> float:
    """The CPU time of this process and of its children so far, s. Children that still run are
    counted on Linux only. A process started by `Process` has a process group of its own, so these
    children are the group's other processes."""
    own, group, ticks = str(os.getpid()), os.getpgrp(), 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # The process may have ended.
            _, _, after_name = path.read_text().rpartition(")")
            fields = [int(field) for field in after_name.split()[1:13]]
            if fields[1] == group and path.parent.name != own:
                ticks += fields[10] + fields[11]
    ended_s = sum(os.times()[2:4])
    return time.process_time() + ended_s + ticks / os.sysconf("SC_CLK_TCK")


_ACTORS: dict[str, tuple[str, str, Any]] = {
    "target": ("target_service.actor", "TargetActor", TargetConfig),
    "draft": ("draft_service.actor", "DraftActor", DraftConfig),
    "coordinator": ("coordinator.actor", "CoordinatorActor", CoordinatorConfig),
}


@asynccontextmanager
async def service(setup: dict[str, Any]) -> AsyncIterator[str]:
    """The role of the service `setup["service"]`: target, draft or coordinator. Each message to or
    from a target or draft takes `setup["delay_ms"]` longer. A coordinator needs a delay of 0."""
    module, kind, make = _ACTORS[setup["service"]]
    actor = getattr(importlib.import_module(module), kind)()
    if delay_s := setup["delay_ms"] / 1e3:
        serve = actor.serve
        actor.serve = lambda service, config: serve(delayed(service, delay_s), config)
    config = TypeAdapter(make).validate_json(json.dumps(setup["config"]))
    address = await actor.start(config, log_directory="")
    try:
        yield address
    finally:
        await actor.stop(_GRACE_S)


def delayed(service: Any, delay_s: float) -> Any:
    """Makes a replica's `service` get each item and send each answer `delay_s` later."""
    connect, later = service.connect, partial(asyncio.get_running_loop().call_later, delay_s)

    def connect_late(send: Callable[[Sequence[Any]], None]) -> Any:
        connection = connect(partial(later, send))
        return SimpleNamespace(receive=partial(later, connection.receive), close=connection.close)

    service.connect = connect_late
    return service


def service_process(
    name: str, config: TargetConfig | DraftConfig | CoordinatorConfig, delay_ms: float = 0.0
) -> Process:
    """The process of a service. A target or draft gets a free port and no telemetry, because a
    deployment with the same settings may already run."""
    if not isinstance(config, CoordinatorConfig):
        config = replace(without_security(config), port=0, telemetry="")
    setup = {"service": name, "config": asdict(config), "delay_ms": delay_ms}
    role = "outrider.bench.processes:service" + f" {EXACT_TIMERS}" * (delay_ms > 0)
    return Process(role, f"the {name} process", setup)


@asynccontextmanager
async def embedded_redis() -> AsyncIterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="outrider-") as directory,
        EmbeddedRedis(Path(directory)) as redis,
    ):
        yield redis.url


@dataclass(frozen=True, slots=True)
class Replicas:
    """A running target, draft and Redis."""

    target_address: str
    draft_address: str
    """Empty without a draft replica."""
    redis_url: str
    settings: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    processes: Mapping[str, Process] = field(default_factory=dict)
    """The processes of `target` and `draft`, if they are the benchmark's own."""

    def coordinator_config(self, **changes: Any) -> CoordinatorConfig:
        """The configuration of a coordinator on free ports that uses these replicas."""
        fixed: dict[str, Any] = {
            "grpc_port": 0,
            "port": 0,
            "http": False,
            "telemetry": "",
            "redis": RedisAddress(url=self.redis_url),
            "target_address": self.target_address,
            "draft_address": self.draft_address,
            "draft_timeout_ms": DRAFT_TIMEOUT_MS,
            "length_control": False,  # Benchmarks choose K themselves.
        }
        return replace(without_security(self.settings), **fixed | changes)

    @asynccontextmanager
    async def coordinator(self, look_ahead: int = 0) -> AsyncIterator[tuple[Client, Process]]:
        """Starts a coordinator with `look_ahead`. Yields a client and the coordinator's process."""
        process = service_process("coordinator", self.coordinator_config(look_ahead=look_ahead))
        async with process, Client(process.address) as client:
            yield client, process


@asynccontextmanager
async def running_pair(
    target: TargetConfig,
    draft: DraftConfig | None,
    coordinator: CoordinatorConfig,
    delay_ms: float = 0.0,
) -> AsyncIterator[Replicas]:
    """Starts a temporary Redis, a target, and a draft if the drafter runs in a draft service.
    `Replicas.coordinator` starts coordinators with the settings in `coordinator`. Each message to
    or from the draft takes `delay_ms` longer."""
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_redis())
        verifier = await stack.enter_async_context(service_process("target", target))
        processes, draft_address = {"target": verifier}, ""
        if draft is not None and draft.drafter.runs_on == "draft":
            process = service_process("draft", draft, delay_ms)
            processes["draft"] = await stack.enter_async_context(process)
            draft_address = process.address
        yield Replicas(verifier.address, draft_address, redis_url, coordinator, processes)


if __name__ == "__main__":
    main(sys.argv[1:])
