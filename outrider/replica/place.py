"""Where actors run."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass


class Place(NamedTuple):
    """Where an actor runs."""

    pid: int
    node: str  # name of the machine; actors on the same machine reach each other over loopback


class PlacedActor:
    """Base class of actors on Ray."""

    async def ping(self) -> Place:
        """Returns where the actor runs."""
        return Place(os.getpid(), socket.gethostname())
