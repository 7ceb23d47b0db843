"""The types of the registry, in which a deployment's replicas announce themselves.

A record expires after `LEASE_S`. Its replica renews the record every `RENEWAL_S`. Before a
coordinator uses a replica, the coordinator asks the replica for its description.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter

from outrider.limits import REPLICA_NUMBER_MAX, REPLICA_TEXT_MAX
from outrider.sessions.redis_address import RedisAddress
from outrider.settings import between

Role = Literal["coordinator", "target", "draft"]
ROLES: tuple[Role, ...] = get_args(Role)

LEASE_S = 2.0
RENEWAL_S = 0.5
WINDOW_S = 5.0
"""Time constant of the decaying means in `Figures`."""
FIGURE_MAX = 1e12

_STRICT = ConfigDict(strict=True)
_Text = Annotated[str, Field(max_length=REPLICA_TEXT_MAX)]
_Number = Annotated[int, between(0, REPLICA_NUMBER_MAX)]
_Figure = Annotated[float, between(0, FIGURE_MAX)] | None


@dataclass(frozen=True)
class Figures:
    """A replica's load, as means over about `WINDOW_S`. None = unknown, or not used by the role."""

    __pydantic_config__: ClassVar = _STRICT

    busy: _Figure = None
    """For a draft or target, the share of the time in which a step ran, 0 to 1. For a coordinator,
    the number of CPU cores that it used."""
    fill: _Figure = None
    """Number of requests in a step, divided by the maximum, 0 to 1."""
    step_ms: _Figure = None
    queue_steps: _Figure = None
    """Time that requests waited for a step, divided by the duration of a step."""
    kv_usage: _Figure = None
    """Share of the KV cache's pages that running requests need, 0 to 1."""
    # Only coordinators have the following figures.
    draft_waits: _Figure = None
    """Share of the draft service's proposals whose time in the queue exceeded the drafting time."""
    acceptance: _Figure = None
    look_ahead_hits: _Figure = None
    """Share of the draft service's proposals that were ready when their rounds began."""
    tokens_per_second: _Figure = None
    loop_lag_ms: _Figure = None


NO_FIGURES = Figures()


@dataclass(frozen=True)
class ReplicaRecord:
    """What a replica announces about itself."""

    __pydantic_config__: ClassVar = _STRICT

    role: Role
    name: _Text
    """A name that no other replica of the deployment has or had."""
    address: _Text
    """HOST:PORT of the replica's gRPC server."""
    host: _Text
    pid: _Number
    model: _Text = ""
    weights: _Text = ""
    """`ReplicaDescription.weights` of a draft or target; empty for a coordinator."""
    device: _Text = ""
    leaving: bool = False
    """A leaving replica is about to stop, and gets no more sessions."""
    load: _Number = 0
    trial_share: Annotated[float, between(0, 1)] = 0.0
    """Share of the new sessions that a draft or target on trial gets; 0 = not on trial."""
    figures: Figures = NO_FIGURES

    def to_json(self) -> str:
        """Returns one line."""
        return _RECORDS.dump_json(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "ReplicaRecord":
        """Ignores unknown keys, which a later version of Outrider may have added. Raises
        `ValueError` for an invalid record."""
        return _RECORDS.validate_json(text)


_RECORDS = TypeAdapter(ReplicaRecord)


@dataclass(frozen=True)
class Membership:
    """Where and under which name a replica announces itself."""

    redis: RedisAddress
    deployment: str
    name: str
    slot: int = 0
    """The replica's index among the replicas of its role, from which its port numbers follow. 0
    unless all replicas run on one machine."""
    plan: str = ""
    """Hash of the settings with which the replica was started."""
    trial_share: float = 0.0


@dataclass(frozen=True)
class Engagement:
    """What a running replica reports to a new reconciler (the actor that manages replicas)."""

    address: str = ""
    """HOST:PORT of the replica's gRPC server; empty until the replica serves."""
    member: Membership | None = None
    leaving: bool = False
    num_ranks: int = 1
    """Number of processes among which the replica's model is divided."""
    http_address: str = ""
    """HOST:PORT of a coordinator's HTTP server; empty = none."""
