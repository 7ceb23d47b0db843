"""Which replicas a deployment has: each announces itself, again and again, or is forgotten.

    record      what a replica says of itself                    `ReplicaRecord`
    registry    the records of one deployment, in Redis          `redis_registry.py`
    lease       renews one replica's record                      `Lease`

A record lasts `LEASE_S` and is renewed each `RENEWAL_S`. Nothing is decided by it alone:
coordinators ask a replica what it runs before they use it, and notice by themselves when it cannot
be reached.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, ClassVar, Final, Literal, Protocol, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from outrider.errors import OutriderError, check
from outrider.limits import REPLICA_NUMBER_MAX, REPLICA_TEXT_MAX
from outrider.sessions.redis_address import RedisAddress

_log = logging.getLogger(__name__)

Role = Literal["coordinator", "target", "draft"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

LEASE_S: Final = 3.0
RENEWAL_S: Final = 1.0
WINDOW_S: Final = 5.0
"""Time constant of the means in `Figures`."""
FIGURE_MAX: Final = 1e12

_STRICT: Final = ConfigDict(strict=True)
_Text = Annotated[str, Field(max_length=REPLICA_TEXT_MAX)]
_Number = Annotated[int, Field(ge=0, le=REPLICA_NUMBER_MAX)]
_Figure = Annotated[float, Field(ge=0, le=FIGURE_MAX)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A replica's load: means over about `WINDOW_S`; None where there is nothing to say, or the
    figure is another role's."""

    __pydantic_config__: ClassVar = _STRICT

    busy: _Figure = None
    """Share of the time in which a step ran, 0 to 1."""
    fill: _Figure = None
    """Share of a step's places that were taken, 0 to 1."""
    step_ms: _Figure = None
    queue_steps: _Figure = None
    """How long an item waited for its step, in steps."""
    kv_usage: _Figure = None
    """Share of the pages of keys and values that running requests need, 0 to 1."""
    draft_waits: _Figure = None
    """Of a coordinator: share of its drafted rounds that waited for their turn at the draft."""
    acceptance: _Figure = None
    """Of a coordinator: share of the draft tokens that were accepted."""
    look_ahead_hits: _Figure = None
    """Of a coordinator: share of the proposals that were there before their rounds."""
    tokens_per_second: _Figure = None
    """Of a coordinator."""


NO_FIGURES: Final = Figures()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """What a replica says of itself."""

    __pydantic_config__: ClassVar = _STRICT

    role: Role
    name: _Text
    """Unique in the deployment, for ever: a replica that takes another's place has another one."""
    address: _Text
    """HOST:PORT that it answers at."""
    host: _Text
    """Machine that it runs on ..."""
    pid: _Number
    """... and its process."""
    model: _Text = ""
    weights: _Text = ""
    """Fingerprint of what it runs, see `ReplicaDescription.weights`; empty for a coordinator."""
    device: _Text = ""
    leaving: bool = False
    """Whether it ends soon, and gets no more sessions."""
    load: _Number = 0
    """Of a coordinator the sessions that it runs; of others the items that they were sent since
    they began."""
    figures: Figures = NO_FIGURES

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> ReplicaRecord:
        """Raises `ValueError` for what is no record; keys that are not known are left out, as they
        may be of a later version."""
        try:
            return _records().validate_json(text)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ValueError(f"not a record: {'; '.join(wrong)}") from None


@cache
def _records() -> TypeAdapter[ReplicaRecord]:
    return TypeAdapter(ReplicaRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Where a replica is announced, and as what."""

    redis: RedisAddress
    deployment: str
    """Name of the deployment in Redis."""
    name: str
    """Of the replica, unique in the deployment, for ever."""
    slot: int = 0
    """Its place among the replicas of its role that share a machine: ports count up from it."""
    plan: str = ""
    """Names what it was started by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engagement:
    """What a running replica tells a reconciler that takes over its care."""

    address: str
    """HOST:PORT that it serves at; empty where it does not serve."""
    slot: int = 0
    plan: str = ""
    leaving: bool = False
    num_ranks: int = 1
    """Processes that share its model."""
    http_address: str = ""
    """HOST:PORT where a coordinator answers by HTTP; empty where it does not."""


class Registry(Protocol):
    """The records of one deployment. Every call may raise `StoreUnavailable`."""

    async def announce(self, record: ReplicaRecord) -> None:
        """Begins or renews a replica's lease."""
        ...

    async def withdraw(self, role: Role, name: str) -> None:
        """Ends it."""
        ...

    async def records(self, role: Role) -> list[ReplicaRecord]:
        """The records of a role whose leases run, by name."""
        ...

    async def want(self, counts: Mapping[Role, int]) -> None:
        """So many replicas of these roles are wanted from now on."""
        ...

    async def wanted(self) -> dict[Role, int]:
        """How many are, of the roles of which that was said: each 0 to `REPLICAS_MAX`."""
        ...

    async def note_started(self, number: int) -> None:
        """The deployment has started so many replicas in all."""
        ...

    async def started(self) -> int:
        """What was noted last, 0 to `REPLICA_NUMBER_MAX`; 0 where nothing was."""
        ...

    async def close(self) -> None:
        """Gives back what it holds."""
        ...


class MemoryRegistry:
    """A registry for replicas and coordinators of one process."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` counts seconds; None = the running loop's."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._records: dict[tuple[Role, str], tuple[float, ReplicaRecord]] = {}
        self._wanted: dict[Role, int] = {}
        self._started = 0
        self.failure: OutriderError | None = None
        """What each call raises, while it is set."""

    def forget(self) -> None:
        """Loses everything, as a server does that is started anew without its data."""
        self._records.clear()
        self._wanted.clear()
        self._started = 0

    async def announce(self, record: ReplicaRecord) -> None:
        """See `Registry.announce`."""
        self._check()
        self._records[record.role, record.name] = (self._clock() + LEASE_S, record)

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Registry.withdraw`."""
        self._check()
        self._records.pop((role, name), None)

    async def records(self, role: Role) -> list[ReplicaRecord]:
        """See `Registry.records`."""
        self._check()
        check(role in ROLES, f"{role} is no role")
        now = self._clock()
        return [
            record
            for _, (until, record) in sorted(self._records.items())
            if record.role == role and until > now
        ]

    async def want(self, counts: Mapping[Role, int]) -> None:
        """See `Registry.want`."""
        self._check()
        self._wanted.update(counts)

    async def wanted(self) -> dict[Role, int]:
        """See `Registry.wanted`."""
        self._check()
        return dict(self._wanted)

    async def note_started(self, number: int) -> None:
        """See `Registry.note_started`."""
        self._check()
        self._started = number

    async def started(self) -> int:
        """See `Registry.started`."""
        self._check()
        return self._started

    async def close(self) -> None:
        """Does nothing."""

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Lease:
    """Announces a replica until it is closed. While the registry is away the replica goes on, and
    is announced once that is back."""

    def __init__(self, registry: Registry, record: Callable[[], ReplicaRecord]) -> None:
        """`record()` is what to say now. `close` closes the registry, too."""
        self._registry = registry
        self._record = record
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    async def start(self) -> None:
        """Announces it for the first time, and goes on to. Raises `StoreUnavailable`."""
        await self._registry.announce(self._record())
        self._task = asyncio.create_task(self._run())

    def say_again(self) -> None:
        """Announces the replica at once, as its record has changed."""
        self._soon.set()

    async def _run(self) -> None:
        heard = True
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEWAL_S):
                    await self._soon.wait()
            self._soon.clear()
            try:
                await self._registry.announce(self._record())
                heard = True
            except OutriderError as error:
                if heard:
                    _log.warning("this replica cannot be announced: %s", error)
                heard = False

    async def withdraw(self) -> None:
        """Ends the lease. Repeating it does nothing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            record = self._record()
            with suppress(OutriderError):
                await self._registry.withdraw(record.role, record.name)

    async def close(self) -> None:
        """Withdraws it, and closes the registry."""
        await self.withdraw()
        await self._registry.close()
