"""The replicas of a deployment, as this coordinator knows them: `GET /api/fleet`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel

from coordinator.service import CoordinatorService


class FleetReplica(BaseModel):
    """One replica."""

    role: Literal["coordinator", "target", "draft"]
    name: str
    model: str
    node: str
    """Its machine; empty where it is not known."""
    device: str
    load: int
    """Sessions: of a coordinator all that it runs, of others those that the coordinator that says
    this has there."""
    state: Literal["serving", "away", "leaving", "joining"]
    here: bool
    """Whether it is the coordinator that says this."""
    figures: dict[str, float | None]
    """What it has said of its work lately, as `outrider status --json` has it."""


class Fleet(BaseModel):
    """Coordinators, targets and drafts."""

    replicas: list[FleetReplica]
    heard_ms_ago: float | None
    """When the registry was last read; null where the deployment has none."""


def told(service: CoordinatorService) -> dict[str, Any]:
    """All of them. Raises `Unavailable` before the coordinator has started."""
    fleet = service.fleet
    seen = fleet.replicas(service.model.name, service.num_running, service.figures)
    return {"replicas": [asdict(one) for one in seen], "heard_ms_ago": fleet.heard_ms_ago}
