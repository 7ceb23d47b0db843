"""Other processes of a benchmark: one way to start them, to ask them, and to play a role in one.

A process reads JSON lines until its input ends. The first one says what it is to be, and is
answered when it is ready; each later one has one answer. An answer with an `error` is a refusal.
The services of a deployment run so as well, without Ray.
"""

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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from pydantic import TypeAdapter

from outrider.client import Client
from outrider.config import CoordinatorConfig, DraftConfig, TargetConfig, without_security
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.sessions.embedded import EmbeddedRedis
from outrider.sessions.redis_address import RedisAddress

if TYPE_CHECKING:
    from coordinator.service import CoordinatorService

START_TIMEOUT_S = 900.0
"""What a process may take until it is ready; a model may have to be loaded."""
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
"""What it may take to end when told to, before it is killed."""
LINE_BYTES_MAX = 2**26
"""Of one question or answer."""
DRAFT_TIMEOUT_MS = 30_000
"""A draft that stalls is to be measured, not done without."""
EXACT_TIMERS = "--exact-timers"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GRACE_S = 1.0
_PART_BYTES_MAX = 2**16


class Process:
    """One process. An async context manager: entering starts it."""

    def __init__(
        self,
        command: str | Sequence[str],
        name: str,
        setup: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """A text as `command` is a role, MODULE:FUNCTION, see `Opens`, and its options. `name` is
        what errors call the process, `setup` its first line; `environment` as `spawn` has it."""
        if isinstance(command, str):
            command = (sys.executable, "-m", "benchmarks.processes", *command.split())
        self._command = command
        self._name = name
        self._setup = setup
        self._environment = environment or {}
        self._process: Any = None
        self._stack = AsyncExitStack()
        self.ready: dict[str, Any] = {}
        """Its answer to `setup`, once started."""

    @property
    def address(self) -> str:
        """HOST:PORT of its server, where its role has one."""
        return str(self.ready["address"])

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            running = spawn(self._command, self._environment, asyncio.subprocess.PIPE)
            self._process = await stack.enter_async_context(running)
            self.ready = await self.ask(self._setup, START_TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(
        self, question: Mapping[str, object], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        """Its answer; one question at a time. Raises `Unavailable` where it is gone or takes longer
        than `timeout_s`, and `ConfigError` where it refuses."""
        process = self._process
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer within {timeout_s:.0f} s") from None
        except (ConnectionError, ValueError) as error:
            raise Unavailable(f"{self._name} broke off: {error}") from error
        if not line.endswith(b"\n"):
            status = await process.wait()
            raise Unavailable(f"{self._name} {ending(status)}; what it said is on standard error")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"{self._name}: {answer['error']}")
        return answer


@asynccontextmanager
async def spawn(
    command: Sequence[str], environment: Mapping[str, str], pipe: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with such standard input and output. Leaving ends it, by the end of its input or by
    a signal, and all that it has started. `environment` is added to this process's own, but for
    what services set to bound their threads."""
    own = {key: value for key, value in os.environ.items() if key not in _THREAD_VARIABLES}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, limit=LINE_BYTES_MAX, env=own | dict(environment),
        start_new_session=True,  # An interrupt is for the measurement; the input then ends.
    )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                if process.stdin is not None and number == signal.SIGTERM:
                    process.stdin.close()
                else:
                    os.killpg(process.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()


def ending(status: int) -> str:
    """How a process ended, by what waiting for it returned."""
    if status != -signal.SIGKILL:
        return f"ended with exit status {status}"
    return "was killed, as the system does where memory runs out"


@dataclass(frozen=True, slots=True)
class Role:
    """What a process is once it has been set up."""

    ready: Mapping[str, object]
    """Its answer to its first line."""
    answer: Callable[[dict[str, Any]], Mapping[str, object]] = lambda question: {}
    """Its answer to every later line."""


Opens = Callable[[dict[str, Any]], AbstractAsyncContextManager[Role]]
"""Opens a role from the first line."""


def main(words: Sequence[str]) -> None:
    """Plays the role that the first word names, until the input ends. With `EXACT_TIMERS` the event
    loop waits by `select`, whose timers are exact to microseconds; those of `epoll` are late by up
    to a millisecond."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What libraries print is no answer.
    module, _, name = words[0].partition(":")
    opens: Opens = getattr(importlib.import_module(module), name)
    selector = selectors.SelectSelector if EXACT_TIMERS in words else selectors.DefaultSelector
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector())) as runner:
        runner.run(_play(opens, output))


async def _play(opens: Opens, output: TextIO) -> None:
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with AsyncExitStack() as stack:
        role: Role | None = None
        while line := await reader.readline():
            try:
                question = json.loads(line)
                if role is None:
                    role = await stack.enter_async_context(opens(question))
                    answer = role.ready
                else:
                    answer = role.answer(question)
            except OutriderError as error:
                answer = {"error": error.message}
            print(json.dumps(answer), file=output, flush=True)


_ACTORS: dict[str, tuple[str, str, Any]] = {
    "target": ("target_service.actor", "TargetActor", TargetConfig),
    "draft": ("draft_service.actor", "DraftActor", DraftConfig),
    "coordinator": ("coordinator.actor", "CoordinatorActor", CoordinatorConfig),
}


@asynccontextmanager
async def service(setup: dict[str, Any]) -> AsyncIterator[Role]:
    """A target, a draft or a coordinator by its actor; `setup` has its name as `service`, and as
    `config` the fields of its configuration. Its answer is the CPU time of its process; a
    coordinator's has its `wire_bytes`, too."""
    module, kind, make = _ACTORS[setup["service"]]
    actor = getattr(importlib.import_module(module), kind)()
    config = TypeAdapter(make).validate_json(json.dumps(setup["config"]))
    address = await actor.start(config, log_directory="")

    def figures(_: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"cpu_s": time.process_time()}
        if setup["service"] == "coordinator":
            found["wire_bytes"] = wire_bytes(actor.host.service)
        return found

    try:
        yield Role({"address": address}, figures)
    finally:
        await actor.stop(_GRACE_S)


def wire_bytes(coordinator: CoordinatorService) -> dict[str, int]:
    """What it has sent to replicas and received from them, by role."""
    pools = (coordinator.targets, coordinator.drafts)
    return {pool.role: pool.num_bytes.sent + pool.num_bytes.received for pool in pools}


def service_process(name: str, config: TargetConfig | DraftConfig | CoordinatorConfig) -> Process:
    """A process of the service of this name, on a free port: a deployment with the same settings
    may run here."""
    if not isinstance(config, CoordinatorConfig):
        config = replace(without_security(config), port=0, telemetry="")
    setup = {"service": name, "config": asdict(config)}
    return Process("benchmarks.processes:service", f"the {name} process", setup)


@asynccontextmanager
async def relay(setup: dict[str, Any]) -> AsyncIterator[Role]:
    """Relays TCP connections to `setup`'s `address`, `delay_ms` later in each direction."""
    loop, delay_s = asyncio.get_running_loop(), setup["delay_ms"] / 1e3
    host, _, port = setup["address"].rpartition(":")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while part := await reader.read(_PART_BYTES_MAX):
                loop.call_later(delay_s, writer.write, part)
        loop.call_later(delay_s, writer.write_eof)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))
        for one in (far_writer, writer):
            loop.call_later(delay_s, one.close)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield Role({"address": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"})
    finally:
        server.close()


@asynccontextmanager
async def embedded_redis() -> AsyncIterator[str]:
    """The URL of a Redis that runs as long as this lasts."""
    with (
        tempfile.TemporaryDirectory(prefix="outrider-") as directory,
        EmbeddedRedis(Path(directory)) as redis,
    ):
        yield redis.url


@dataclass(frozen=True, slots=True)
class Replicas:
    """A target, a draft and a store that run."""

    target_address: str
    draft_address: str
    """Empty where the coordinators look drafts up."""
    redis_url: str
    settings: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    """Of coordinators, as far as they are not said here."""

    def coordinator_config(self, **changes: Any) -> CoordinatorConfig:
        """Of a coordinator of theirs, on free ports."""
        fixed: dict[str, Any] = {
            "grpc_port": 0, "port": 0, "http": False, "telemetry": "",
            "redis": RedisAddress(url=self.redis_url), "target_address": self.target_address,
            "draft_address": self.draft_address, "draft_timeout_ms": DRAFT_TIMEOUT_MS,
            "length_control": False,  # Each K is measured by itself.
        }  # fmt: skip
        return replace(without_security(self.settings), **fixed | changes)

    @asynccontextmanager
    async def coordinator(
        self, look_ahead: int = 0, delay_ms: float = 0.0
    ) -> AsyncIterator[Client]:
        """Calls that of `coordinator_process`."""
        async with self.coordinator_process(look_ahead, delay_ms) as (client, _):
            yield client

    @asynccontextmanager
    async def coordinator_process(
        self, look_ahead: int = 0, delay_ms: float = 0.0
    ) -> AsyncIterator[tuple[Client, Process]]:
        """Calls a coordinator that runs as long as this lasts, with `settings` but for
        `look_ahead`; and its process. What it and the draft send each other takes `delay_ms` more
        in each direction. Raises `Unavailable` where a process breaks off."""
        changes: dict[str, Any] = {"look_ahead": look_ahead}
        async with AsyncExitStack() as stack:
            if delay_ms > 0:
                role = f"benchmarks.processes:relay {EXACT_TIMERS}"
                setup = {"address": self.draft_address, "delay_ms": delay_ms}
                relaying = await stack.enter_async_context(Process(role, "the relay", setup))
                changes["draft_address"] = relaying.address
            process = service_process("coordinator", self.coordinator_config(**changes))
            coordinator = await stack.enter_async_context(process)
            yield await stack.enter_async_context(Client(coordinator.address)), coordinator


@asynccontextmanager
async def running_pair(
    target: TargetConfig, draft: DraftConfig | None, coordinator: CoordinatorConfig
) -> AsyncIterator[Replicas]:
    """A target, a draft where a model drafts, and an embedded Redis, for coordinators with these
    settings. Raises `Unavailable` where a process breaks off, and `ConfigError`."""
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_redis())
        verifier = await stack.enter_async_context(service_process("target", target))
        draft_address = ""
        if draft is not None and draft.drafter.model is not None:
            drafter = await stack.enter_async_context(service_process("draft", draft))
            draft_address = drafter.address
        yield Replicas(verifier.address, draft_address, redis_url, coordinator)


if __name__ == "__main__":
    main(sys.argv[1:])
