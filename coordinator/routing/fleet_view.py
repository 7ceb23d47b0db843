"""What a coordinator knows of the replicas of its deployment, for people who look."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.registry.registry import NO_FIGURES, Figures, ReplicaRecord, Role

from .replica_pool import ReplicaPool

State = Literal["serving", "away", "leaving", "joining"]
"""`away`: it could not be reached; `leaving`: it ends soon; `joining`: it is announced, and has not
said yet what it runs, or does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenReplica:
    """One replica, as this coordinator sees it."""

    role: Role
    name: str
    model: str
    node: str
    """Machine that it runs on; empty where that is not known."""
    device: str
    load: int
    """Sessions: of a coordinator all that it runs, of others those that this coordinator has
    there."""
    state: State
    here: bool
    """Whether it is the coordinator that says this."""
    figures: Figures = NO_FIGURES


class FleetView:
    """Puts together what the registry had when it was last read, and what this coordinator has
    found out by itself. Nothing is asked of anybody, however many look."""

    def __init__(
        self, own_name: str, targets: ReplicaPool[Any, Any], drafts: ReplicaPool[Any, Any]
    ) -> None:
        """`own_name` is what the coordinator is called in the session store: behind the name of its
        deployment, if it has one."""
        self._own_name = own_name.rpartition("/")[2]
        self._pools: tuple[ReplicaPool[Any, Any], ...] = (targets, drafts)
        self._records: dict[Role, dict[str, ReplicaRecord]] = {}
        self._heard_at: float | None = None

    def hear(self, role: Role, records: Sequence[ReplicaRecord]) -> None:
        """What the registry has of a role now."""
        self._records[role] = {record.name: record for record in records}
        self._heard_at = asyncio.get_running_loop().time()

    @property
    def heard_ms_ago(self) -> float | None:
        """How long ago the registry was read; None where there is none."""
        if self._heard_at is None:
            return None
        return (asyncio.get_running_loop().time() - self._heard_at) * 1e3

    def replicas(self, model: str, load: int, figures: Figures) -> list[SeenReplica]:
        """All of them: coordinators, targets, drafts, each role by name. This coordinator serves
        `model`, runs `load` sessions, and says these `figures` of itself."""
        own = SeenReplica(
            role="coordinator", name=self._own_name, model=model, node=socket.gethostname(),
            device="", load=load, state="serving", here=True, figures=figures,
        )  # fmt: skip
        peers = [
            _announced(record, "leaving" if record.leaving else "serving", record.load)
            for record in self._records.get("coordinator", {}).values()
            if record.name != self._own_name
        ]
        seen = sorted([own, *peers], key=lambda one: one.name)
        for pool in self._pools:
            seen += self._of(pool)
        return seen

    def _of(self, pool: ReplicaPool[Any, Any]) -> list[SeenReplica]:
        records = self._records.get(pool.role, {})
        seen = []
        for name, office in pool.offices.items():
            state: State = "serving"
            if office.leaving:
                state = "leaving"
            elif office.away:
                state = "away"
            record = records.get(name)
            seen.append(
                SeenReplica(
                    role=pool.role,
                    name=name,
                    model=office.description.model,
                    node="" if record is None else record.host,
                    device="" if record is None else record.device,
                    load=office.num_boxes,
                    state=state,
                    here=False,
                    figures=NO_FIGURES if record is None else record.figures,
                )
            )
        seen += [
            _announced(record, "leaving" if record.leaving else "joining", 0)
            for name, record in records.items()
            if name not in pool.offices
        ]
        return sorted(seen, key=lambda one: one.name)


def _announced(record: ReplicaRecord, state: State, load: int) -> SeenReplica:
    """One of which no more is known than it says of itself."""
    return SeenReplica(
        role=record.role, name=record.name, model=record.model, node=record.host,
        device=record.device, load=load, state=state, here=False, figures=record.figures,
    )  # fmt: skip
