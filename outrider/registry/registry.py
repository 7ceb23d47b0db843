"""Which replicas a deployment has: each announces itself regularly, or its record expires.

    record      what a replica announces                         `ReplicaRecord`
    registry    the records of one deployment, in Redis          `RedisRegistry`
    lease       renews one replica's record                      `Lease`

A record lasts `LEASE_S` and is renewed every `RENEWAL_S`. It is never trusted alone: coordinators
ask a replica what it runs before they use it, and detect by themselves that they cannot reach it.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from outrider.limits import REPLICA_NUMBER_MAX, REPLICA_TEXT_MAX
from outrider.sessions.redis_address import RedisAddress
from outrider.settings import between

Role = Literal["coordinator", "target", "draft"]
ROLES: tuple[Role, ...] = get_args(Role)

LEASE_S = 3.0
RENEWAL_S = 1.0
WINDOW_S = 5.0
"""Time constant of the means in `Figures`."""
FIGURE_MAX = 1e12

_STRICT = ConfigDict(strict=True)
_Text = Annotated[str, Field(max_length=REPLICA_TEXT_MAX)]
_Number = Annotated[int, between(0, REPLICA_NUMBER_MAX)]
_Figure = Annotated[float, between(0, FIGURE_MAX)] | None


@dataclass(frozen=True)
class Figures:
    """A replica's load: means over about `WINDOW_S`; None if unknown, or if the figure belongs to
    another role."""

    __pydantic_config__: ClassVar = _STRICT

    busy: _Figure = None
    """Share of the time in which a step ran, 0 to 1; of a coordinator, CPU cores used."""
    fill: _Figure = None
    """Share of a step's places that were taken, 0 to 1."""
    step_ms: _Figure = None
    queue_steps: _Figure = None
    """How long items waited for their step, in steps."""
    kv_usage: _Figure = None
    """Share of the key-value pages that running requests need, 0 to 1."""
    draft_waits: _Figure = None
    """Of a coordinator: share of its drafted rounds that waited for their turn at the draft."""
    acceptance: _Figure = None
    """Of a coordinator: share of the draft tokens that were accepted."""
    look_ahead_hits: _Figure = None
    """Of a coordinator: share of the proposals that were ready before their rounds."""
    tokens_per_second: _Figure = None
    """Of a coordinator."""
    loop_lag_ms: _Figure = None
    """Of a coordinator: how late its event loop is."""


NO_FIGURES = Figures()


@dataclass(frozen=True)
class ReplicaRecord:
    """What a replica announces of itself."""

    __pydantic_config__: ClassVar = _STRICT

    role: Role
    name: _Text
    """Unique in the deployment, for ever: a replica that replaces another has a new name."""
    address: _Text
    """HOST:PORT where it answers."""
    host: _Text
    """Machine that the replica runs on."""
    pid: _Number
    """Its process id on that machine."""
    model: _Text = ""
    weights: _Text = ""
    """See `ReplicaDescription.weights`; empty for a coordinator."""
    device: _Text = ""
    leaving: bool = False
    """Whether it will stop, and gets no more sessions."""
    load: _Number = 0
    """Sessions that it runs."""
    trial_share: Annotated[float, between(0, 1)] = 0.0
    """Of a draft or target on trial: its share of new sessions; 0 = not on trial."""
    figures: Figures = NO_FIGURES

    def to_json(self) -> str:
        """One line."""
        return _RECORDS.dump_json(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "ReplicaRecord":
        """Raises `ValueError` for an invalid record; unknown keys, as of a later version, are
        ignored."""
        try:
            return _RECORDS.validate_json(text)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ValueError(f"not a record: {'; '.join(wrong)}") from None


_RECORDS = TypeAdapter(ReplicaRecord)


@dataclass(frozen=True)
class Membership:
    """Where a replica is announced, and under which name."""

    redis: RedisAddress
    deployment: str
    """Name of the deployment in Redis."""
    name: str
    """See `ReplicaRecord.name`."""
    slot: int = 0
    """Number of the replica among those of its role on one machine. Ports grow with this number."""
    plan: str = ""
    """Name of the plan that started it."""
    trial_share: float = 0.0
    """See `ReplicaRecord.trial_share`."""


@dataclass(frozen=True)
class Engagement:
    """What a running replica reports to a reconciler that takes it over."""

    address: str = ""
    """HOST:PORT where it serves; empty if it does not serve."""
    member: Membership | None = None
    leaving: bool = False
    num_ranks: int = 1
    """Processes that share its model."""
    http_address: str = ""
    """HOST:PORT where a coordinator answers by HTTP; empty if it does not."""
