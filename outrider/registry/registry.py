"""Which replicas there are: each says so itself, again and again, or is forgotten.

    record      what a replica says of itself                    `ReplicaRecord`
    registry    the records of one deployment, in Redis          `redis_registry.py`
    announcer   renews one replica's record                      `lease.py`

A record is a lease: it lasts `LEASE_S` and is renewed each `RENEWAL_S`. Nothing is decided by it
alone: coordinators ask a replica themselves what it runs before they use it, and notice by
themselves when one cannot be reached.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final, Literal, Protocol, Self, get_args

from outrider.errors import OutriderError, check
from outrider.limits import REPLICA_NUMBER_MAX, REPLICA_TEXT_MAX
from outrider.registry.load import NO_FIGURES, Figures

Role = Literal["coordinator", "target", "draft"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

LEASE_S: Final = 3.0
RENEWAL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """What a replica says of itself."""

    role: Role
    name: str
    """Unique in the deployment, for ever: a replica that takes another's place has another one."""
    address: str
    """HOST:PORT that it answers at."""
    host: str
    """Machine that it runs on ..."""
    pid: int
    """... and its process."""
    model: str = ""
    weights: str = ""
    """Fingerprint of what it runs, see `ReplicaDescription.weights`; empty for a coordinator."""
    device: str = ""
    leaving: bool = False
    """Whether it is to be left: it ends soon."""
    load: int = 0
    """Of a coordinator the sessions that it runs; of others the items that they were sent since
    they began."""
    figures: Figures = NO_FIGURES

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises `ValueError` for what is no record; keys that are not known are left out, as they
        may be of a later version."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("a record is an object")
        known = {one.name: one for one in fields(cls)}
        found = {name: value for name, value in values.items() if name in known}
        wrong = [
            name
            for name, value in found.items()
            if name != "figures"
            and type(value).__name__ != ("str" if name == "role" else known[name].type)
        ]
        missing = {"role", "name", "address", "host", "pid"} - found.keys()
        if wrong or missing or found["role"] not in ROLES:
            raise ValueError(f"not a record: {', '.join(sorted({*wrong, *missing, 'role'}))}")
        for name, value in found.items():
            if isinstance(value, str) and len(value) > REPLICA_TEXT_MAX:
                raise ValueError(f"{name}: is longer than {REPLICA_TEXT_MAX} characters")
            if isinstance(value, int) and not 0 <= value <= REPLICA_NUMBER_MAX:
                raise ValueError(f"{name}: {value} is not 0 to {REPLICA_NUMBER_MAX}")
        figures = Figures.from_values(found.pop("figures", {}))
        return cls(**found, figures=figures)


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


RegistrySnapshot = tuple[dict[tuple[Role, str], tuple[float, ReplicaRecord]], dict[Role, int], int]
"""Records with the ends of their leases, what is wanted, and how many were started."""


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

    def snapshot(self) -> RegistrySnapshot:
        """All that it has now; later calls do not change it."""
        return dict(self._records), dict(self._wanted), self._started

    def restore(self, snapshot: RegistrySnapshot) -> None:
        """Goes back to a snapshot, as a server does that lost its last writes in a crash. Leases
        have run on."""
        records, wanted, self._started = snapshot
        self._records, self._wanted = dict(records), dict(wanted)

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
            for (_, _), (until, record) in sorted(self._records.items())
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
        """See `Registry.close`: nothing."""

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
