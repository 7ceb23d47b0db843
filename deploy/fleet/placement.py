"""What each actor asks of the cluster, and which device it then has. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.config import DeploymentConfig
from outrider.errors import SettingError
from outrider.limits import LOOK_AHEAD_DEFAULT

from .ray_cluster import Demand

COORDINATOR, TARGET, DRAFT = "coordinator", "target", "draft"


@dataclass(frozen=True, slots=True)
class Placement:
    """The configuration with devices and GPUs resolved, and the demand of each role's actors."""

    config: DeploymentConfig
    cluster_gpus: float
    """Of all machines together, by which shares were chosen."""
    target: Demand
    draft: Demand | None
    """None where no replica drafts: the target itself does, or a look-up."""
    coordinator: Demand


def plan_placement(config: DeploymentConfig, resources: Mapping[str, float]) -> Placement:
    """Shares GPUs out where there are any and the configuration leaves it open: one for each rank
    of a model, or an equal fraction where there are fewer; none for what runs no model. An actor
    with a GPU runs its model there. Raises `SettingError` where a device was asked for that no
    actor gets, and for several ranks of what runs no model."""
    target_ranks, draft_ranks = _ranks(config)
    default_gpus, cluster_gpus = 0.0, resources.get("GPU", 0.0)
    if cluster_gpus > 0 and config.target.emulated is None:
        num_ranks = target_ranks * config.num_targets
        if config.draft.drafter.model:
            num_ranks += draft_ranks * config.num_drafts
        default_gpus = 1.0 / math.ceil(num_ranks / max(1, int(cluster_gpus)))
    target_gpus, target_device = _device(
        "target", config.target.device, config.target.num_gpus, default_gpus
    )
    draft_resources = _resources("draft_resources", config.draft_resources)
    draft_gpus, draft_device = 0.0, "cpu"
    if config.draft.drafter.model is not None:
        draft_gpus, draft_device = _device(
            "draft", config.draft.device, config.draft.num_gpus, default_gpus
        )
    return Placement(
        config=replace(
            config,
            target=replace(config.target, device=target_device, num_gpus=target_gpus),
            draft=replace(config.draft, device=draft_device, num_gpus=draft_gpus),
        ),
        cluster_gpus=cluster_gpus,
        target=Demand(
            TARGET,
            config.target.num_cpus,
            target_gpus,
            target_ranks,
            _resources("target_resources", config.target_resources),
        ),
        draft=None
        if config.draft.drafter.model is None
        else Demand(
            DRAFT,
            config.draft.num_cpus,
            draft_gpus,
            draft_ranks,
            draft_resources,
        ),
        coordinator=Demand(
            COORDINATOR,
            config.coordinator.num_cpus,
            0.0,
            1,
            _resources("coordinator_resources", config.coordinator_resources),
        ),
    )


def share_cores(config: DeploymentConfig, num_cores: int) -> DeploymentConfig:
    """For one machine: where several targets have a model and nobody says how many threads each
    has, an equal share of the cores, for else each would use all of them."""
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
    """Whether neither model waits for the other's cores or device. `config` is a placement's;
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


def _resources(key: str, text: str) -> dict[str, float]:
    """Of `NAME=AMOUNT,...`. Raises `SettingError`."""
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


def _ranks(config: DeploymentConfig) -> tuple[int, int]:
    """Of the target and of the draft."""
    emulated = config.target.emulated is not None
    for key, service, runs_model in (
        ("tensor_parallel_size", config.target, not emulated),
        (
            "draft_tensor_parallel_size",
            config.draft,
            not emulated and config.draft.drafter.model is not None,
        ),
    ):
        if service.tensor_parallel_size > 1 and not runs_model:
            raise SettingError(
                key, f"{service.tensor_parallel_size} given, but no model runs that could be shared"
            )
    return config.target.tensor_parallel_size, config.draft.tensor_parallel_size


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
