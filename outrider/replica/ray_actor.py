"""Where actors run."""

from __future__ import annotations

import os
import socket
import sys
from typing import NamedTuple


class ActorLocation(NamedTuple):
    """Where an actor runs."""

    pid: int
    node: str  # name of the machine; actors on the same machine reach each other over loopback
    ray_node: str = ""  # Ray's id of the node; empty outside Ray


class RayActor:
    """Base class of actors on Ray."""

    async def ping(self) -> ActorLocation:
        """Returns where the actor runs."""
        return ActorLocation(os.getpid(), socket.gethostname(), _ray_node())


def _ray_node() -> str:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_node_id())
