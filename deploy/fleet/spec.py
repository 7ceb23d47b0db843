"""What each replica of a deployment is made from: its configuration, its share of the cluster, and
the device that it then has. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.actor import CoordinatorActor
from draft_service.actor import DraftActor
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
from outrider.limits import LOOK_AHEAD_DEFAULT, REPLICAS_MAX
from outrider.registry.registry import ROLES, Membership, Role
from outrider.replica.process_setup import available_cores
from outrider.settings import checking
from outrider.telemetry.destination import Destination
from target_service.actor import TargetActor

from .ray_cluster import Demand

ACTORS: Mapping[Role, type] = {
    "coordinator": CoordinatorActor, "target": TargetActor, "draft": DraftActor
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """What each replica is to have, from those that all of its role have."""

    config: DeploymentConfig
    """With models' files, devices and GPUs resolved."""
    given: DeploymentConfig
    """The configuration before that."""
    cluster_gpus: float
    """Of all machines together, by which shares were chosen."""
    demands: Mapping[Role, Demand]
    """What the actors of each role ask for. No draft where the target drafts, or a look-up."""
    deployment: str
    """Its name in Redis."""
    log_directory: str
    """See `log_to`."""
    local: bool
    """Whether all replicas share a machine, and so its ports and cores."""
    plans: Mapping[Role, str] = field(default_factory=dict)
    """Once it is settled: what named the plan of each role before that."""

    @property
    def counts(self) -> dict[Role, int]:
        """How many replicas of each role there are at first."""
        return {
            "coordinator": self.config.num_coordinators,
            "target": self.config.num_targets,
            "draft": self.config.num_drafts if "draft" in self.demands else 0,
        }

    def bounded(self, counts: Mapping[Role, int]) -> dict[Role, int]:
        """Counts as far as they are possible: there is always a target and a coordinator, and no
        draft where the target or the coordinators draft."""
        return {
            role: min(max(counts[role], LEAST[role]), REPLICAS_MAX) if role in self.demands else 0
            for role in ROLES
        }

    def check_count(self, role: Role, count: int) -> None:
        """Raises `ConfigError` for a number of replicas that this deployment cannot have."""
        if count and role not in self.demands:
            raise ConfigError(f"draft={count}: {self._no_drafts}; there are no draft replicas")
        if not LEAST[role] <= count <= REPLICAS_MAX:
            raise ConfigError(f"{role}={count}: it must be {LEAST[role]} to {REPLICAS_MAX}")

    @property
    def _no_drafts(self) -> str:
        draft = self.config.draft
        part = "coordinators draft" if draft.drafter.is_lookup else "target drafts"
        return f"with draft_model {draft.model} the {part}"

    @property
    def in_place(self) -> tuple[Role, ...]:
        """Roles of which a replica ends before the one in its place starts: coordinators of one
        machine that serve metrics on a port of their own, which two cannot listen on."""
        destination = Destination.parse(self.config.coordinator.telemetry)
        return ("coordinator",) if self.local and destination.prometheus_port else ()

    @property
    def keeps_ports(self) -> tuple[Role, ...]:
        """Roles of which a replica listens on the ports of the one that it replaces: coordinators
        of one machine, for callers know their ports."""
        return ("coordinator",) if self.local else ()

    def plan(self, role: Role) -> str:
        """Names what the replicas of a role are made from; nothing that depends on where they have
        been placed."""
        if role in self.plans:
            return self.plans[role]
        made_from = (self.demands.get(role), getattr(self.config, role))
        return hashlib.blake2b(repr(made_from).encode(), digest_size=6).hexdigest()

    def demand(self, role: Role, name: str) -> tuple[Demand, type, type]:
        """What a replica asks of the cluster, and the actors of its first rank and of others."""
        if role not in self.demands:
            raise SettingError("draft_model", f"{self._no_drafts}: there are no draft replicas")
        return replace(self.demands[role], name=name), ACTORS[role], RankHost

    def replica_config(
        self, role: Role, name: str, slot: int, *, takes_over: bool = False
    ) -> CoordinatorConfig | TargetConfig | DraftConfig:
        """What a replica is told; `slot` is its place among those of its role. One that
        `takes_over` begins while another replica of this deployment still has that place."""

        def port(first: int) -> int:
            return first + slot if first and self.local else first

        member = Membership(
            redis=self.config.coordinator.redis, deployment=self.deployment, name=name,
            slot=slot if self.local else 0, plan=self.plan(role),
        )  # fmt: skip
        if role == "coordinator":
            own = self.config.coordinator
            with checking(own):
                return replace(
                    own, membership=member, grpc_port=port(own.grpc_port), port=port(own.port),
                    shares_ports=self.local, takes_over_ports=takes_over and self.local,
                )  # fmt: skip
        model = self.config.target if role == "target" else self.config.draft
        with checking(model):
            return replace(model, membership=member, port=port(model.port))

    def settled(self, nodes: Sequence[str], model_nodes: Collection[str]) -> FleetSpec:
        """With what depends on where the actors have been placed: on the machines `nodes`, those
        with models on `model_nodes`. Raises `SettingError` for servers that others would not
        reach."""
        config = self.config
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
        coordinator = replace(
            config.coordinator,
            drafting_delays=not apart,
            look_ahead=look_ahead_outcomes(config, apart=apart),
        )
        plans = {role: self.plan(role) for role in ROLES}
        return replace(self, config=replace(config, coordinator=coordinator), plans=plans)


def plan_fleet(
    given: DeploymentConfig,
    found: DeploymentConfig,
    amounts: Mapping[str, float],
    deployment: str = "",
    log_directory: str = "",
    *,
    local: bool,
) -> FleetSpec:
    """`found` is what was `given`, with the models' files and Redis; `amounts` are the cluster's
    resources. Shares GPUs out where there are any and the configuration leaves it open: one for
    each rank of a model, or an equal fraction where there are fewer; none for what runs no model.
    Raises `SettingError` where a device was asked for that no actor gets, and for several ranks of
    what runs no model."""
    config = share_cores(found, available_cores()) if local else found
    _check_ranks(config)
    target, draft, coordinator = config.target, config.draft, config.coordinator
    drafts = draft.drafter.model is not None
    default_gpus, cluster_gpus = 0.0, amounts.get("GPU", 0.0)
    if cluster_gpus > 0 and target.emulated is None:
        num_ranks = target.tensor_parallel_size * config.num_targets
        if drafts:
            num_ranks += draft.tensor_parallel_size * config.num_drafts
        default_gpus = 1.0 / math.ceil(num_ranks / max(1, int(cluster_gpus)))
    target_gpus, target_device = _device("target", target.device, target.num_gpus, default_gpus)
    draft_gpus, draft_device = 0.0, "cpu"
    if drafts:
        draft_gpus, draft_device = _device("draft", draft.device, draft.num_gpus, default_gpus)
    asked: dict[Role, tuple[float, float, int]] = {
        "coordinator": (coordinator.num_cpus, 0.0, 1),
        "target": (target.num_cpus, target_gpus, target.tensor_parallel_size),
        "draft": (draft.num_cpus, draft_gpus, draft.tensor_parallel_size),
    }
    demands = {
        role: Demand(role, *amount, _resources(f"{role}_resources", config))
        for role, amount in asked.items()
    }
    if not drafts:
        del demands["draft"]
    return FleetSpec(
        config=replace(
            config,
            target=replace(target, device=target_device, num_gpus=target_gpus),
            draft=replace(draft, device=draft_device, num_gpus=draft_gpus),
        ),
        given=given, cluster_gpus=cluster_gpus, demands=demands, deployment=deployment,
        log_directory=log_directory, local=local,
    )  # fmt: skip


def share_cores(config: DeploymentConfig, num_cores: int) -> DeploymentConfig:
    """For one machine: where several targets have a model and no number of threads is configured,
    an equal share of the cores, for else each would use all of them."""
    if config.num_targets == 1 or config.target.num_threads or config.target.emulated is not None:
        return config
    num_ranks = config.num_targets * config.target.tensor_parallel_size
    num_threads = max(1, num_cores // num_ranks)
    return replace(config, target=replace(config.target, num_threads=num_threads))


def look_ahead_outcomes(config: DeploymentConfig, *, apart: bool) -> int:
    """How many outcomes of a round the draft is to work out while the target verifies: what the
    configuration says, else some where they are `apart`, and none where no model drafts."""
    if config.coordinator.look_ahead is not None:
        return config.coordinator.look_ahead
    model = config.draft.drafter.model
    if model is None or model.reads_features:
        return 0
    return LOOK_AHEAD_DEFAULT if apart else 0


def are_apart(config: DeploymentConfig, *, same_node: bool, num_cores: int) -> bool:
    """Whether neither model waits for the other's cores or device. `config` is a spec's;
    `num_cores` are those of the node that both share, as far as they are known (0 = they are
    not). Where no model drafts, the coordinators do, on a core each."""
    target, draft = config.target, config.draft
    if not same_node or target.emulated is not None:
        return True
    on_devices = [service.device.startswith("cuda") for service in (target, draft)]
    if all(on_devices):  # Where there are too few, each has a part of one.
        return max(target.num_gpus or 0, draft.num_gpus or 0) >= 1
    if any(on_devices):
        return True
    num_verifying, num_drafting = (
        service.num_threads * service.tensor_parallel_size * count
        for service, count in ((target, config.num_targets), (draft, config.num_drafts))
    )
    if draft.drafter.model is None:
        num_drafting = config.num_coordinators
    return min(num_verifying, num_drafting) > 0 and num_verifying + num_drafting <= num_cores


def _resources(key: str, config: DeploymentConfig) -> dict[str, float]:
    """Of `NAME=AMOUNT,...`. Raises `SettingError`."""
    text: str = getattr(config, key)
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, amount = part.partition("=")
        if not name or name in ("CPU", "GPU") or not _is_amount(amount) or name in found:
            raise SettingError(
                key, f"{text!r} is wrong; it must be NAME=AMOUNT, with commas between several, "
                "of resources that Ray knows by name other than CPU and GPU",
            )  # fmt: skip
        found[name] = float(amount)
    return found


def _is_amount(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _check_ranks(config: DeploymentConfig) -> None:
    emulated = config.target.emulated is not None
    drafts = config.draft.drafter.model is not None
    for key, service, runs_model in (
        ("tensor_parallel_size", config.target, not emulated),
        ("draft_tensor_parallel_size", config.draft, not emulated and drafts),
    ):
        if service.tensor_parallel_size > 1 and not runs_model:
            raise SettingError(
                key, f"{service.tensor_parallel_size} given, but no model runs that could be shared"
            )


def _device(
    role: str, device: str, num_gpus: float | None, default_gpus: float
) -> tuple[float, str]:
    """The GPUs to ask for, and the device that the actor then uses."""
    wants_gpu = device.startswith("cuda")
    if device == "cpu":
        if num_gpus:
            raise SettingError(f"{role}_num_gpus", f"{num_gpus:g} is of no use with device cpu")
        return 0.0, "cpu"
    asked = default_gpus if num_gpus is None else num_gpus
    if wants_gpu and asked == 0:
        raise SettingError(
            "device",
            f"{device} needs a GPU, but the {role} gets none: the cluster has none, or "
            f"--{role}-num-gpus is 0",
        )
    return asked, (device if wants_gpu else "cuda" if asked > 0 else "cpu")
