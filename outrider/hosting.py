"""What a process does when it comes to host a service: threads, logs, and counting its traffic."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from outrider.config import DraftConfig, TargetConfig
from outrider.messages import ReplicaDescription
from outrider.wire.link import Connection, ReplicaService

if TYPE_CHECKING:
    from outrider.engine.interface import Engine

Item = TypeVar("Item")
Answer = TypeVar("Answer")

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SPIN_COUNT: Final = 3_000
"""Turns, of some 50 ns each, that a thread of a numeric library spins before it sleeps. They must
outlast the gap between two operators; the library's own choice is milliseconds, and a thread that
spins so long on a core that another process needs makes a step take seconds. Measured on a step of
the demo target on two cores: 20 ms with either (21.5 at 2,000 turns) when they are free; beside two
busy processes 70 ms against 1,500."""
_CGROUP_CPU: Final = Path("/sys/fs/cgroup/cpu.max")
_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104 (recognised, not bound)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs."""

    pid: int
    node: str
    """Names the machine; equal for actors that reach each other over loopback."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crossed the streams of a replica since it started."""

    num_items: int
    """Items received."""
    num_answers: int


def available_cores() -> int:
    """Cores that this process may use: its affinity, and what its control group grants."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = _CGROUP_CPU.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, round(int(quota) / int(period))))


def use_threads(num_threads: int) -> None:
    """Makes numeric libraries that are imported later use so many threads; call it first."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(num_threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def log_to(directory: str, role: str) -> None:
    """Sends this process's log to `<directory>/<role>.log`; nowhere else if there is none."""
    handler: logging.Handler = logging.NullHandler()
    if directory:
        handler = logging.FileHandler(Path(directory) / f"{role}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def advertised(host: str, address: str) -> str:
    """The HOST:PORT that others reach a server by, which listens at `address` on `host`: where
    that stands for every address of the machine, the one that its name has."""
    if host not in _WILDCARDS:
        return address
    port = address.rpartition(":")[2]
    return f"{socket.gethostbyname(socket.gethostname())}:{port}"


def build_engine(
    config: TargetConfig | DraftConfig, role: Literal["target", "draft"], num_threads: int
) -> Engine:
    """The engine that a configuration names; loads the model. Blocks; raises `ConfigError`."""
    # Numeric libraries are imported here, after `use_threads`.
    if config.emulated is not None:
        from outrider.engine.emulated import EmulatedEngine, EmulatedSpec

        return EmulatedEngine(EmulatedSpec.parse(config.emulated), role, config.max_num_seqs)
    from outrider.engine.loading import load_model
    from outrider.engine.transformers_engine import TransformersEngine

    module, info = load_model(
        Path(config.directory),
        name=config.model,
        dtype=config.dtype,
        device=config.device,
        num_threads=num_threads,
        max_model_len=config.max_model_len or None,
        trust_remote_code=config.trust_remote_code,
    )
    return TransformersEngine(module, info, config.max_num_seqs)


class MeteredService(Generic[Item, Answer]):
    """A replica service that counts what crosses its streams."""

    def __init__(self, service: ReplicaService[Item, Answer]) -> None:
        self._service = service
        self._num_items = 0
        self._num_answers = 0

    @property
    def traffic(self) -> Traffic:
        """The counts so far."""
        return Traffic(self._num_items, self._num_answers)

    def connect(self, send: Callable[[Sequence[Answer]], None]) -> Connection[Item]:
        """A new stream of the service."""

        def counted(answers: Sequence[Answer]) -> None:
            self._num_answers += len(answers)
            send(answers)

        return _MeteredConnection(self, self._service.connect(counted))

    def describe(self) -> ReplicaDescription:
        """What the service runs."""
        return self._service.describe()

    def release(self, session_id: str, epoch: int) -> None:
        """Forgets a session."""
        self._service.release(session_id, epoch)

    def count_items(self, num_items: int) -> None:
        """Adds to the items received."""
        self._num_items += num_items


class _MeteredConnection(Generic[Item]):
    def __init__(self, meter: MeteredService[Item, Answer], connection: Connection[Item]) -> None:
        self._count = meter.count_items
        self._connection = connection

    def receive(self, items: Sequence[Item]) -> None:
        self._count(len(items))
        self._connection.receive(items)

    def close(self) -> None:
        self._connection.close()
