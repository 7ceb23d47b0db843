"""In which order a coordinator's actor ends what it consists of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.host import CoordinatorHost
from outrider.config import CoordinatorConfig


class Part:
    """Says when it is ended."""

    def __init__(self, name: str, heard: list[str], *, fails: bool = False) -> None:
        self._name = name
        self._heard = heard
        self._fails = fails

    def __getattr__(self, verb: str) -> Any:
        async def end(*_: float) -> None:
            self._heard.append(f"{verb} {self._name}")
            await asyncio.sleep(0.01)
            if self._fails:
                raise RuntimeError(f"{self._name} fails")

        return end


class Serving(Part):
    """One whose lease is ended at once."""

    def hand_over(self) -> None:
        self._heard.append("end lease")


async def test_the_service_ends_once_nothing_runs() -> None:
    """It follows the replicas: a target that is replaced meanwhile is found by what still runs. The
    lease of its sessions ends before any stream does."""
    heard: list[str] = []

    host = CoordinatorHost(CoordinatorConfig())
    host.announcer, host.server = (Part(name, heard) for name in ("announcer", "server"))  # type: ignore[assignment]
    host.service = Serving("service", heard)  # type: ignore[assignment]
    await host.stop(1.0)
    assert heard == [
        "end lease", "withdraw announcer", "stop server", "close service",
        "close announcer",
    ]  # fmt: skip


async def test_it_ends_everything_whatever_one_part_raises() -> None:
    """An error of a part that is closed is raised in the end."""
    heard: list[str] = []
    names = ("announcer", "server", "http", "gate", "exports")
    host = CoordinatorHost(CoordinatorConfig())
    host.announcer, host.server, host.http, host.access, host.exports = (
        Part(name, heard, fails=True)  # type: ignore[assignment]
        for name in names
    )
    host.service = Serving("service", heard, fails=True)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="fails"):
        await host.stop(1.0)
    assert heard == [
        "end lease", "withdraw announcer", "stop server", "stop http", "close service",
        "close announcer", "close gate", "close exports",
    ]  # fmt: skip
