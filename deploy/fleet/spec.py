"""What each replica of a deployment is made from."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.actor import CoordinatorActor
from draft_service.actor import DraftActor
from outrider.autoscaling import Policy
from outrider.config import (
    LEAST,
    CoordinatorConfig,
    DeploymentConfig,
    DraftConfig,
    TargetConfig,
    is_loopback,
)
from outrider.engine.tensor_parallel.rank_process import RankHost
from outrider.errors import ConfigError, SettingError
from outrider.limits import REPLICAS_MAX
from outrider.registry.membership import Membership
from outrider.registry.registry import ROLES, Role
from outrider.replica.process_setup import available_cores
from outrider.sessions.redis_address import RedisAddress
from outrider.telemetry.destination import Destination
from target_service.actor import TargetActor

from .placement import Placement, are_apart, look_ahead_outcomes
from .ray_cluster import Demand

ACTORS: Mapping[Role, type] = {
    "coordinator": CoordinatorActor, "target": TargetActor, "draft": DraftActor
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """What each replica is to have, from those that all of its role have."""

    placement: Placement
    deployment: str
    """Its name in Redis."""
    log_directory: str
    """See `log_to`."""
    local: bool
    """Whether all replicas share a machine, and so its ports and cores."""
    given: DeploymentConfig
    """The configuration before models and devices were found for it."""
    plans: Mapping[Role, str] = field(default_factory=dict)
    """Once it is settled: what names the plan of each role before that."""

    @property
    def _config(self) -> DeploymentConfig:
        return self.placement.config

    @property
    def redis(self) -> RedisAddress:
        """Where the deployment is known."""
        return self._config.coordinator.redis

    @property
    def policy(self) -> Policy:
        """By what the numbers of replicas follow the load."""
        return self._config.autoscale.policy

    @property
    def counts(self) -> dict[Role, int]:
        """How many replicas of each role there are at first."""
        config = self._config
        num_drafts = 0 if self.placement.draft is None else config.num_drafts
        return {
            "coordinator": config.num_coordinators,
            "target": config.num_targets,
            "draft": num_drafts,
        }

    def bounded(self, counts: Mapping[Role, int]) -> dict[Role, int]:
        """Counts as far as they are possible: there is always a target and a coordinator, and no
        draft where the target or the coordinators draft."""
        most = dict.fromkeys(ROLES, REPLICAS_MAX)
        if self.placement.draft is None:
            most["draft"] = 0
        return {role: min(max(counts[role], LEAST[role]), most[role]) for role in ROLES}

    def check_count(self, role: Role, count: int) -> None:
        """Raises `ConfigError` for a number of replicas that this deployment cannot have."""
        if role == "draft" and count and self.placement.draft is None:
            raise ConfigError(f"draft={count}: {self._no_drafts}; there are no draft replicas")
        if not LEAST[role] <= count <= REPLICAS_MAX:
            raise ConfigError(f"{role}={count}: it must be {LEAST[role]} to {REPLICAS_MAX}")

    @property
    def _no_drafts(self) -> str:
        """Why this deployment has no draft replicas."""
        draft = self._config.draft
        part = "coordinators draft" if draft.drafter.is_lookup else "target drafts"
        return f"with draft_model {draft.model} the {part}"

    @property
    def in_place(self) -> tuple[Role, ...]:
        """Roles of which a replica ends before the one in its place starts: coordinators of one
        machine that serve metrics on a port of their own, which two cannot listen on."""
        destination = Destination.parse(self._config.coordinator.telemetry)
        return ("coordinator",) if self.local and destination.prometheus_port else ()

    @property
    def keeps_ports(self) -> tuple[Role, ...]:
        """Roles of which a replica listens on the ports of the one that it replaces: coordinators
        of one machine, for callers know their ports."""
        return ("coordinator",) if self.local else ()

    @property
    def startup_timeout_s(self) -> float:
        """See `DeploymentConfig`."""
        return self._config.startup_timeout_s

    @property
    def model_timeout_s(self) -> float:
        """See `DeploymentConfig`."""
        return self._config.model_timeout_s

    @property
    def stop_timeout_s(self) -> float:
        """See `DeploymentConfig`."""
        return self._config.stop_timeout_s

    def plan(self, role: Role) -> str:
        """Names what the replicas of a role are made from; nothing that depends on where they have
        been placed."""
        if role in self.plans:
            return self.plans[role]
        made_from = (getattr(self.placement, role), getattr(self._config, role))
        return hashlib.blake2b(repr(made_from).encode(), digest_size=6).hexdigest()

    def demand(self, role: Role, name: str) -> tuple[Demand, type, type]:
        """What a replica asks of the cluster, and the actors of its first rank and of others."""
        placement = self.placement
        demands = {
            "coordinator": placement.coordinator,
            "target": placement.target,
            "draft": placement.draft,
        }
        demand = demands[role]
        if demand is None:
            raise SettingError("draft_model", f"{self._no_drafts}: there are no draft replicas")
        return replace(demand, name=name), ACTORS[role], RankHost

    def config(
        self, role: Role, name: str, slot: int, *, takes_over: bool = False
    ) -> CoordinatorConfig | TargetConfig | DraftConfig:
        """What a replica is told; `slot` is its place among those of its role. One that
        `takes_over` begins while another replica of this deployment still has that place."""
        config = self._config
        member = Membership(
            redis=self.redis, deployment=self.deployment, name=name,
            slot=slot if self.local else 0, plan=self.plan(role),
        )  # fmt: skip
        if role == "coordinator":
            own = config.coordinator
            return replace(
                own, membership=member, grpc_port=self._port(own.grpc_port, slot),
                port=self._port(own.port, slot), shares_ports=self.local,
                takes_over_ports=takes_over and self.local,
            )  # fmt: skip
        if role == "target":
            port = self._port(config.target.port, slot)
            return replace(config.target, membership=member, port=port)
        return replace(config.draft, membership=member, port=self._port(config.draft.port, slot))

    def settled(self, nodes: Sequence[str], model_nodes: Collection[str]) -> FleetSpec:
        """With what depends on where the actors have been placed: on the machines `nodes`, those
        with models on `model_nodes`. Raises `SettingError` for servers that others would not
        reach."""
        config = self._config
        if len(set(nodes)) > 1 and is_loopback(config.target.host):
            raise SettingError(
                "host",
                f"the actors were placed on {len(set(nodes))} machines, but their servers bind "
                f"{config.target.host}; give --host 0.0.0.0, with --internal-tls-dir and keys, or "
                "with --insecure on a trusted network",
            )
        apart = are_apart(
            config,
            same_node=len(set(model_nodes)) <= 1,
            num_cores=available_cores() if self.local else 0,
        )
        told = replace(
            config.coordinator,
            drafting_delays=not apart,
            look_ahead=look_ahead_outcomes(config, apart=apart),
        )
        config = replace(config, coordinator=told)
        plans = {role: self.plan(role) for role in ROLES}
        return replace(self, placement=replace(self.placement, config=config), plans=plans)

    def _port(self, port: int, slot: int) -> int:
        """Those that share a machine count up from the first one's port."""
        return port + slot if port and self.local else port
