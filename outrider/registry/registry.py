"""The types of the registry, in which a deployment's replicas announce themselves.

A record expires after `LEASE_S`. Its replica renews the record every `RENEWAL_S`. Before a
coordinator uses a replica, the coordinator asks the replica for its description.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter

from outrider.foundation.settings import between
from outrider.limits import REPLICA_NUMBER_MAX, REPLICA_TEXT_MAX, REPLICAS_MAX
from outrider.redis.address import RedisAddress

Role = Literal["coordinator", "target", "draft"]
ROLES: tuple[Role, ...] = get_args(Role)

LEASE_S = 2.0
RENEWAL_S = 0.5
STARTS_LEASE_S = 60.0
"""Lease of the announced `Starts`. A reconciler that dies is restarted within this time, and
continues its work, so requests go on waiting for it."""
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
class Starts:
    """What the reconciler (the actor that manages replicas) announces about the replicas of a role
    that do not serve yet."""

    __pydantic_config__: ClassVar = _STRICT

    role: Role
    names: Annotated[tuple[_Text, ...], Field(max_length=REPLICAS_MAX)] = ()
    """Replicas that are being started."""
    expected: bool = False
    """Whether a replica is being started, or will be after a pause. False if so many have failed in
    a row after which the role is given up."""
    num_failures: _Number = 0
    """Number of replicas in a row that failed to start or soon ended."""
    last_s: _Figure = None
    """Time that the last start took, s; None = no replica with this model has started."""

    @property
    def details(self) -> str:
        """What is known of earlier starts, for example `last start took 31 s`."""
        # The first failure is usually the death of the replica that is being replaced.
        after = f"after {self.num_failures} failures in a row" if self.num_failures > 1 else ""
        took = "" if self.last_s is None else f"last start took {self.last_s:.0f} s"
        return ", ".join(filter(None, (after, took)))

    def __str__(self) -> str:
        """For example `target-3 is starting, last start took 31 s`."""
        if not (self.names or self.expected):
            return f"no start of a {self.role} is announced"
        what = f"a {self.role} will be started again"
        if self.names:
            what = f"{' and '.join(self.names)} {'is' if len(self.names) == 1 else 'are'} starting"
        return ", ".join(filter(None, (what, self.details)))

    def without(self, names: Collection[str]) -> "Starts":
        """A copy without these replicas. If no other is being started, none is expected."""
        left = tuple(name for name in self.names if name not in names)
        is_expected = self.expected and (bool(left) or not self.names)
        return replace(self, names=left, expected=is_expected)

    @staticmethod
    def to_json(each: "Sequence[Starts]") -> str:
        """Returns one line."""
        return _STARTS.dump_json(list(each)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "dict[Role, Starts]":
        """Ignores unknown keys. Raises `ValueError` for invalid text."""
        return {start.role: start for start in _STARTS.validate_json(text)}


_STARTS = TypeAdapter(Annotated[list[Starts], Field(max_length=len(ROLES))])


@dataclass(frozen=True)
class Membership:
    """Where and under which name a replica announces itself."""

    redis: RedisAddress
    deployment: str
    name: str
    index: int = 0
    """The replica's index among the replicas of its role, from which its port numbers follow. 0
    unless all replicas run on one machine."""
    plan: str = ""
    """Hash of the settings with which the replica was started."""
    trial_share: float = 0.0


@dataclass(frozen=True)
class Engagement:
    """What a running replica reports to the reconciler (the actor that manages replicas): after its
    start, and again to a reconciler that takes it over."""

    address: str = ""
    """HOST:PORT of the replica's gRPC server; empty until the replica serves."""
    member: Membership | None = None
    leaving: bool = False
    num_ranks: int = 1
    """Number of processes among which the replica's model is divided."""
    http_address: str = ""
    """HOST:PORT of a coordinator's HTTP server; empty = none."""
